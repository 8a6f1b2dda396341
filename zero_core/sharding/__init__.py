"""What a rank keeps, and when which part of it moves."""
