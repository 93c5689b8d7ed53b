"""Refusal of flags for which there is no grid: names the flag at fault and legal values."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from axonn_jax.errors import UserError
from axonn_jax.grid import GRID_AXES, divisors
from axonn_jax.planner.request import PlanRequest
from axonn_jax.planner.space import SearchSpace, legal_grids, segments

_SHOWN = 8
"""Most values in a message."""
_STAGES = tuple(range(1, 17))
"""Numbers of virtual stages tried for a message."""
_MICROBATCH, VIRTUAL = "--microbatch", "--pipeline.virtual_stages"


def check_legal(request: PlanRequest, devices: int, space: SearchSpace) -> None:
    """Raise ``UserError`` if no grid is legal, on the flag at fault and with legal values.

    The flag at fault alone excludes all grids; else the first flag without which some are legal.
    """
    if any(_legal(request, devices, space)):
        return
    fixed = {f"--grid.{axis}": size for axis, size in space.axes.items()}
    fixed |= {} if space.sequences is None else {_MICROBATCH: space.sequences}
    fixed |= {VIRTUAL: space.virtual_stages[0]} if len(space.virtual_stages) == 1 else {}
    wrong = next((flag for flag in fixed if not any(_legal(request, devices, _only(flag, space)))), None)
    for flag in [wrong] if wrong else fixed:
        among = [(_without(flag, space), " beside the other flags"), (_without(flag, SearchSpace()), "")]
        for left, suffix in among[: 2 if wrong else 1]:
            values = {legal[flag] for legal in _legal(request, devices, left)}
            if nearest := sorted(values, key=lambda value: abs(value - fixed[flag])):
                accepted = _accepted(request, devices, nearest, suffix if len(fixed) > 1 else "")
                raise UserError(flag, fixed[flag], accepted)
    if fixed:
        accepted = f"values that go together; {_why(request, devices, space)}"
        raise UserError(", ".join(fixed), ", ".join(map(str, fixed.values())), accepted)
    raise UserError("--devices", devices, f"a number for which a grid is legal; {_why(request, devices, space)}")


def _accepted(request: PlanRequest, devices: int, values: list[int], suffix: str) -> str:
    shown = ", ".join(map(str, sorted(values[:_SHOWN])))
    such = "such as " if len(values) > _SHOWN else "one of " if len(values) > 1 else ""
    batch = f"{request.batch:,} sequence{'s' * (request.batch != 1)}"
    return f"{such}{shown}, which {devices:,} devices, the model and a batch of {batch} allow{suffix}"


def _why(request: PlanRequest, devices: int, space: SearchSpace) -> str:
    rules = Counter[str]()
    if next(legal_grids(request, devices, space, rules), None) is not None:
        return "the batch leaves fewer microbatches than there are stages"
    if not rules:
        return f"the axes' product is {devices:,}, the number of devices"
    return "; ".join(f"{count:,} grid{'s' * (count != 1)}: {why}" for why, count in rules.most_common(2))


def _without(flag: str, space: SearchSpace) -> SearchSpace:
    """Return a search space with the value of a flag free."""
    if flag == _MICROBATCH:
        return replace(space, sequences=None)
    if flag == VIRTUAL:
        return replace(space, virtual_stages=_STAGES)
    return replace(space, axes={axis: size for axis, size in space.axes.items() if f"--grid.{axis}" != flag})


def _only(flag: str, space: SearchSpace) -> SearchSpace:
    """Return a search space in which this flag alone is fixed."""
    if flag == _MICROBATCH:
        return SearchSpace(sequences=space.sequences)
    if flag == VIRTUAL:
        return SearchSpace(virtual_stages=space.virtual_stages)
    return SearchSpace(axes={axis: size for axis, size in space.axes.items() if f"--grid.{axis}" == flag})


def _legal(request: PlanRequest, devices: int, space: SearchSpace) -> Iterator[dict[str, int]]:
    """Yield the combinations of a search by flag, any size of microbatch included."""
    for grid in legal_grids(request, devices, space, Counter[str]()):
        each, pipe = request.batch // grid.batch_shards, grid.pipe
        wanted = divisors(each) if space.sequences is None else [space.sequences]
        sizes = [size for size in wanted if each % size == 0 and request.divides(each, size, pipe)]
        stages = [many for many in space.virtual_stages if pipe * many <= segments(request)] if pipe > 1 else [1]
        axes = {f"--grid.{axis}": getattr(grid, axis) for axis in GRID_AXES}
        for many in stages if sizes else ():
            for size in sizes:
                yield {**axes, _MICROBATCH: size, VIRTUAL: many}
