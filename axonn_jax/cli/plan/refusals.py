"""Refusal of flags for which there is no grid: names the flag at fault and legal values."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from axonn_jax.errors import UserError
from axonn_jax.grid import GRID_AXES, divisors
from axonn_jax.planner.request import PlanRequest
from axonn_jax.planner.space import SearchSpace, legal_grids, segments

_SHOWN = 8
"""Most values in a message."""
_STAGES = tuple(range(1, 17))
"""Numbers of virtual stages tried for a message."""

Legal = tuple[dict[str, int], int, int]
"""Sizes of a grid's axes, sequences of a microbatch, virtual stages."""


@dataclass(frozen=True)
class _Fixed:
    """Given flag."""

    flag: str
    value: int
    free: Callable[[SearchSpace], SearchSpace]
    """Search space without the flag."""
    alone: SearchSpace
    """Search space with no other flag given."""
    of: Callable[[Legal], int]
    """Value of the flag in a legal combination."""


def check_legal(request: PlanRequest, devices: int, space: SearchSpace) -> None:
    """Raise ``UserError`` if no grid is legal, on the flag at fault and with legal values.

    The flag at fault alone excludes all grids; else the first flag without which some are legal.
    """
    if next(_legal(request, devices, space), None) is not None:
        return
    fixed = list(_fixed(space))
    wrong = next((flag for flag in fixed if next(_legal(request, devices, flag.alone), None) is None), None)
    for flag in [wrong] if wrong else fixed:
        among = [(flag.free(space), " beside the other flags"), (flag.free(flag.alone), "")]
        for left, suffix in among[: 2 if wrong else 1]:
            values = sorted(
                {flag.of(legal) for legal in _legal(request, devices, left)}, key=lambda v: abs(v - flag.value)
            )
            if values:
                raise UserError(
                    flag.flag, flag.value, _accepted(request, devices, values, suffix if len(fixed) > 1 else "")
                )
    if fixed:
        flags, given = ", ".join(flag.flag for flag in fixed), ", ".join(str(flag.value) for flag in fixed)
        raise UserError(flags, given, f"values that go together; {_why(request, devices, space)}")
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


def _fixed(space: SearchSpace) -> Iterator[_Fixed]:
    for name, size in space.axes.items():
        yield _axis(name, size)
    if space.sequences is not None:
        yield _Fixed(
            "--microbatch",
            space.sequences,
            lambda space: replace(space, sequences=None),
            SearchSpace(sequences=space.sequences),
            lambda legal: legal[1],
        )
    if len(space.virtual_stages) == 1:
        yield _Fixed(
            "--virtual-stages",
            space.virtual_stages[0],
            lambda space: replace(space, virtual_stages=_STAGES),
            SearchSpace(virtual_stages=space.virtual_stages),
            lambda legal: legal[2],
        )


def _axis(name: str, size: int) -> _Fixed:
    def free(space: SearchSpace) -> SearchSpace:
        return replace(space, axes={name_: size for name_, size in space.axes.items() if name_ != name})

    return _Fixed(f"--grid.{name}", size, free, SearchSpace(axes={name: size}), lambda legal: legal[0][name])


def _legal(request: PlanRequest, devices: int, space: SearchSpace) -> Iterator[Legal]:
    """Yield the combinations of a search, any size of microbatch included."""
    for grid in legal_grids(request, devices, space, Counter[str]()):
        each = request.batch // grid.batch_shards
        sizes = [
            size
            for size in (divisors(each) if space.sequences is None else [space.sequences])
            if each % size == 0 and (grid.pipe == 1 or each // size >= grid.pipe)
        ]
        stages = (
            [many for many in space.virtual_stages if grid.pipe * many <= segments(request)] if grid.pipe > 1 else [1]
        )
        axes = {axis: getattr(grid, axis) for axis in GRID_AXES}
        for many in stages if sizes else ():
            for size in sizes:
                yield axes, size, many
