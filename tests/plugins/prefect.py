"""Session fixtures: prefect."""
