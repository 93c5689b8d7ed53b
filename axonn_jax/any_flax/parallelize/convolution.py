"""Row-parallel convolutions in a manual region, since XLA's partitioner gets the gradient of some wrong.

The kernel gradient of a grouped convolution (`feature_group_count` above 1) comes out as a multiple of its value where
rows are split over some devices and replicated over others (jaxlib 0.10.2; `jax.jit` with layouts reproduces it).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.core.backend.jaxprs import bodies, equations, follow
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.tensor.collectives import mark_varying
from axonn_jax.core.tensor.specs import shard_mapped, size_over


@dataclass(frozen=True)
class ByRows:
    """Convolution of [rows, ..., channels] in a manual region, with rows split over `row_axes` if these divide them.

    Collectives: all-reduce of the kernel's gradient over `row_axes`, twice its bytes on a ring.
    """

    mesh: Mesh
    convolve: Callable[..., jax.Array]
    row_axes: tuple[str, ...] = BATCH_AXES

    def __call__(self, x: jax.Array, kernel: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        """Convolve like `jax.lax.conv_general_dilated`, each device its local rows."""
        split = x.shape[0] % size_over(self.mesh, self.row_axes) == 0
        rows = P(self.row_axes) if split else P()

        def local(x: jax.Array, kernel: jax.Array) -> jax.Array:
            # Marked varying in float32, so that gradients are summed over devices in float32.
            if split:
                kernel = mark_varying(kernel.astype(jnp.float32), self.row_axes).astype(kernel.dtype)
            return self.convolve(x, kernel, *args, **kwargs)

        return shard_mapped(local, self.mesh, (rows, P()), rows, keep_mesh=True)(x, kernel)  # type: ignore[no-any-return]


def by_rows(modules: Iterable[nnx.Module], mesh: Mesh) -> None:
    """Make convolutions run by rows, for modules without a sharded form (masked ones, your own types).

    Args:
        modules: The modules, changed in place; those that are not convolutions stay unchanged.
        mesh: The grid's mesh.
    """
    for module in modules:
        if isinstance(module, nnx.Conv):
            module.conv_general_dilated = ByRows(mesh, module.conv_general_dilated)


def check_grouped(jaxpr: Any, mesh: Mesh, layer: str) -> None:
    """Check that XLA's partitioner gets no grouped convolution whose kernel is computed from the inputs.

    Args:
        jaxpr: The traced program; manual regions and marked layers in it are skipped.
        mesh: The grid's mesh.
        layer: Prefix of the names of marked layers.

    Raises:
        UserError: The program contains one.
    """
    rows = size_over(mesh, BATCH_AXES)
    # The wrong gradient needs rows that are split over some devices and replicated over others.
    if rows == 1 or mesh.size == rows:
        return

    def through(eqn: Any, computed: list[bool]) -> list[bool]:
        """Return True for each result of an equation that depends on the inputs."""
        manual = eqn.primitive.name == "shard_map" or str(eqn.params.get("name", "")).startswith(layer)
        if not any(computed) or manual:
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
    """True if a jaxpr, or one nested in it, contains a convolution."""
    return any(eqn.primitive.name == "conv_general_dilated" for eqn in equations(jaxpr))
