"""A plan's memory beside what ranks take."""
