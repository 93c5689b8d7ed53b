"""Compiled programs read as text: their instructions, collectives, and what runs beside these; no jax."""
