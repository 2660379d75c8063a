"""Session fixtures: trainer."""
