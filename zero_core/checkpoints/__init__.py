"""What is written of a run, checked, and read back."""
