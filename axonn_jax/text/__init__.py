"""Texts of a trained model: generation, and Loki attention."""
