"""Device grid `pipe x data x expert x z x y x x`: axis sizes, divisibility rules, meshes."""

from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isqrt, prod
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from axonn_jax.core.errors import UserError, integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import jax

Batch = TypeVar("Batch")

MESH_AXES = ("data", "expert", "z", "y", "x")
"""Axes of every stage's mesh, slowest first; neighbours along `x` are the nearest devices."""

GRID_AXES = ("pipe", *MESH_AXES)
"""All axes of the grid, slowest first."""

BATCH_AXES = ("data", "expert", "z")
"""Axes that split the rows (sequences) of a batch."""

REPLICA_AXES = ("data", "expert")
"""Axes along which dense layers are replicated; experts are replicated along `data` only."""


MOST_DEVICES = 2**20
"""Upper bound on an axis and on the number of planned devices, several times that of any machine."""


@dataclass(frozen=True)
class GridShape:
    """Sizes of the grid's axes; their product is the number of devices."""

    # The docstrings of these fields are also the text of `--help`.
    pipe: int = 1
    """Pipeline stages: the model's layers in order, cut by cost; microbatches flow through them."""
    data: int = 1
    """Replicas that share nothing but the gradient reduction once a step."""
    expert: int = field(default=1, kw_only=True)
    """Parts of the experts of a mixture; for all other layers a part of `data`."""
    z: int = 1
    """Parts of the batch, and of every weight once more (gathered just before use, as in FSDP)."""
    y: int = 1
    """Parts of odd linear layers' output features and even ones' input features; of heads, of the vocabulary."""
    x: int = 1
    """Parts of odd linear layers' input features and even ones' output features; of the residual stream."""

    def __post_init__(self) -> None:
        # The dataclass is frozen, so normalized sizes have to bypass its __setattr__.
        for f in fields(self):
            size = integer(f"grid.{f.name}", getattr(self, f.name), 1, MOST_DEVICES)
            object.__setattr__(self, f.name, size)

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.batch_shards * self.y * self.x

    @cached_property
    def inside(self) -> "GridShape":
        """Subgrid that works on a microbatch together: all axes but `pipe` and `data`."""
        return replace(self, pipe=1, data=1)

    @cached_property
    def devices(self) -> int:
        """Devices of the whole grid."""
        return self.pipe * self.stage_devices

    @property
    def replicas(self) -> int:
        """Devices that hold the same dense weights: `data` times `expert`."""
        return self.data * self.expert

    @cached_property
    def batch_shards(self) -> int:
        """Distinct shards of a batch: `data` times `expert` times `z`."""
        return self.replicas * self.z

    def __str__(self) -> str:
        sizes = {f.name: getattr(self, f.name) for f in fields(self)}
        return " x ".join(f"{name} {size}" for name, size in sizes.items() if name != "expert" or size > 1)

    @property
    def batch_rule(self) -> str:
        """Product of the axes that split a batch, as text for messages."""
        return "data*expert*z" if self.expert > 1 else "data*z"

    def check_batch(self, global_batch: int, microbatches: int) -> None:
        """Raise ``UserError`` unless the global batch splits into microbatches over `BATCH_AXES`."""
        if microbatches < 1:
            raise UserError("train.microbatches", microbatches, "an integer of at least 1")
        divides("train.global_batch", global_batch, self.batch_shards * microbatches, f"{self.batch_rule}*microbatches")


def divides(field: str, size: int, parts: int, rule: str, *, axis: str = "", common_size: int = 0) -> None:
    """Check that a size is a positive multiple of the number of parts.

    Args:
        field: Name of the size, for the message.
        size: The size to divide.
        parts: Number of parts.
        rule: Formula of `parts`, for the message.
        axis: Axis for which the message lists all legal sizes; "" for none.
        common_size: Common divisor of all sizes that `axis` must divide. The message then proposes no other size.

    Raises:
        UserError: The size is not a multiple; the message names the nearest ones.
    """
    if size > 0 and size % parts == 0:
        return
    low = size // parts * parts
    near = [n for n in (low, low + parts) if n > 0]
    advice = f"a multiple of {rule} = {parts}"
    advice += "" if common_size else f"; nearest: {' or '.join(map(str, near))}"
    advice += f"; or {axis} one of {', '.join(map(str, divisors(common_size or size)))}" if axis else ""
    raise UserError(field, size, advice)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


