"""Communication of a model's blocks with the residual stream, as one object; no jax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape, divides
from axonn_jax.core.ops.layers import Comm

if TYPE_CHECKING:
    from axonn_jax.core.models.config import ModelShape

FIELD = "tensor.residual_comm"


@dataclass(frozen=True)
class BlockComm:
    """Communication of each half of a block with the residual stream, whose features are split over `x`.

    A half that gathers has its inner features (heads, or the MLP's) split over both `y` and `x`: the stream is
    all-gathered over `x` before it and reduce-scattered after it.
    """

    # Gathering moves the narrow residual stream over `x`, where the default all-reduces the wide inner features.

    attention: bool = False
    """True if attention gathers."""
    mlp: bool = False
    """True if the MLP gathers."""
    sequence_split: bool = False
    """True if the stream's sequence is split over `y` (`memory.sequence_parallel`); no half gathers then."""

    def of(self, gathers: bool) -> Comm:
        """Return the communication of the projections in a half that gathers, or does not."""
        return "sequence" if self.sequence_split else "gather" if gathers else "all_reduce"

    def check(self, shape: "ModelShape", grid: GridShape) -> None:
        """Raise ``UserError`` unless gathered halves divide over `y` and `x`, without a split sequence."""
        if self.sequence_split and (self.attention or self.mlp):
            raise UserError(FIELD, "gather", "all_reduce or auto with memory.sequence_parallel")
        parts, rule = grid.y * grid.x, f"y*x ({FIELD})"
        if self.attention:
            divides("model.kv_heads", shape.kv_heads, parts, rule)
            divides("model.heads", shape.heads, parts, rule)
            divides("heads * head_dim (model.hidden)", shape.heads * shape.head_dim, parts * grid.z, f"z*{rule}")
        if self.mlp:
            divides("model.ffn", shape.ffn, parts * grid.z, f"z*{rule}")

    def fits(self, shape: "ModelShape", grid: GridShape) -> bool:
        """Return True if `check` accepts the shape and grid."""
        try:
            self.check(shape, grid)
        except UserError:
            return False
        return True

    def __str__(self) -> str:
        halves = [name for name, gathers in (("attention", self.attention), ("mlp", self.mlp)) if gathers]
        return f"residual communication: {'gather in ' + ' and '.join(halves) if halves else 'all_reduce'}"


ALL_REDUCE = BlockComm()
"""Agarwal's 3D matrix multiplication, as in the AxoNN papers."""
