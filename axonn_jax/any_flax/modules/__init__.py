"""Training of any Flax model with a user's loss: the model as a pure function, its batches and its gradients."""
