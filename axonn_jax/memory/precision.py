"""Precision: what layers calculate in, what weights lie in on the device, and what gradients add up in."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Precision = Literal["auto", "fp32", "bf16", "fp16"]
Accumulate = Literal["fp32", "compute"]

_COMPUTE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}


@dataclass(frozen=True)
class Precisions:
    """The dtypes of a run. The optimizer's state is float32 whatever they are."""

    compute: jnp.dtype
    """Of activations, of messages between stages and of gathered weights."""
    weights: jnp.dtype
    """Of the weights a step reads: float32, or the compute dtype where float32 masters lie apart from them."""
    sums: jnp.dtype
    """Of gradients while they add up over microbatches, and on their way over `data`."""

    @property
    def scaled(self) -> bool:
        """Whether the loss is scaled up, since small gradients would be lost in float16."""
        return self.compute == jnp.float16

    @property
    def masters(self) -> bool:
        """Whether the optimizer has float32 weights of its own."""
        return self.weights != jnp.float32


FULL = Precisions(*[jnp.dtype(jnp.float32)] * 3)
"""Everything in float32."""


def precisions(precision: Precision, accumulate: Accumulate = "fp32", *, apart: bool = False) -> Precisions:
    """The dtypes that settings ask for; `auto` is bf16 on accelerators and fp32 on CPU.

    Masters lie `apart` from the weights where they are sharded further (ZeRO) or elsewhere (offload); otherwise the
    float32 weights are cast where they are used.
    """
    if precision == "auto":
        precision = "fp32" if jax.default_backend() == "cpu" else "bf16"
    compute = jnp.dtype(_COMPUTE[precision])
    full = jnp.dtype(jnp.float32)
    return Precisions(compute, compute if apart else full, compute if accumulate == "compute" else full)
