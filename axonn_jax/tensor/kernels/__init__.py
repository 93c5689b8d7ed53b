"""Kernels of layers."""
