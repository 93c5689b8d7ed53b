"""Any Flax model in the trainer: taken apart, its batches, and the program of its gradients."""
