"""Session fixtures: sandbox."""
