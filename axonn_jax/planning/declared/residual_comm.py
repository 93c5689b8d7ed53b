"""Selection of the blocks' communication with the residual stream by the bytes it sends; no jax."""

from collections.abc import Iterable
from functools import cache

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import describe, single_device_place
from axonn_jax.core.ops.costs import StepPolicy, collectives
from axonn_jax.core.ops.language import Layer
from axonn_jax.core.options import Activations, ResidualComm


def choose_residual_comm(
    setting: ResidualComm, shape: ModelShape, grid: GridShape, activations: Activations, *, sequence_split: bool = False
) -> BlockComm:
    """Return the blocks' communication for a setting; "auto" selects for each half what sends less over `x`.

    Args:
        setting: Setting to apply.
        shape: Sizes of the model.
        grid: Grid of the model.
        activations: Activation policy, which decides what the backward pass communicates again.
        sequence_split: True if `y` splits the sequence of the residual stream.

    Raises:
        UserError: The setting is "gather", and the model does not divide over the grid or the sequence is split.
    """
    if setting == "gather":
        both_halves = BlockComm(attention=True, mlp=True, sequence_split=sequence_split)
        both_halves.check(shape, grid)
        return both_halves
    if grid.x == 1 or setting == "all_reduce" or sequence_split:
        return BlockComm(sequence_split=sequence_split)
    policy = StepPolicy(activations=activations)

    def gathers(half: BlockComm) -> bool:
        return half.fits(shape, grid) and _sends_less(shape, grid.y, grid.x, half, policy)

    return BlockComm(attention=gathers(BlockComm(attention=True)), mlp=gathers(BlockComm(mlp=True)))


@cache
def _sends_less(shape: ModelShape, y: int, x: int, comm: BlockComm, policy: StepPolicy) -> bool:
    # Comparing the traffic over `x` is enough: both ways send the same over `y` and `z`.
    at = single_device_place(shape)._replace(y=y, x=x)
    gathering, reducing = (describe(shape, at, candidate)[1:-1] for candidate in (comm, BlockComm()))
    return _sent(gathering, policy) < _sent(reducing, policy)


def _sent(blocks: Iterable[Layer], policy: StepPolicy) -> int:
    # In units of (Gx-1)/Gx; on a ring an all-reduce sends twice what a gather or a reduce-scatter does.
    rows = collectives(blocks, policy)
    over_x = ((kind, buffer * runs) for _, _, kind, axes, buffer, runs in rows if axes == ("x",))
    return sum(2 * sent if kind == "all-reduce" else sent for kind, sent in over_x)
