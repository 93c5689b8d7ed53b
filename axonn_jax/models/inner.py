"""Where features inside a block lie: over `y`, as in the papers, or over `y` and `x` together. No jax."""

from dataclasses import dataclass
from typing import Literal

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape, divides
from axonn_jax.models.shape import ModelShape

InnerFeatures = Literal["y", "yx", "auto"]

FIELD = "train.inner_features"


@dataclass(frozen=True)
class Inner:
    """Halves of a block whose inner features, heads or the MLP's, are split over `y` and `x`, and not over `y` alone.

    The stream, whose features `x` splits, is then gathered over `x` before, and what is added to it reduce-scattered
    over `x` after, in place of all-reduces of the wide features over `x`.
    """

    attention: bool = False
    mlp: bool = False

    def check(self, shape: ModelShape, grid: GridShape, *, sequence_parallel: bool = False) -> None:
        """Raises ``UserError`` unless what is split over `y` and `x` divides, and the stream's sequence is whole."""
        if sequence_parallel and self != PAPERS:
            raise UserError(FIELD, "yx", "y or auto with memory.sequence_parallel")
        parts, rule = grid.y * grid.x, f"y*x ({FIELD})"
        if self.attention:
            divides("model.kv_heads", shape.kv_heads, parts, rule)
            divides("model.heads", shape.heads, parts, rule)
            divides("heads * head_dim (model.hidden)", shape.heads * shape.head_dim, parts * grid.z, f"z*{rule}")
        if self.mlp:
            divides("model.ffn", shape.ffn, parts * grid.z, f"z*{rule}")

    def fits(self, shape: ModelShape, grid: GridShape) -> bool:
        """Whether what is split over `y` and `x` divides."""
        try:
            self.check(shape, grid)
        except UserError:
            return False
        return True

    def __str__(self) -> str:
        halves = [name for name in ("attention", "mlp") if getattr(self, name)]
        return f"inner features over y and x: {' and '.join(halves)}" if halves else "inner features over y"


PAPERS = Inner()
"""Over `y` everywhere: Agarwal's algorithm."""


def choose_inner(
    wanted: InnerFeatures, shape: ModelShape, grid: GridShape, activations: str, *, sequence_parallel: bool = False
) -> Inner:
    """What is wanted, for `auto` what sends less over `x` with this policy of activations (`memory.policies`).

    Raises ``UserError`` where "yx" is wanted and does not divide, or the stream's sequence is split.
    """
    if wanted == "yx":
        both = Inner(attention=True, mlp=True)
        both.check(shape, grid, sequence_parallel=sequence_parallel)
        return both
    if grid.x == 1 or wanted == "y" or sequence_parallel:
        return PAPERS
    again = activations not in ("none", "save_collectives")  # the others communicate once more in recomputation
    return Inner(
        attention=_less_attention(shape, grid.y, again) and Inner(attention=True).fits(shape, grid),
        mlp=_less_mlp(shape, grid.y, again) and Inner(mlp=True).fits(shape, grid),
    )


# In units of (Gx-1)/Gx times a device's tokens: outputs and their gradients all-reduced twice over, against the stream
# and its gradient gathered and scattered. Over `y` and `z` both ways send the same.
def _less_attention(shape: ModelShape, y: int, again: bool) -> bool:
    reduced = 2 * (shape.qkv_width * (1 + again) + shape.heads * shape.head_dim)
    return (4 + 2 * again) * shape.hidden * y < reduced


def _less_mlp(shape: ModelShape, y: int, again: bool) -> bool:
    wide = shape.ffn * (2 if shape.mlp == "swiglu" else 1)
    return (4 + again) * shape.hidden * y < 2 * (wide * (1 + again) + shape.ffn)
