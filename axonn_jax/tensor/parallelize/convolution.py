"""Convolutions without a sharded form, split over rows by hand, since XLA's partitioner gets some wrong.

The kernel gradient of a grouped convolution (`feature_group_count` above 1) comes out a multiple of its value where
rows are split over some devices and the same on others (jaxlib 0.10.2; `jax.jit` with layouts is enough to see it).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.jaxprs import bodies, equations
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import mark_varying
from axonn_jax.tensor.specs import shard_mapped, size_over


@dataclass(frozen=True)
class ByRows:
    """A convolution [rows, ..., channels] in a manual region: rows over `row_axes` if divisible.

    Collectives: all-reduce of the kernel's gradient over `row_axes`, twice the bytes on a ring.
    """

    mesh: Mesh
    convolve: Callable[..., jax.Array]
    row_axes: tuple[str, ...] = BATCH_AXES

    def __call__(self, x: jax.Array, kernel: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Convolve as `jax.lax.conv_general_dilated` does, each device its own rows."""
        split = x.shape[0] % size_over(self.mesh, self.row_axes) == 0
        rows = P(self.row_axes) if split else P()

        def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
            if split:  # gradients are summed over devices in float32
                kernel = mark_varying(kernel.astype(jnp.float32), self.row_axes).astype(kernel.dtype)
            return self.convolve(x, kernel, *args, **kwargs)

        return shard_mapped(local, self.mesh, (rows, P()), rows, among_others=True)(x, kernel)  # type: ignore[no-any-return]


def by_rows(modules: Iterable[nnx.Module], mesh: Mesh) -> None:
    """Make convolutions among modules without a sharded form (masked ones, types of your own) run by rows."""
    for module in modules:
        if isinstance(module, nnx.Conv):
            module.conv_general_dilated = ByRows(mesh, module.conv_general_dilated)


def check_grouped(jaxpr: Any, mesh: Mesh, layer: str) -> None:
    """Raise ``UserError`` for a grouped convolution partitioned by XLA, with a kernel computed from inputs.

    Manual regions and equations named `layer...` are skipped.
    """
    rows = size_over(mesh, BATCH_AXES)
    if rows > 1 and mesh.size > rows:
        _check(jaxpr, set(jaxpr.invars), layer)


def _check(jaxpr: Any, computed: set[Any], layer: str) -> None:
    """`computed` are the variables that depend on the inputs, at first the jaxpr's own inputs."""
    for eqn in jaxpr.eqns:
        inputs = [not hasattr(var, "val") and var in computed for var in eqn.invars]
        by_hand = eqn.primitive.name == "shard_map" or str(eqn.params.get("name", "")).startswith(layer)
        if not any(inputs) or by_hand:
            continue
        computed.update(eqn.outvars)
        for inner in bodies(eqn):
            known = zip(inner.invars, inputs, strict=True) if len(inner.invars) == len(inputs) else None
            _check(inner, {var for var, is_input in known if is_input} if known else set(inner.invars), layer)
        groups = eqn.params.get("feature_group_count", 1)
        if eqn.primitive.name == "conv_general_dilated" and groups > 1 and inputs[1]:
            raise UserError(
                "model", f"a jax.lax convolution of {groups} groups",
                "an nnx.Conv in its place (or none on a grid with x or y beside data or z): XLA, which partitions "
                "the code between layers, computes a wrong kernel gradient",
            )  # fmt: skip


def convolves(jaxpr: Any) -> bool:
    """True if a jaxpr, or one that it runs, has a convolution."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(jaxpr))
