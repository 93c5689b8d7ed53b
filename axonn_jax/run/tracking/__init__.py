"""Trackers of a run: files in its directory, Weights & Biases, MLflow, and user-defined ones."""
