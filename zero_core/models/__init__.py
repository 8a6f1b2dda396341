"""Model directories in and out."""
