"""Who holds how many bytes, and the buffers that are used again and again."""
