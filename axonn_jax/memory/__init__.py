"""Precision, activations and buckets."""
