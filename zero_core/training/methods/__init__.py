"""Training methods, one file each: an objective makes a loss and metrics of token scores."""
