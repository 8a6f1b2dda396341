"""Training under a limit of memory, and how fast the disk tier is beside the disk."""
