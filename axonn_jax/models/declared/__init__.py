"""Declaration of the transformer for cost models, and the choice that is made by it; no jax."""
