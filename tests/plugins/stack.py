"""Session fixtures: stack."""
