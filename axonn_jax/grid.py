"""The grid `pipe x data x expert x z x y x x`: axis sizes, divisibility rules, meshes."""

from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from math import isqrt, prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from axonn_jax.errors import UserError, integer

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from contextlib import AbstractContextManager

    import jax

Batch = TypeVar("Batch")

MESH_AXES = ("data", "expert", "z", "y", "x")
"""Axes of every stage's mesh, slowest first: neighbours along `x` are the nearest devices."""

GRID_AXES = ("pipe", *MESH_AXES)
"""Names of all axes, slowest first."""

BATCH_AXES = ("data", "expert", "z")
"""Axes that split the rows (sequences) of a batch."""

REPLICA_AXES = ("data", "expert")
"""Axes along which dense layers are the same; experts are the same along `data` alone."""


MOST_DEVICES = 2**20
"""Largest size of an axis and number of planned devices, several times any machine's."""


@dataclass(frozen=True)
class GridShape:
    """Sizes of the grid's axes; their product is the number of devices."""

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
        for f in fields(self):
            size = integer(f"grid.{f.name}", getattr(self, f.name), 1, MOST_DEVICES)
            object.__setattr__(self, f.name, size)

    @cached_property
    def stage_devices(self) -> int:
        """Devices of one pipeline stage."""
        return self.batch_shards * self.y * self.x

    @cached_property
    def inside(self) -> "GridShape":
        """The part that works on a microbatch together: all axes but `pipe` and `data`."""
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
        """The axes that split a batch, for messages."""
        return "data*expert*z" if self.expert > 1 else "data*z"

    def check_batch(self, global_batch: int, microbatches: int) -> None:
        """Raise ``UserError`` unless the global batch splits into microbatches over `BATCH_AXES`."""
        if microbatches < 1:
            raise UserError("train.microbatches", microbatches, "an integer of at least 1")
        divides("train.global_batch", global_batch, self.batch_shards * microbatches, f"{self.batch_rule}*microbatches")


def divides(field: str, size: int, parts: int, rule: str, *, axis: str = "", whole: int = 0) -> None:
    """Raise ``UserError`` unless a size divides, with the nearest divisible one, and the legal sizes of `axis`.

    Where `axis` must divide other sizes of a model too, `whole` is what they have in common, and no size is proposed.
    """
    if size > 0 and size % parts == 0:
        return
    low = size // parts * parts
    near = [n for n in (low, low + parts) if n > 0]
    advice = f"a multiple of {rule} = {parts}"
    advice += "" if whole else f"; nearest: {' or '.join(map(str, near))}"
    advice += f"; or {axis} one of {', '.join(map(str, divisors(whole or size)))}" if axis else ""
    raise UserError(field, size, advice)


def divisors(number: int) -> list[int]:
    """Return all divisors of a number, ascending."""
    low = [d for d in range(1, isqrt(number) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


class Grid(NamedTuple):
    """A grid laid over devices: axis sizes, the mesh of this process's (first) stage, its place in the run."""

    shape: GridShape
    """Sizes of the axes."""
    mesh: "jax.sharding.Mesh"
    """The mesh of this process's stage, of the first one in a run of one process."""
    meshes: "Mapping[int, jax.sharding.Mesh]"
    """This process's meshes, by place along the pipe: all in a run of one process."""
    rank: int = 0
    """This process's place among all of the run."""
    size: int = 1
    """Processes of the run."""

    @property
    def stage_processes(self) -> int:
        """Processes of one stage; 1 also where one process holds all stages."""
        return max(1, self.size // self.shape.pipe)

    @contextmanager
    def entered(self) -> "Iterator[None]":
        """Enter a context with this grid's mesh as jax's; with none for a pipeline, where each stage has its own.

        Inside, a mesh of a script's `jax.set_mesh` is not set, and Flax does not lay variables out by the names of
        axes that a model's author gave them, which are another mesh's. Outside, all is as it was.
        """
        import jax
        from flax import nnx

        mesh = jax.set_mesh(self.mesh) if self.shape.pipe == 1 else without_mesh()
        with mesh, nnx.use_eager_sharding(False):
            yield

    def shard_batch(self, batch: Batch) -> Batch:
        """Lay a batch over `BATCH_AXES` by its first dim: any tree of arrays, the same ones on every process.

        Scalars are replicated. No collectives. Raises ``UserError`` for an array whose first dim does not divide.
        """
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        def put(path: Any, leaf: Any) -> Any:
            rows = getattr(leaf, "shape", ())[:1]
            if rows:
                divides(
                    f"batch{jax.tree_util.keystr(path)} rows", rows[0], self.shape.batch_shards, self.shape.batch_rule
                )
            spec = PartitionSpec(BATCH_AXES) if rows else PartitionSpec()
            try:
                return jax.device_put(leaf, NamedSharding(self.mesh, spec))
            except TypeError:
                accepted = "an array of numbers, rows first"
                raise UserError(f"batch{jax.tree_util.keystr(path)}", type(leaf).__name__, accepted) from None

        return jax.tree_util.tree_map_with_path(put, batch)  # type: ignore[no-any-return]


def build_grid(shape: GridShape, devices: "Sequence[jax.Device]") -> Grid:
    """Lay the meshes over all devices of a run of one process (or of a run without pipeline), `x` fastest.

    Neighbours along `x` are then the closest devices (`arranged`), and each stage has a contiguous slice.
    Raises ``UserError`` when the number of devices is not the grid's product.
    """
    if len(devices) != shape.devices:
        raise UserError("grid", shape, f"a product of {len(devices)}, the number of devices; this is {shape.devices}")
    per_stage = shape.stage_devices
    stages = (arranged(shape, devices[place * per_stage : (place + 1) * per_stage]) for place in range(shape.pipe))
    meshes = {place: build_mesh(shape, stage) for place, stage in enumerate(stages)}
    return Grid(shape, meshes[0], meshes)


def arranged(shape: GridShape, devices: "Sequence[jax.Device]") -> "Sequence[jax.Device]":
    """Return a stage's devices in mesh order: as given, or on TPUs so that axes follow the links between chips.

    Slices of TPUs, which the data center's network joins, are parts of `data`. Where slices do not divide `data`, or
    are not whole boxes of chips, the order stays as given. Other devices always keep the order: neighbours in a host
    are neighbours along `x`.
    """
    if not all(device.platform == "tpu" and hasattr(device, "coords") for device in devices):
        return devices
    from jax.experimental import mesh_utils

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
    """Lay one stage's mesh over its devices, `x` fastest; raise ``UserError`` for a wrong number of devices."""
    import jax
    import numpy as np

    sizes = tuple(getattr(shape, axis) for axis in MESH_AXES)
    if len(devices) != prod(sizes):
        raise UserError("grid", shape, f"{prod(sizes)} devices a stage, not {len(devices)}")
    auto = (jax.sharding.AxisType.Auto,) * len(MESH_AXES)
    return jax.sharding.Mesh(np.asarray(devices).reshape(sizes), MESH_AXES, axis_types=auto)


def without_mesh() -> "AbstractContextManager[object]":
    """Return a context in which no mesh is set, for arrays that each have their own."""
    import jax
    import numpy as np

    return jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()))
