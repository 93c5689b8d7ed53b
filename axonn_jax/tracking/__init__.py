"""Trackers of a run: files of its directory, Weights & Biases, MLflow, and a user's own."""
