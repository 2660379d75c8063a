"""Experiment tracking. `open_tracker` gives what the loop logs to; MLflow itself is imported in mlflow_writer.py alone."""

from infra.tracking.tracker import MlflowTracker, NullTracker, TrackerUnreachable, open_tracker

__all__ = ["MlflowTracker", "NullTracker", "TrackerUnreachable", "open_tracker"]
