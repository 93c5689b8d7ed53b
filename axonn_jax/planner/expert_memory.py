"""Memory of layers with experts in bytes; no jax. Where layers alternate, a block is the mean of both kinds."""

from collections.abc import Sequence
from dataclasses import fields

from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.planner.memory import BlockBytes, FeedForwardUse

_FLOAT32 = 4


def expert_params(shape: ModelShape) -> int:
    """Parameters of all experts of a layer that has some: what `expert` splits."""
    if shape.moe is None:
        return 0
    return shape.moe.experts * (shape.mlp_inputs + 1) * shape.hidden * shape.moe.ffn


def expert_use(shape: ModelShape, grid: GridShape, training: MoeConfig, comm: BlockComm, item: int) -> FeedForwardUse:
    """Elements that router and experts keep and work with, for each token of a microbatch on a device.

    `gather`: the tokens of all of `expert`, with all features; results and gradients of tokens add up in float32, and
    nothing of the experts' width is kept (`experts.grouped`). `capacity`: slots, and of each all widths. Experts that
    all tokens take are one more feed-forward layer.
    """
    moe, x, y = shape.moe, grid.x, grid.y
    if moe is None:
        raise ValueError("a model without experts has no dispatch")
    gates, part = shape.mlp_inputs, y if comm.sequence_split else 1
    scores = 3 * moe.experts * _FLOAT32 / item / part
    shared = moe.shared * moe.ffn / (x * y if comm.mlp else y)
    if training.drops:
        slots = moe.per_token * training.slack
        width = slots * moe.ffn / (x * y)
        tokens = slots * shape.hidden * (1 + 1 / x / y)
        working = 2 * slots * shape.hidden + 2 * gates * width
        wide, inner = gates * width, width
    else:
        everyone = grid.expert * shape.hidden
        apart = x > 1 or grid.expert > 1 or comm.sequence_split
        tokens = everyone if apart else 0.0
        working = everyone * (1 + _FLOAT32 / item) + (shape.hidden / x if apart else 0.0)
        wide = inner = 0.0
    return FeedForwardUse(
        wide=wide + gates * shared + scores,
        inner=inner + shared,
        working=working + 2 * gates * shared,
        reduced=gates * shared,
        tokens=tokens,
    )


def mean_block(kinds: Sequence[tuple[BlockBytes, int]]) -> BlockBytes:
    """A block of each kind and how many there are: the mean of what is kept, the most of what is at work."""
    if len(kinds) == 1:
        return kinds[0][0]
    layers = sum(count for _, count in kinds)
    largest = max((block for block, _ in kinds), key=lambda block: block.working)
    mean = {f.name: sum(getattr(block, f.name) * count for block, count in kinds) / layers for f in fields(BlockBytes)}
    return BlockBytes(**mean | {name: getattr(largest, name) for name in ("working", "again", "spare")})
