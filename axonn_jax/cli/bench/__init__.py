"""Measurements that the package makes of itself, a file a benchmark."""
