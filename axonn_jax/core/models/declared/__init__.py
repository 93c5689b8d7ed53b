"""Declaration of the transformer for cost models, and its segments; no jax."""
