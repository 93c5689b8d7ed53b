"""Equation of a loss in both of its traces, for all rows and for one part, with the types of its operands."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axonn_jax.any_flax.dependence.row_types import RowType

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a value in the program of all rows, and in the program of a part."""


@dataclass(frozen=True)
class Equation:
    """An equation in both programs, with the types of its operands."""

    name: str
    params: tuple[Any, Any]
    types: Sequence[RowType]
    shapes: Sequence[Shapes]
    results: Sequence[Shapes]
    dtypes: Sequence[Any]
    """Dtype of each operand, followed by the dtype of the first result."""
    keys: Sequence[Any]
    """Name of each operand: equal names have equal values."""
    of_model: Sequence[bool]
    """For each operand, whether it depends on parameters, state or random draws."""
    key: Any
    """Name of the first result."""
    rows: tuple[int, int]
    """Number of rows of the batch, and of a part."""

    @property
    def param(self) -> Any:
        """Parameters in the program of all rows."""
        return self.params[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first operand in the program of all rows."""
        return self.shapes[0][0]

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the first result in the program of all rows."""
        return self.results[0][0]

    def agrees(self, *names: str) -> bool:
        """Return whether these parameters are equal in both programs."""
        return all(self.params[0].get(name) == self.params[1].get(name) for name in names)

    def scalar(self, at: int) -> bool:
        """Return whether an operand has a single element."""
        return all(size == 1 for size in self.shapes[at][0])


def by_rows(shapes: Shapes) -> frozenset[int]:
    """Return the axes whose size depends on the number of rows; all, if the programs differ in the number of axes."""
    if len(shapes[0]) != len(shapes[1]):  # jax leaves an axis of one row out of some products
        return frozenset(range(len(shapes[0])))
    # Compare sizes between the traces instead of with the number of rows, which a feature axis may equal by chance.
    return frozenset(axis for axis, (full, part) in enumerate(zip(*shapes, strict=True)) if full != part)
