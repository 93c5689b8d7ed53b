"""Checkpoints: named arrays that any grid loads, written in the background and committed atomically."""
