"""Mixture of experts: router, dispatch, grouped matmuls, balance."""