class Grid(NamedTuple):
    """Grid laid over devices: axis sizes, the meshes of this process's stages, and its rank in the run."""

    shape: GridShape
    """Sizes of the axes."""
    mesh: "jax.sharding.Mesh"
    """Mesh of this process's stage; of the first stage in a run of one process."""
    meshes: "Mapping[int, jax.sharding.Mesh]"
    """This process's meshes by stage; all stages in a run of one process."""
    rank: int = 0
    """Rank of this process in the run."""
    size: int = 1
    """Number of processes in the run."""

    @property
    def stage_processes(self) -> int:
        """Number of processes per stage; 1 also if one process has all stages."""
        return max(1, self.size // self.shape.pipe)

    @contextmanager
    def entered(self) -> "Iterator[None]":
        """Enter a context in which jax's mesh is this grid's, or no mesh for a pipeline, whose stages each have one.

        The context overrides a mesh that a script set by `jax.set_mesh`, and Flax ignores axis names that a model's
        author gave its variables, which refer to a different mesh.
        """
        # Imported here, not above, since the planner uses this module and must work without jax.
        import jax
        from flax import nnx

        mesh = jax.set_mesh(self.mesh) if self.shape.pipe == 1 else without_mesh()
        with mesh, nnx.use_eager_sharding(False):
            yield

    def shard_batch(self, batch: Batch, *, local: bool = False) -> Batch:
        """Split a batch over `BATCH_AXES` along its first dim; scalars are replicated. No collectives.

        Args:
            batch: Any tree of arrays, the same on every process, which jax compares at each call.
            local: True if every process passes its own rows of the batch alone, as a loader with a shard a process
                reads them; rows of processes follow one another along `BATCH_AXES`. Nothing is compared.

        Raises:
            UserError: The first dim of an array does not divide, processes differ, or a leaf is no array of numbers.
        """
        import jax
        import numpy as np
        from jax.sharding import NamedSharding, PartitionSpec

        def put(path: tuple[object, ...], leaf: object) -> object:
            field, rows = f"batch{jax.tree_util.keystr(path)}", getattr(leaf, "shape", ())[:1]
            layout = NamedSharding(self.mesh, PartitionSpec(BATCH_AXES) if rows else PartitionSpec())
            if rows:
                here = self.mesh.local_mesh.shape if local else self.mesh.shape
                rule = self.shape.batch_rule + (" within this process" if local else "")
                divides(f"{field} rows", rows[0], prod(here[axis] for axis in BATCH_AXES), rule)
            try:
                if local and rows:
                    return jax.make_array_from_process_local_data(layout, np.asarray(leaf))
                return jax.device_put(leaf, layout)
            except TypeError:
                raise UserError(field, type(leaf).__name__, "an array of numbers, rows first") from None
            except AssertionError:  # jax's comparison across processes
                accepted = "the same array on every process; or local=True for the rows of each"
                raise UserError(field, f"another array in process {self.rank}", accepted) from None

        return jax.tree_util.tree_map_with_path(put, batch)  # type: ignore[no-any-return]


def build_grid(shape: GridShape, devices: "Sequence[jax.Device]") -> Grid:
    """Lay one mesh per stage over all devices of a run, for runs of one process or without a pipeline.

    Each stage gets a contiguous slice of the devices. `x` is the fastest axis, so neighbours along `x` are the closest
    devices (`arranged`).

    Args:
        shape: Sizes of the axes.
        devices: All devices of the run.

    Raises:
        UserError: The number of devices is not the product of the grid's axes.
    """
    if len(devices) != shape.devices:
        raise UserError("grid", shape, f"a product of {len(devices)}, the number of devices; this is {shape.devices}")
    per_stage = shape.stage_devices
    stages = (arranged(shape, devices[place * per_stage : (place + 1) * per_stage]) for place in range(shape.pipe))
    meshes = {place: build_mesh(shape, stage) for place, stage in enumerate(stages)}
    return Grid(shape, meshes[0], meshes)


def arranged(shape: GridShape, devices: "Sequence[jax.Device]") -> "Sequence[jax.Device]":
    """Return a stage's devices in mesh order, which on TPUs follows the links between chips.

    TPU slices, which are connected by the data center's network, become parts of `data`. The order stays unchanged if
    the slices do not divide `data` or are not complete boxes of chips. It always stays unchanged for other devices,
    whose neighbours within a host are neighbours along `x`.
    """
    if not all(device.platform == "tpu" and hasattr(device, "coords") for device in devices):
        return devices
    from jax.experimental import mesh_utils

    # Devices outside multi-slice runs may lack the index or have None: they form one slice.
    slices: dict[int, list[jax.Device]] = {}
    for device in devices:
        slices.setdefault(getattr(device, "slice_index", 0) or 0, []).append(device)
    if shape.data % len(slices):
        return devices
    sizes = (shape.data // len(slices), shape.expert, shape.z, shape.y, shape.x)
    try:
        meshes = [
            mesh_utils.create_device_mesh(sizes, part, allow_split_physical_axes=True) for part in slices.values()
        ]
    except (AssertionError, NotImplementedError, ValueError):
        return devices
    return [device for mesh in meshes for device in mesh.flat]


def build_mesh(shape: GridShape, devices: "Sequence[jax.Device]") -> "jax.sharding.Mesh":
    """Lay one stage's mesh over its devices, with `x` as the fastest axis.

    Raises:
        UserError: The number of devices is not the product of the mesh's axes.
    """
    import jax
    import numpy as np

    sizes = tuple(getattr(shape, axis) for axis in MESH_AXES)
    if len(devices) != prod(sizes):
        raise UserError("grid", shape, f"{prod(sizes)} devices a stage, not {len(devices)}")
    auto = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    return jax.sharding.Mesh(np.asarray(devices).reshape(sizes), MESH_AXES, axis_types=auto)


def without_mesh() -> "AbstractContextManager[object]":
    """Return a context in which no mesh is set, for arrays that each carry their own mesh."""
    import jax
    import numpy as np

    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
