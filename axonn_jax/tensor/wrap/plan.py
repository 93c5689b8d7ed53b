"""How one layer lies on the mesh: the axes of its input and output, the layouts of its parameters."""

from dataclasses import dataclass, replace

from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.tensor.linear import TensorAxis

PLAN = "axonn_plan"
"""The (static) attribute of a layer that holds its plan."""


@dataclass(frozen=True)
class Stream:
    """What is known of an activation's layout: the axis that splits it, and the dim that is split."""

    axis: TensorAxis
    size: int
    """Global size of the split dim."""
    last: bool
    """Whether it was the last dim where it was made."""


@dataclass(frozen=True)
class Dims:
    """What the sharded dims of a layer's arrays are, counted as Python indexes."""

    x: int = -1
    """The input's dim that is contracted and split over `in_axis`."""
    y: int = -1
    """The output's dim that is split over `out_axis`."""
    bias: tuple[int, ...] = (-1,)
    """The output's dims that the bias's dims belong to, in their order."""
    rows: tuple[int, int] | None = (0, 0)
    """The batch dim of input and of output; None where there is none to split."""
    rank: int = 0
    """How many more dims the output has than the input."""


@dataclass(frozen=True)
class LayerPlan:
    """One layer's place on the mesh.

    `sharded` is False for a layer that stays as it was, its parameters replicated. A sharded layer of which nothing
    but the rows is split (no axes, no specs) has replicated parameters too.
    """

    kind: str
    mesh: Mesh
    sharded: bool
    in_axis: TensorAxis | None = None
    out_axis: TensorAxis | None = None
    specs: tuple[tuple[str, P], ...] = ()
    """The layout of every parameter, by its name in the layer."""
    dims: Dims = Dims()
    z_dim: int | None = None
    """The kernel's dim that `z` splits once more."""
    note: str = ""
    """Why the layer, or a part of it, is not split."""
    sizes: tuple[int, int] = (1, 1)
    """Elements of the input and of the output of all its calls together, or of one row (see `rows_known`)."""
    rows_known: bool = False
    rows_split: bool = True
    """Whether the rows of its (last known) call divide over `data` and `z`."""

    def spec(self, name: str) -> P:
        """The layout of one of the layer's parameters."""
        return dict(self.specs).get(name, P())

    def size(self, *axes: str | None) -> int:
        """Product of the sizes of the mesh axes named; None counts one."""
        count = 1
        for axis in axes:
            count *= 1 if axis is None else self.mesh.shape[axis]
        return count

    def called_with(self, in_size: int, out_size: int, *, split: bool) -> "LayerPlan":
        """The plan with one more call on record."""
        before = self.sizes if self.rows_known else (0, 0)
        sizes = (before[0] + in_size, before[1] + out_size)
        return replace(self, sizes=sizes, rows_known=True, rows_split=split)


def place(ndim: int, *axes: tuple[int, str | tuple[str, ...] | None]) -> P:
    """A layout of `ndim` dims with the given (dim, axis) pairs split."""
    dims: list[str | tuple[str, ...] | None] = [None] * ndim
    for dim, axis in axes:
        if axis is not None:
            dims[dim] = axis
    return P(*dims)


def without_z(spec: P) -> P:
    """The layout with nothing split over `z`."""
    kept = [tuple(a for a in ((dim,) if isinstance(dim, str) else dim or ()) if a != "z") for dim in spec]
    return P(*(axes or None for axes in kept))
