"""Declarations of the operations that layers run on one device, the single source of all cost models; no jax."""
