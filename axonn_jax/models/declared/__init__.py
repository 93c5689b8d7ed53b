"""Declaration of the transformer for cost models, and choices based on it; no jax."""
