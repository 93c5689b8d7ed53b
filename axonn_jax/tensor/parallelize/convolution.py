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

from axonn_jax.backend.jaxprs import bodies, equations, follow
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
    if rows == 1 or mesh.size == rows:
        return

    def through(eqn: Any, computed: list[bool]) -> list[bool]:
        """Return True for each result of an equation that depends on the inputs."""
        by_hand = eqn.primitive.name == "shard_map" or str(eqn.params.get("name", "")).startswith(layer)
        if not any(computed) or by_hand:
            return [False] * len(eqn.outvars)
        for inner in bodies(eqn):
            same = len(inner.invars) == len(computed)
            follow(inner, computed if same else [True] * len(inner.invars), False, through)
        groups = eqn.params.get("feature_group_count", 1)
        if eqn.primitive.name == "conv_general_dilated" and groups > 1 and computed[1]:
            raise UserError(
                "model", f"a jax.lax convolution of {groups} groups",
                "an nnx.Conv in its place (or none on a grid with x or y beside data or z): XLA, which partitions "
                "the code between layers, computes a wrong kernel gradient",
            )  # fmt: skip
        return [True] * len(eqn.outvars)

    follow(jaxpr, [True] * len(jaxpr.invars), False, through)


def convolves(jaxpr: Any) -> bool:
    """True if a jaxpr, or one that it runs, has a convolution."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(jaxpr))
