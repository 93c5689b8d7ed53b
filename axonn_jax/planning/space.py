"""The search space: legal grids, the candidates on each that fit, their step times in closed form and their memory."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GRID_AXES, GridShape, divisors
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import Activations, ReshardAfter
from axonn_jax.pipe.schedule.policies import ByArrival, policy_of
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.request import Candidate, PlanRequest, StatePlacement

Item = TypeVar("Item")

SEARCHED: tuple[Activations, ...] = ("none", "save_collectives", "full", "offload")
"""Activation policies worth trying; `dots` keeps as much as `save_collectives` and communicates more."""

ROWS = 1 << 15
"""Tokens per device and microbatch beyond which matmuls do not get faster."""


def grid_axes(shape: ModelShape) -> tuple[str, ...]:
    """Return the grid axes of a model, slowest first; `expert` only if the model has experts."""
    return tuple(axis for axis in GRID_AXES if axis != "expert" or shape.routed_layers)


@dataclass(frozen=True)
class SearchSpace:
    """Space of choices; a fixed choice is a list of one."""

    axes: Mapping[str, int] = field(default_factory=dict)
    """Axes of the grid that are fixed."""
    grids: Sequence[GridShape] | None = None
    """The only grids, if there is a list of them."""
    sequences: int | None = None
    """Sequences of a microbatch on a device, if fixed."""
    activations: Sequence[Activations] = SEARCHED
    offload: Sequence[bool] = (False, True)
    zero: Sequence[int] = (0, 1)
    virtual_stages: Sequence[int] = (1, 2, 4)
    reshard_after: Sequence[ReshardAfter] = ("forward",)

    def reshards(self, base: Candidate) -> list[Candidate]:
        """Return `base` with each lifetime of gathered weights worth trying.

        A pipeline keeps no gathered weights from one of its programs to the next.
        """
        # Skip lifetimes without effect: they would only add equal candidates to simulate and to compare.
        useful: set[ReshardAfter] = {"forward"}
        if len(self.reshard_after) == 1 and base.grid.pipe == 1:
            useful = set(self.reshard_after)
        elif base.grid.pipe == 1 and base.grid.z > 1:
            useful |= {"backward"} if base.activations != "none" else set()
            useful |= {"step"} if base.microbatches > 1 else set()
        return [replace(base, reshard_after=lifetime) for lifetime in self.reshard_after if lifetime in useful]


def legal_grids(request: PlanRequest, devices: int, space: SearchSpace, rules: Counter[str]) -> Iterator[GridShape]:
    """Yield every grid that the model and the batch divide over; count in `rules` why other grids are rejected."""
    fixed = dict.fromkeys(GRID_AXES, 1) | dict.fromkeys(grid_axes(request.shape)) | dict(space.axes)
    for grid in _grids(devices, fixed) if space.grids is None else space.grids:
        try:
            request.shape.check_grid(grid, sequence_split=request.sequence_split)
            request.comm(grid, "full")
        except UserError as error:
            rules[f"{error.field} does not divide over them"] += 1
            continue
        if request.batch % grid.batch_shards:
            batch = f"{request.batch} sequence{'s' * (request.batch != 1)}"
            rules[f"a batch of {batch} does not divide over {grid.batch_rule}"] += 1
        elif grid.pipe > segments(request):
            rules[f"they have more pipeline stages than the model has segments ({segments(request)})"] += 1
        elif grid.pipe > 1 and "forward" not in space.reshard_after:
            rules["a pipeline keeps no gathered weights"] += 1
        elif grid.pipe == 1 and min(space.virtual_stages) > 1:
            rules["they have no pipeline for virtual stages"] += 1
        else:
            yield grid


def _grids(devices: int, fixed: Mapping[str, int | None]) -> Iterator[GridShape]:
    """Yield every factorization of the number of devices into the axes."""

    def factors(remaining: int, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
        if not axes:
            if remaining == 1:
                yield ()
            return
        fixed_size = fixed[axes[0]]
        for size in divisors(remaining) if fixed_size is None else [fixed_size] if remaining % fixed_size == 0 else []:
            for tail in factors(remaining // size, axes[1:]):
                yield (size, *tail)

    for sizes in factors(devices, GRID_AXES):
        yield GridShape(**dict(zip(GRID_AXES, sizes, strict=True)))


def segments(request: PlanRequest) -> int:
    """Return the largest number of virtual stages that the model can be cut into."""
    # Blocks can be cut in halves, between attention and MLP; embedding and head are one segment each.
    return 2 * request.shape.layers + 2


def microbatch_sizes(request: PlanRequest, grid: GridShape, space: SearchSpace) -> list[int]:
    """Return the possible sequences of a device's microbatch, ascending: powers of two, and the device's full share.

    Powers of two stop at `ROWS` tokens, beyond which matmuls gain nothing.
    """
    share = request.batch // grid.batch_shards
    if space.sequences is not None:
        sizes = [space.sequences] if share % space.sequences == 0 else []
    else:
        most = max(1, ROWS // request.shape.seq_len)
        sizes = [size for size in divisors(share) if (size & (size - 1) == 0 and size <= most) or size == share]
    return [size for size in sizes if request.divides(share, size, grid.pipe)]


def depths(request: PlanRequest, base: Candidate) -> Iterator[Candidate]:
    """Yield the candidate with each number of microbatches in flight worth trying, starting from 1F1B's."""
    pipe = base.grid.pipe
    if pipe == 1 or not isinstance(policy_of(request.policy), ByArrival):
        yield base
        return
    # With virtual stages 1F1B's number is skipped; 0 stands for the policy's default.
    for in_flight in (pipe, 0, 2 * pipe, 3 * pipe)[base.virtual_stages > 1 :]:
        yield replace(base, in_flight=in_flight)


