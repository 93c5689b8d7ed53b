"""Declarations that the planner alone makes or chooses by; no jax."""
