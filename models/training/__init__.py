"""The trainer: batches, packing, the step, checkpoints, and the long-lived worker group that the loop talks to over HTTP."""
