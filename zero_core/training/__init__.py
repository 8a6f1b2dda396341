"""One attempt at a job, from its directory to its outcome."""
