"""The embedded stack: everything the service needs, on one machine, in one directory."""
