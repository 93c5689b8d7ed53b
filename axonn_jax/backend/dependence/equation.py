"""An equation of a loss that is traced for all rows and for those of a part, with the types of what it is given."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from axonn_jax.backend.dependence.row_types import RowType

Shapes = tuple[tuple[int, ...], tuple[int, ...]]
"""Shape of a value of all rows, and of a part."""


@dataclass(frozen=True)
class Equation:
    """An equation in both programs, with the types of its operands."""

    name: str
    params: tuple[Any, Any]
    types: Sequence[RowType]
    shapes: Sequence[Shapes]
    results: Sequence[Shapes]
    dtypes: Sequence[Any]
    """Dtype of each operand, and last that of the first result."""
    keys: Sequence[Any]
    """Name of each operand: equal names have equal values."""
    of_model: Sequence[bool]
    """For each operand whether it depends on parameters, state or draws."""
    key: Any
    """Name of the result."""
    rows: tuple[int, int]
    """Rows of the batch, and of a part."""

    @property
    def param(self) -> Any:
        """Parameters of the program of all rows."""
        return self.params[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the first operand, of all rows."""
        return self.shapes[0][0]

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the first result, of all rows."""
        return self.results[0][0]

    def agrees(self, *names: str) -> bool:
        """True if these parameters are the same in both programs."""
        return all(self.params[0].get(name) == self.params[1].get(name) for name in names)

    def scalar(self, at: int) -> bool:
        """True if an operand is one number."""
        return all(size == 1 for size in self.shapes[at][0])


def by_rows(shapes: Shapes) -> frozenset[int]:
    """Return the axes whose size goes with the number of rows."""
    return frozenset(axis for axis, (full, part) in enumerate(zip(*shapes, strict=True)) if full != part)
