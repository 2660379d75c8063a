"""Session fixtures: mlflow."""
