"""Layers of `flax.nnx` that run 4D-sharded outside a manual region, and the choice of their layouts."""
