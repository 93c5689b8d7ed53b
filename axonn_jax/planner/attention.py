"""Attention in a plan: the form that the program takes on a machine, and what it needs of memory and time."""

from functools import cache

from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.machine import Device, Machine
from axonn_jax.planner.memory import Precision, itemsize
from axonn_jax.tensor.attention_forms import AttentionDevice, AttentionForm, AttentionKernel, choose_form, tiles

FUSED: tuple[AttentionKernel, ...] = ("cudnn", "splash")
_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CUDNN = 91100
"""A version that refuses no GPU: which one a machine has is not in its file."""


def described(device: Device) -> AttentionDevice:
    """What the choice of a form depends on, as a machine file says it.

    On TPUs the fused form needs a package that may not be there, and a stage of one device: no plan counts on it.
    """
    if device.platform != "cuda":
        return AttentionDevice(device.platform, alone=False)
    major, minor = str(float(device.capability)).split(".")
    return AttentionDevice("cuda", (int(major), int(minor)), _CUDNN)


def form_taken(device: Device, precision: Precision, head_dim: int, seq: int) -> AttentionForm:
    """The form that a program takes there which may choose."""
    if not device.platform:
        return AttentionForm("blocked", "the machine file does not say device.platform")
    return choose_form("auto", described(device), _DTYPES[precision], head_dim, seq)


def usual_kernel(machine: Machine) -> AttentionKernel:
    """The one whose rate is `device.attention`: of common heads in half precision."""
    return form_taken(machine.device, machine.half, 64, 128).kernel


@cache
def scores_bytes(kernel: AttentionKernel, platform: str, heads: int, seq: int) -> float:
    """Bytes of scores at work in a backward pass over so many heads, those of all sequences together.

    Blocks are taken a chunk of heads at a time, but those of a chunk do not wait for each other, and XLA starts them
    all: their float32 scores are there at once, on CPUs beside as many gradients. Whole scores are a block's, by token.
    """
    if kernel != "blocked":
        return 0.0
    sizes = tiles(platform, seq)
    return (8 if platform == "cpu" else 4) * float(sizes.chunk(heads, seq) * sizes.computed(seq))


def attention_seconds(
    kernel: AttentionKernel, machine: Machine, precision: Precision, rate: float, shape: ModelShape, heads: float
) -> tuple[float, float]:
    """Scores, softmax and their product with values, forward and backward, of so many heads of all sequences together.

    At the machine's measured or estimated rate for the kernel, if it has one: the causal half alone, and 2.5 times as
    much backward, which computes the scores again. Else blocks are matmuls, two forward and five backward, and
    passes over their scores in memory: forward they are written, read for the maximum, the sum and the weights, and
    those are written and read; backward scores and their gradients are written and read, then written in the model's
    dtype and read five times in all. A fused kernel without a rate is taken to be as slow.
    Whole scores: two matmuls and four, with six and eight passes over them.
    """
    seq, device, item = shape.seq_len, machine.device, itemsize(precision)
    flops = 4.0 * shape.head_dim * heads
    if kernel == "xla":
        scores = heads * seq**2
        passes = scores * item / device.memory_bytes_per_s
        return flops * seq**2 / rate + 6 * passes, 2 * flops * seq**2 / rate + 8 * passes
    if device.attention > 0 and (kernel in FUSED or usual_kernel(machine) == kernel):
        forward = flops * seq**2 / 2 / (rate * device.attention) + device.launch_s
        return forward, 2.5 * forward
    pairs = float(tiles(device.platform, seq).computed(seq))
    forward = flops * pairs / rate + heads * pairs * (16 + 2 * item) / device.memory_bytes_per_s
    return forward, 2.5 * flops * pairs / rate + heads * pairs * (16 + 5 * item) / device.memory_bytes_per_s
