"""Diagnosis of plan flags for which no grid is legal: the flag at fault, and legal values."""

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GRID_AXES, divisors
from axonn_jax.planning.request import PlanRequest
from axonn_jax.planning.space import SearchSpace, legal_grids, segments

_SHOWN = 8  # values in a message
_STAGES = tuple(range(1, 17))
"""Virtual stages among which a message looks for legal ones."""
_MICROBATCH, VIRTUAL = "--microbatch", "--pipeline.virtual_stages"


def check_legal(request: PlanRequest, devices: int, space: SearchSpace) -> None:
    """Raise ``UserError`` if no grid is legal, with the flag at fault and legal values.

    The flag at fault is one that excludes all grids by itself, or else the first one without which some are legal.
    """
    if any(_legal(request, devices, space)):
        return
    fixed = {f"--grid.{axis}": size for axis, size in space.axes.items()}
    fixed |= {} if space.sequences is None else {_MICROBATCH: space.sequences}
    fixed |= {VIRTUAL: space.virtual_stages[0]} if len(space.virtual_stages) == 1 else {}
    flag_at_fault = next((flag for flag in fixed if not any(_legal(request, devices, _only(flag, space)))), None)
    for flag in [flag_at_fault] if flag_at_fault else fixed:
        # Prefer values that are legal with all other flags. A flag wrong by itself may have none; then values that are
        # legal without the other flags still help.
        attempts = [(_without(flag, space), " beside the other flags"), (_without(flag, SearchSpace()), "")]
        for reduced, suffix in attempts[: 2 if flag_at_fault else 1]:
            values = {legal[flag] for legal in _legal(request, devices, reduced)}
            if nearest := sorted(values, key=lambda value: abs(value - fixed[flag])):
                accepted = _accepted(request, devices, nearest, suffix if len(fixed) > 1 else "")
                raise UserError(flag, fixed[flag], accepted)
    if fixed:
        accepted = f"values that go together; {_why(request, devices, space)}"
        raise UserError(", ".join(fixed), ", ".join(map(str, fixed.values())), accepted)
    raise UserError("--devices", devices, f"a number for which a grid is legal; {_why(request, devices, space)}")


def _accepted(request: PlanRequest, devices: int, values: list[int], suffix: str) -> str:
    shown = ", ".join(map(str, sorted(values[:_SHOWN])))
    prefix = "such as " if len(values) > _SHOWN else "one of " if len(values) > 1 else ""
    batch = f"{request.batch:,} sequence{'s' * (request.batch != 1)}"
    return f"{prefix}{shown}, which {devices:,} devices, the model and a batch of {batch} allow{suffix}"


def _why(request: PlanRequest, devices: int, space: SearchSpace) -> str:
    rules = Counter[str]()
    if next(legal_grids(request, devices, space, rules), None) is not None:
        return "the batch leaves fewer microbatches than there are stages"
    if not rules:
        return f"the axes' product is {devices:,}, the number of devices"
    return "; ".join(f"{count:,} grid{'s' * (count != 1)}: {why}" for why, count in rules.most_common(2))


def _without(flag: str, space: SearchSpace) -> SearchSpace:
    if flag == _MICROBATCH:
        return replace(space, sequences=None)
    if flag == VIRTUAL:
        return replace(space, virtual_stages=_STAGES)
    return replace(space, axes={axis: size for axis, size in space.axes.items() if f"--grid.{axis}" != flag})


def _only(flag: str, space: SearchSpace) -> SearchSpace:
    if flag == _MICROBATCH:
        return SearchSpace(sequences=space.sequences)
    if flag == VIRTUAL:
        return SearchSpace(virtual_stages=space.virtual_stages)
    return SearchSpace(axes={axis: size for axis, size in space.axes.items() if f"--grid.{axis}" == flag})


def _legal(request: PlanRequest, devices: int, space: SearchSpace) -> Iterator[dict[str, int]]:
    for grid in legal_grids(request, devices, space, Counter[str]()):
        local_batch, pipe = request.batch // grid.batch_shards, grid.pipe
        options = divisors(local_batch) if space.sequences is None else [space.sequences]
        sizes = [size for size in options if local_batch % size == 0 and request.divides(local_batch, size, pipe)]
        stages = [count for count in space.virtual_stages if pipe * count <= segments(request)] if pipe > 1 else [1]
        axes = {f"--grid.{axis}": getattr(grid, axis) for axis in GRID_AXES}
        for count in stages if sizes else ():
            for size in sizes:
                yield {**axes, _MICROBATCH: size, VIRTUAL: count}
