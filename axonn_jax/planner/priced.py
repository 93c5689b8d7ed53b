"""Choices of a grid that fit, each with its step time in closed form and its memory."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from axonn_jax.grid import GridShape
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.cost import CostModel
from axonn_jax.planner.job import Choice, Job, Place
from axonn_jax.planner.memory import Policy as Activations
from axonn_jax.planner.space import Space, depths, microbatch_sizes, pieces

_GAIN = 0.998
"""More microbatches in flight must make the closed form shorter by this factor to be worth their memory."""
_POLICIES, _GATHERS = ("none", "save_collectives", "dots", "full", "offload"), ("layer", "pass", "step")


class Priced(NamedTuple):
    """A choice, its step time in closed form, and the bytes of its fullest device."""

    step_s: float
    memory: float
    base: Choice
    place: Place

    @property
    def choice(self) -> Choice:
        """All of it."""
        return replace(self.base, offload=self.place[0], zero=self.place[1])

    @property
    def order(self) -> tuple[float, ...]:
        """By time, then by how little it asks for."""
        return sort_key(self.step_s, self.base, self.place)


def sort_key(step_s: float, base: Choice, place: Place) -> tuple[float, ...]:
    """What choices are sorted by: their time, then how little they ask for."""
    asked = _POLICIES.index(base.activations), _GATHERS.index(base.gather)
    return step_s, *asked, *place, base.virtual_stages


def price(
    model: CostModel, grid: GridShape, space: Space, limit: float, virtual_stages: Sequence[int]
) -> Iterator[Priced]:
    """Every choice on a grid that fits."""
    too_large: set[tuple[int, Activations, Gather]] = set()
    places = places_of(grid, space)
    for base in _choices(model.job, grid, space, virtual_stages):
        # Larger microbatches need more, but for the whole share in one, which need not keep gathered weights.
        kind = (base.virtual_stages, base.activations, base.gather)
        if kind in too_large and (grid.pipe > 1 or base.microbatches > 1):
            continue
        fastest, parts = None, None
        for choice in depths(model.job, base):
            seconds = None
            if parts is not None and fastest is not None:
                seconds = model.pipeline_s(choice, parts)
                if seconds > _GAIN * fastest:  # nor would still more be worth their memory
                    break
            fits = False
            for place, (device, host) in zip(places, model.footprint.totals(choice, places), strict=True):
                if device <= limit and host_fits(model.job, host, grid):
                    parts = parts or model.busiest(choice)
                    seconds = model.pipeline_s(choice, parts) if seconds is None else seconds
                    fits = True
                    yield Priced(seconds + model.once_s(grid, place), device, choice, place)
            if not fits:
                break
            fastest = seconds
        if fastest is None:
            too_large.add(kind)


def _choices(job: Job, grid: GridShape, space: Space, virtual_stages: Sequence[int]) -> Iterator[Choice]:
    """Choices of a legal grid, offload and ZeRO aside."""
    each = job.batch // grid.batch_shards
    for virtual in virtual_stages if grid.pipe > 1 else (1,):
        if virtual > 1 and (job.policy == "1f1b" or grid.pipe * virtual > pieces(job)):
            continue
        for sequences in microbatch_sizes(job, grid, space):
            for activations in space.activations:
                base = Choice(grid, each // sequences, activations, virtual)
                for gather in space.gathers(base):
                    yield base if gather == base.gather else replace(base, gather=gather)


def front(found: Sequence[Priced]) -> list[Priced]:
    """What nothing beats in both time and memory, fastest first."""
    front: list[Priced] = []
    for one in sorted(found, key=lambda one: one.order):
        if not front or one.memory < front[-1].memory:
            front.append(one)
    return front


def places_of(grid: GridShape, space: Space) -> list[Place]:
    """Every place and share of the optimizer's state, the leanest last."""
    shares = [zero for zero in space.zero if not zero or grid.data > 1 or len(space.zero) == 1]
    return [(offload, zero) for zero in shares for offload in space.offload]


def has_room(model: CostModel, choice: Choice, limit: float) -> bool:
    """Whether a choice fits the memory of devices and hosts."""
    (device, host), *_ = model.footprint.totals(choice, [choice.place])
    return device <= limit and host_fits(model.job, host, choice.grid)


def host_fits(job: Job, each: float, grid: GridShape) -> bool:
    """Whether a node has the host memory that so many bytes for each of its devices are."""
    return each * min(job.machine.node.devices, grid.devices) <= job.machine.host.memory_bytes
