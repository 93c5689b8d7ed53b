"""What may be chosen: every grid that model and batch divide over, and the sizes of microbatches on it."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.job import Choice, Job
from axonn_jax.planner.memory import Policy as Activations
from axonn_jax.planner.network import Links

AXES = ("pipe", "data", "z", "y", "x")
SEARCHED: tuple[Activations, ...] = ("none", "save_collectives", "full", "offload")
"""Activation policies worth trying: `dots` keeps what `save_collectives` keeps and communicates more."""

ROWS = 1 << 15
"""Tokens of a microbatch on a device that are as good as any more."""


@dataclass(frozen=True)
class Space:
    """What may be chosen; what is fixed is a list of one."""

    axes: Mapping[str, int] = field(default_factory=dict)
    """Axes of the grid that are fixed."""
    near: Sequence[str] = ()
    """Axes whose groups must stay inside a node."""
    grids: Sequence[GridShape] | None = None
    """The only grids, if there is a list of them."""
    sequences: int | None = None
    """Sequences of a microbatch on a device, if fixed."""
    activations: Sequence[Activations] = SEARCHED
    offload: Sequence[bool] = (False, True)
    zero: Sequence[int] = (0, 1)
    virtual_stages: Sequence[int] = (1, 2, 4)
    gather: Sequence[Gather] = ("layer",)

    def gathers(self, base: Choice) -> list[Gather]:
        """How long gathered weights may live; of several ways those that make no difference for a choice are left out.

        A pipeline keeps none from one of its programs to the next.
        """
        if len(self.gather) == 1 and base.grid.pipe == 1:
            return list(self.gather)
        useful: set[Gather] = {"layer"}
        if base.grid.pipe == 1 and base.grid.z > 1:
            useful |= {"pass"} if base.activations != "none" else set()
            useful |= {"step"} if base.microbatches > 1 else set()
        return [one for one in self.gather if one in useful]


def legal_grids(job: Job, devices: int, space: Space, rules: Counter[str]) -> Iterator[GridShape]:
    """Every grid that model and batch divide over; counts in `rules` why others are left out."""
    for grid in _grids(devices, space) if space.grids is None else space.grids:
        try:
            grid.check_model(job.shape, sequence_parallel=job.sequence_parallel)
            job.inner(grid, "full")
        except UserError as error:
            rules[f"{error.field} does not divide over them"] += 1
            continue
        if any(not Links(grid, job.machine).near((axis,)) for axis in space.near):
            rules[f"groups over {' or '.join(space.near)} leave a node"] += 1
        elif job.batch % grid.batch_shards:
            batch = f"{job.batch} sequence{'s' * (job.batch != 1)}"
            rules[f"a batch of {batch} does not divide over data * z"] += 1
        elif grid.pipe > pieces(job):
            rules[f"they have more pipeline stages than the model has pieces ({pieces(job)})"] += 1
        elif grid.pipe > 1 and "layer" not in space.gather:
            rules["a pipeline keeps no gathered weights"] += 1
        elif grid.pipe == 1 and min(space.virtual_stages) > 1:
            rules["they have no pipeline for virtual stages"] += 1
        else:
            yield grid


def _grids(devices: int, space: Space) -> Iterator[GridShape]:
    """Every way to write the number of devices as a product of the five axes."""

    def place(left: int, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        if not axes:
            if left == 1:
                yield ()
            return
        wanted = space.axes.get(axes[0])
        for size in divisors(left) if wanted is None else [wanted] if left % wanted == 0 else []:
            for rest in place(left // size, axes[1:]):
                yield (size, *rest)

    for sizes in place(devices, AXES):
        yield GridShape(*sizes)


def divisors(number: int) -> list[int]:
    """All divisors of a number, smallest first."""
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def pieces(job: Job) -> int:
    """The most virtual stages that the model can be cut into."""
    return 2 * job.shape.layers + 2


def microbatch_sizes(job: Job, grid: GridShape, space: Space) -> list[int]:
    """Sequences that a device's microbatch may have, fewest first: powers of two, and the whole share.

    Beyond `ROWS` tokens matmuls gain nothing from more.
    """
    each = job.batch // grid.batch_shards
    if space.sequences is not None:
        sizes = [space.sequences] if each % space.sequences == 0 else []
    else:
        most = max(1, ROWS // job.shape.seq_len)
        sizes = [size for size in divisors(each) if (size & (size - 1) == 0 and size <= most) or size == each]
    # A pipeline with fewer microbatches than stages is more bubble than work.
    return [size for size in sizes if grid.pipe == 1 or each // size >= grid.pipe]


def depths(job: Job, base: Choice) -> Iterator[Choice]:
    """A choice with as many microbatches in flight as may be worth it, fewest first: 1F1B's with one stage a rank."""
    pipe = base.grid.pipe
    if pipe == 1 or job.policy != "message":
        yield base
        return
    for in_flight in (pipe, 0, 2 * pipe, 3 * pipe)[base.virtual_stages > 1 :]:
        yield replace(base, in_flight=in_flight)
