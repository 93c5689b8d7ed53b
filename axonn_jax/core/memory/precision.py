"""Precision of a run: its dtypes, and the loss scale that keeps float16 gradients in range."""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.backend.traits import half_precision_pays
from axonn_jax.core.options import Accumulate, Precision

_COMPUTE = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}

FIRST, LARGEST, SMALLEST = 2.0**16, 2.0**24, 2.0**10
CLEAN_STEPS = 200
"""Consecutive steps without overflow after which the factor doubles (AxoNN, IPDPS 22; `inter_layer.py` of its code)."""


@dataclass(frozen=True)
class Precisions:
    """Dtypes of a run; the optimizer's state is always float32."""

    compute: jnp.dtype
    """Dtype of activations, of messages between stages and of gathered weights."""
    weights: jnp.dtype
    """Dtype of the weights that a step reads: float32, or the compute dtype if there are separate float32 masters."""
    grad_dtype: jnp.dtype
    """Dtype in which gradients are summed over microbatches and reduced over `data`."""
    wide: frozenset[str] = frozenset()
    """Names of parameters whose weights and gradients are always float32."""

    def weights_of(self, name: str) -> jnp.dtype:
        """Return the dtype of a parameter's weights."""
        return FULL.weights if name in self.wide else self.weights

    def sums_of(self, name: str) -> jnp.dtype:
        """Return the dtype of a parameter's gradients."""
        return FULL.grad_dtype if name in self.wide else self.grad_dtype

    @property
    def scaled(self) -> bool:
        """True if the loss is scaled."""
        # Only float16: small gradients underflow in it, whereas bfloat16 has the range of float32.
        return self.compute == jnp.float16

    @property
    def master_weights(self) -> bool:
        """True if the optimizer has separate float32 weights."""
        return self.weights != jnp.float32


FULL = Precisions(jnp.dtype(jnp.float32), jnp.dtype(jnp.float32), jnp.dtype(jnp.float32))
"""Precisions with every dtype float32."""


def precisions(precision: Precision, accumulate: Accumulate = "fp32", *, separate_masters: bool = False) -> Precisions:
    """Return the dtypes of a run's settings; `auto` is bf16 on accelerators and fp32 on CPU.

    Set `separate_masters` if masters are sharded further (ZeRO) or stored elsewhere (offload). Otherwise layers read
    float32 weights and cast them.
    """
    if precision == "auto":
        precision = "bf16" if half_precision_pays(jax.default_backend()) else "fp32"
    compute = jnp.dtype(_COMPUTE[precision])
    full = jnp.dtype(jnp.float32)
    return Precisions(compute, compute if separate_masters else full, compute if accumulate == "compute" else full)


class Scale(NamedTuple):
    """Loss scale and count of skipped steps, as scalars carried from step to step."""

    factor: Any
    """Factor on the loss before the backward pass, float32; None without loss scaling."""
    clean: Any
    """Steps without overflow since the factor last changed, int32; None without loss scaling."""
    skipped: jax.Array | np.int32
    """Steps skipped since the start of the run, int32."""


def first_scale(*, scaled: bool = True) -> Scale:
    """Return the initial state, as host numbers."""
    none = np.int32(0)
    return Scale(np.float32(FIRST), none, none) if scaled else Scale(None, None, none)


def next_scale(scale: Scale, finite: jax.Array | np.bool, numbers: ModuleType = jnp) -> Scale:
    """Count a step that was not finite and halve the factor, or double it after 200 clean steps, within limits.

    `numbers` is the array module: numpy if all scalars are on the host.
    """
    skipped = scale.skipped + (~finite).astype(np.int32)
    if scale.factor is None:
        return scale._replace(skipped=skipped)
    none = np.int32(0)
    clean = numbers.where(finite, scale.clean + np.int32(1), none)
    grown = clean == CLEAN_STEPS
    up = numbers.where(grown, scale.factor * 2, scale.factor)
    factor = numbers.clip(numbers.where(finite, up, scale.factor / 2), SMALLEST, LARGEST)
    return Scale(factor, numbers.where(grown, none, clean), skipped)


def on_mesh(scale: Scale, mesh: Mesh) -> Scale:
    """Return the state on all devices of a mesh, which may span processes."""
    sharding = NamedSharding(mesh, P())
    return jax.tree.map(lambda v: jax.make_array_from_callback((), sharding, lambda _: np.asarray(v)), scale)  # type: ignore[no-any-return]


class HostScale:
    """`Scale` on the host, for an engine whose host decides whether to update; never waits for a device."""

    def __init__(self, *, scaled: bool) -> None:
        self.state = first_scale(scaled=scaled)

    @property
    def factor(self) -> float | None:
        """Factor on the loss; None without loss scaling."""
        return None if self.state.factor is None else float(self.state.factor)

    @property
    def skipped(self) -> int:
        """Steps skipped since the start of the run."""
        return int(self.state.skipped)

    def tell(self, *, finite: bool) -> None:
        """Record whether a step was finite."""
        self.state = next_scale(self.state, np.bool_(finite), np)

    def restore(self, scale: Scale) -> None:
        """Continue from a state, which may be on devices."""
        self.state = jax.tree.map(np.asarray, scale)
