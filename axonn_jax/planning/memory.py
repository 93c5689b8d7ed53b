"""Memory of training in bytes: model state by precision and placement, activations, buffers; no jax.

Every function is a formula: numbers of parameters or tokens in, bytes out.
"""

from dataclasses import dataclass
from functools import cache
from math import ceil
from typing import Literal

from axonn_jax.core.backend.traits import keeps_score_gradients
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.ops.language import FLOAT32, Param
from axonn_jax.core.options import AttentionKernel, Optimizer, is_muons
from axonn_jax.core.tensor.kernel_choice import loss_chunk, tiles

Precision = Literal["fp32", "bf16", "fp16"]


@dataclass(frozen=True)
class ParamBytes:
    """Bytes of weights, gradients and optimizer state, on one kind of memory."""

    weights: float = 0.0
    """Bytes of the weights that a step reads: in compute precision if there are float32 masters, else float32."""
    gradients: float = 0.0
    """Bytes of accumulated gradients."""
    master: float = 0.0
    """Bytes of float32 master weights of half-precision ones."""
    moments: float = 0.0
    """Bytes of the optimizer's state, such as Adam's two moments."""
    positions: float = 0.0
    """Bytes of the positions of unpruned entries."""

    @property
    def total(self) -> float:
        """Sum of all kinds."""
        return self.weights + self.gradients + self.master + self.moments + self.positions


def itemsize(precision: Precision) -> int:
    """Return the bytes of an element in compute precision."""
    return FLOAT32 if precision == "fp32" else 2


ADAM = 8.0
"""Bytes of the state of Adam's two moments for an element of a parameter."""
AVERAGE = 4.0
"""Bytes of a moving average for an element of a parameter (train.ema)."""


def state_item(optimizer: Optimizer | None, param: Param) -> float:
    """Return the bytes of an optimizer's state for an element of a parameter; None stands for SGD without momentum."""
    if optimizer is None:
        return 0.0
    # Muon keeps a single moment of its matrices and applies Adam, with two, to all other parameters.
    if optimizer == "muon":
        return 4.0 if is_muons(param.name, len(param.shape)) else ADAM
    if optimizer == "adafactor":
        *_, second, largest = (1, 1, *sorted(param.shape))
        return 4.0 / second + 4.0 / largest if second >= _FACTORED else 4.0
    return {"sgd": 4.0, "lion": 4.0, "adamw_bf16": 6.0}.get(optimizer, ADAM)


_FACTORED = 128
"""Least second largest dimension of a parameter of which Adafactor keeps sums of rows and of columns (optax)."""


def device_state(
    params: float,
    precision: Precision,
    *,
    moment: float = ADAM,
    unpruned: float | None = None,
    gradient_item: int = FLOAT32,
    separate_masters: bool = False,
    offload: bool = False,
    replicas: int = 1,
) -> ParamBytes:
    """Return the bytes of model state of `params` parameters on the device.

    If a share f of the parameters is kept by pruning, the state takes 2 + 20 f bytes per parameter in half precision
    and 4 + 20 f in float32. SAMO (IPDPS 23) has 2 + 24 f, because it also keeps half-precision values and a cast copy.
    Spare slots are not counted.

    Args:
        params: Number of parameters.
        precision: Compute precision.
        moment: Bytes of optimizer state per parameter.
        unpruned: Number of trained entries of pruned parameters. Weights stay dense; everything else only covers these.
        gradient_item: Bytes of a gradient's element.
        separate_masters: True if float32 master weights exist next to half-precision weights, as they always do if
            they are sharded or, with `offload`, on the host. Otherwise the weights themselves are float32.
        offload: True if master weights and optimizer state are on the host.
        replicas: Devices that share master weights and optimizer state (ZeRO-1); 1 if none do.
    """
    trained, separate_masters = (
        params if unpruned is None else unpruned,
        separate_masters or offload or replicas > 1 or unpruned is not None,
    )
    master, moments = _optimizer(
        trained / replicas, precision if unpruned is None else "bf16", moment, separate_masters
    )
    return ParamBytes(
        weights=params * (itemsize(precision) if separate_masters else FLOAT32),
        gradients=trained * gradient_item,
        master=0.0 if offload else master,
        moments=0.0 if offload else moments,
        positions=0.0 if unpruned is None else unpruned * FLOAT32,
    )


def host_state(params: float, precision: Precision, replicas: int = 1, moment: float = ADAM) -> float:
    """Return the bytes of `params` parameters' offloaded state: the optimizer's and half-precision weights' masters."""
    return sum(_optimizer(params / replicas, precision, moment, separate_masters=True))


def _optimizer(params: float, precision: Precision, moment: float, separate_masters: bool) -> tuple[float, float]:
    """Return the bytes of master weights and of the optimizer's state."""
    return (params * FLOAT32 if separate_masters and precision != "fp32" else 0.0), params * moment


def streamed_state(bucket: float, precision: Precision, moment: float = ADAM) -> float:
    """Return the device bytes of the buckets of an offloaded update."""
    # Three buckets are resident: one arrives, one is updated, one is on its way back.
    return 3 * host_state(bucket, precision, moment=moment)


@cache
def scores_bytes(kernel: AttentionKernel, platform: str, heads: int, seq: int) -> float:
    """Return the bytes of attention scores in a backward pass over `heads` heads, counted over all sequences.

    Blocks are computed one chunk of heads at a time. The blocks of a chunk do not depend on each other and XLA starts
    all of them, so their float32 scores are resident at the same time, on CPUs together with as many gradients.
    Unblocked scores are counted per token in the block's activations instead.
    """
    if kernel != "blocked":
        return 0.0
    sizes = tiles(platform, seq)
    return (8 if keeps_score_gradients(platform) else 4) * float(sizes.chunk(heads, seq) * sizes.computed(seq))


def head_activations(shape: ModelShape, x: int, columns: int, item: int, tokens: int, *, trained: bool = True) -> float:
    """Return the bytes of a microbatch's `tokens` at the head, with `columns` of the padded vocabulary on a device.

    They are the float32 sum of the weight's gradient (none without `trained`), the stream with its gradient, and the
    logits of a chunk with their gradient in float32 (`loss_chunk`). After these comes the scaled sum, unless it is
    added to a lookup's gradient.
    """
    weight = shape.hidden / x * columns * FLOAT32 * trained
    logits = 2 * loss_chunk(tokens, columns) * columns * FLOAT32
    return weight + max(logits, 0.0 if shape.tied else weight) + 3 * tokens * shape.hidden / x * item


def balanced_blocks(layers: int, head: float, pipe: int) -> tuple[float, float]:
    """Return the blocks of the busiest rank and of the last rank, whose head is as expensive as `head` blocks.

    Stages are cut at half blocks.
    """
    usual = ceil(2 * (layers + head) / pipe) / 2
    last = max(0.0, min(int(2 * (usual - head)) / 2, layers - (pipe - 1) * 0.5))
    return max(ceil(2 * (layers - last) / (pipe - 1)) / 2, 0.5), last
