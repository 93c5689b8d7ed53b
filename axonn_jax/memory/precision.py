"""Compute precision: what the layers calculate in; weights and optimizer state stay float32."""

from typing import Literal

import jax
import jax.numpy as jnp

Precision = Literal["auto", "fp32", "bf16"]


def compute_dtype(precision: Precision) -> jnp.dtype:
    """The dtype of activations and gathered weights; `auto` is bf16 on accelerators and fp32 on CPU."""
    if precision == "auto":
        precision = "fp32" if jax.default_backend() == "cpu" else "bf16"
    return jnp.dtype(jnp.float32 if precision == "fp32" else jnp.bfloat16)
