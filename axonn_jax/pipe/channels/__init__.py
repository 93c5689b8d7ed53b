"""Channels that carry activations and their gradients between pipeline stages."""