_GAIN = 0.998
"""More microbatches in flight must make the closed form shorter by this factor to be worth their memory."""
_POLICIES, _RESHARDS = ("none", "save_collectives", "dots", "full", "offload"), ("forward", "backward", "step")


class Priced(NamedTuple):
    """Candidate with its closed-form step time and the bytes of its fullest device."""

    step_s: float
    memory: float
    base: Candidate
    placement: StatePlacement

    @property
    def candidate(self) -> Candidate:
        """The candidate with its placement."""
        return replace(self.base, offload=self.placement[0], zero=self.placement[1])


def sort_key(step_s: float, base: Candidate, placement: StatePlacement) -> tuple[float, ...]:
    """Return the sort key of a candidate: time, then the extent of memory-saving options."""
    extent = _POLICIES.index(base.activations), _RESHARDS.index(base.reshard_after)
    return step_s, *extent, *placement, base.virtual_stages


def price(
    model: CostModel, grid: GridShape, space: SearchSpace, limit: float, virtual_stages: Sequence[int]
) -> Iterator[Priced]:
    """Yield every candidate on a grid that fits in memory."""
    too_large: set[tuple[int, Activations, ReshardAfter]] = set()
    placements = placements_of(grid, space)
    for base in _candidates(model.request, grid, space, virtual_stages):
        # Microbatches come in ascending size and need more memory as they grow, so skip the larger ones after a misfit.
        # A single microbatch is the exception: it does not keep gathered weights.
        kind = (base.virtual_stages, base.activations, base.reshard_after)
        if kind in too_large and (grid.pipe > 1 or base.microbatches > 1):
            continue
        fastest, parts = None, None
        for candidate in depths(model.request, base):
            seconds = None
            if parts is not None and fastest is not None:
                seconds = model.pipeline_s(candidate, parts)
                # Even more microbatches in flight would not be worth their memory either.
                if seconds > _GAIN * fastest:
                    break
            fits = False
            for placement, (device, host) in zip(
                placements, model.footprint.totals(candidate, placements), strict=True
            ):
                if device <= limit and host_fits(model.request, host, grid):
                    # The busiest rank does not depend on depth or placement, so its parts are computed once.
                    parts = parts or model.busiest(candidate)
                    seconds = model.pipeline_s(candidate, parts) if seconds is None else seconds
                    fits = True
                    yield Priced(seconds + model.once_s(grid, placement, device), device, candidate, placement)
            if not fits:
                break
            fastest = seconds
        if fastest is None:
            too_large.add(kind)


def _candidates(
    request: PlanRequest, grid: GridShape, space: SearchSpace, virtual_stages: Sequence[int]
) -> Iterator[Candidate]:
    """Yield the choices on a legal grid except offload and ZeRO."""
    share = request.batch // grid.batch_shards
    for virtual in virtual_stages if grid.pipe > 1 else (1,):
        if virtual > 1 and (policy_of(request.policy).one_stage or grid.pipe * virtual > segments(request)):
            continue
        for sequences in microbatch_sizes(request, grid, space):
            for activations in space.activations:
                yield from space.reshards(Candidate(grid, share // sequences, activations, virtual))


def front(candidates: Iterable[Priced]) -> list[Priced]:
    """Return the Pareto front of time and memory, fastest first."""
    return smaller(
        sorted(candidates, key=lambda priced: sort_key(priced.step_s, priced.base, priced.placement)),
        lambda priced: priced.memory,
    )


def smaller(items: Iterable[Item], memory: Callable[[Item], float]) -> list[Item]:
    """Return the items, sorted by time, that need less memory than every faster item."""
    smallest: list[Item] = []
    for item in items:
        if not smallest or memory(item) < memory(smallest[-1]):
            smallest.append(item)
    return smallest


def placements_of(grid: GridShape, space: SearchSpace) -> list[StatePlacement]:
    """Return every (offload, ZeRO stage) of the optimizer's state, the leanest last."""
    shares = [zero for zero in space.zero if not zero or grid.replicas > 1 or len(space.zero) == 1]
    return [(offload, zero) for zero in shares for offload in space.offload]


def has_room(model: CostModel, candidate: Candidate, limit: float) -> bool:
    """Return True if a candidate fits the memory of devices and hosts."""
    (device, host), *_ = model.footprint.totals(candidate, [candidate.placement])
    return device <= limit and host_fits(model.request, host, candidate.grid)


def host_fits(request: PlanRequest, device_bytes: float, grid: GridShape) -> bool:
    """Return True if a node's host memory holds `device_bytes` for each of its devices."""
    return device_bytes * min(request.machine.node.devices, grid.devices) <= request.machine.host.memory_bytes
