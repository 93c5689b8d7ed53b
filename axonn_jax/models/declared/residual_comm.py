"""Choice of the blocks' communication with the residual stream, by the bytes that their declarations send; no jax."""

from collections.abc import Iterable
from functools import cache

from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.models.declared.transformer import alone, describe
from axonn_jax.ops.costs import StepPolicy, collectives
from axonn_jax.ops.language import Layer
from axonn_jax.options import Activations, ResidualComm


def choose_residual_comm(
    wanted: ResidualComm, shape: ModelShape, grid: GridShape, activations: Activations, *, sequence_split: bool = False
) -> BlockComm:
    """Return the wanted communication; for `auto` the one that sends less over `x` under a policy of activations.

    Raises:
        UserError: "gather" is wanted and does not divide, or the stream's sequence is split.
    """
    if wanted == "gather":
        both = BlockComm(attention=True, mlp=True, sequence_split=sequence_split)
        both.check(shape, grid)
        return both
    if grid.x == 1 or wanted == "all_reduce" or sequence_split:
        return BlockComm(sequence_split=sequence_split)
    policy = StepPolicy(activations=activations)

    def gathers(half: BlockComm) -> bool:
        return half.fits(shape, grid) and _sends_less(shape, grid.y, grid.x, half, policy)

    return BlockComm(attention=gathers(BlockComm(attention=True)), mlp=gathers(BlockComm(mlp=True)))


@cache
def _sends_less(shape: ModelShape, y: int, x: int, comm: BlockComm, policy: StepPolicy) -> bool:
    """Return True if blocks send less over `x` than with all-reduces; over `y` and `z` both send the same."""
    at = alone(shape)._replace(y=y, x=x)
    gathering, reducing = (describe(shape, at, one)[1:-1] for one in (comm, BlockComm()))
    return _sent(gathering, policy) < _sent(reducing, policy)


def _sent(blocks: Iterable[Layer], policy: StepPolicy) -> int:
    """Return the bytes that blocks send over `x`, in units of (Gx-1)/Gx."""
    rows = collectives(blocks, policy)
    over_x = ((kind, buffer * runs) for _, _, kind, axes, buffer, runs in rows if axes == ("x",))
    return sum(2 * sent if kind == "all-reduce" else sent for kind, sent in over_x)
