"""Choice of kernels: the form of attention on a device, and the parts in which a loss runs; no jax."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from axonn_jax.backend.traits import computes_on_cores
from axonn_jax.errors import UserError
from axonn_jax.hardware import AttentionDevice
from axonn_jax.options import AttentionKernel

FIELD = "model.attention"
_NO_CAP = "it has no cap on scores here"
_AMPERE, _HOPPER, _BLACKWELL_ULTRA = (8, 0), (9, 0), (10, 3)


@dataclass(frozen=True)
class Tiles:
    """Sizes that blocked attention works in."""

    queries: int
    """Queries of a block."""
    scores: int
    """Scores that a chunk of heads may have at a time."""

    def blocks(self, seq: int) -> Iterator[slice]:
        """Yield the queries of each block."""
        return (slice(start, min(start + self.queries, seq)) for start in range(0, seq, self.queries))

    def computed(self, seq: int) -> int:
        """Scores that a head computes: each block with the keys up to the block's end."""
        return sum((block.stop - block.start) * block.stop for block in self.blocks(seq))

    def chunk(self, heads: int, seq: int) -> int:
        """Number of heads taken at a time: the most that divide all heads and whose scores fit `scores`."""
        most = max(1, self.scores // (min(seq, self.queries) * seq))
        return next(size for size in range(min(heads, most), 0, -1) if heads % size == 0)


def tiles(platform: str, seq: int) -> Tiles:
    """Return the tiles for a platform: half a megabyte of float32 scores on CPUs, within a core's level-2 cache; else
    256 MB.

    An accelerator takes at most 16 blocks, since each is compiled for itself and should fill the device.
    """
    if computes_on_cores(platform):
        return Tiles(128, 128 * 1024)
    return Tiles(max(128, ceil(seq / 16)), 2**26)


class AttentionRule(NamedTuple):
    """Rule of a layer's attention, for which not every kernel is made."""

    window: int = 0
    """Tokens that a token sees, itself and those right before it; 0: all before it."""
    cap: float = 0.0
    """Soft cap of scores (`elementwise.capped`); 0: none."""

    def __str__(self) -> str:
        window = [f"windows of {self.window} tokens"] if self.window else []
        return " and ".join(window + ([f"scores capped at {self.cap:g}"] if self.cap else [])) or "sight of every token"


EVERY_TOKEN = AttentionRule()
"""Attention to all earlier tokens."""


@dataclass(frozen=True)
class AttentionForm:
    """Attention kernel chosen, with the reasons."""

    kernel: AttentionKernel
    """Kernel in use; never "auto"."""
    why: str = ""
    """Reasons against each faster kernel; empty if there is none."""

    def __str__(self) -> str:
        return f"attention: {self.kernel}" + (f" ({self.why})" if self.why else "")


def choose_form(
    requested: AttentionKernel,
    device: AttentionDevice,
    dtype: str,
    head_dim: int,
    seq: int,
    rule: AttentionRule = EVERY_TOKEN,
    *,
    packed: bool = False,
) -> AttentionForm:
    """The form of attention for operands of a dtype: the one wanted, or with auto the best that the device has.

    Raises ``UserError`` where the one wanted cannot be had.
    """
    against = {"cudnn": against_cudnn(device, dtype, head_dim), "splash": against_splash(device, dtype, seq, rule)}
    accepted = "auto or blocked" if rule.cap else "auto, blocked or xla"
    if rule.cap:
        against = {kernel: fault or _NO_CAP for kernel, fault in (against | {"xla": ""}).items()}
    if packed:  # neither is known to take masks that depend on the batch
        against = {kernel: fault or "it is not used for packed documents" for kernel, fault in against.items()}
    if requested == "auto":
        fast: AttentionKernel = "splash" if device.platform == "tpu" else "cudnn"
        return AttentionForm("blocked", f"not {fast}: {against[fast]}") if against[fast] else AttentionForm(fast)
    if fault := against.get(requested):
        raise UserError(FIELD, requested, f"{accepted}: {fault}")
    return AttentionForm(requested)


def against_cudnn(device: AttentionDevice, dtype: str, head_dim: int) -> str:
    """Reason against cuDNN's fused attention, by the checks of jax 0.10.2; empty without one."""
    if device.platform != "cuda":
        return "it needs an NVIDIA GPU"
    if device.capability < _AMPERE:
        return f"it needs compute capability 8.0, this is {_version(device)}"
    if dtype not in ("bfloat16", "float16"):
        return f"it needs bf16 or fp16, this is {dtype}"
    widest = 256 if device.capability >= _HOPPER else 128
    if head_dim % 8 or head_dim > widest:
        least = f"at most {widest} on compute capability {_version(device)}"
        return f"it needs a head_dim that is a multiple of 8 and {least}, this is {head_dim}"
    if not device.cudnn:
        return "jax finds no cuDNN"
    if device.capability == _BLACKWELL_ULTRA and device.cudnn < 91100:
        return "it needs cuDNN 9.11 on compute capability 10.3"
    return ""


def _version(device: AttentionDevice) -> str:
    return ".".join(map(str, device.capability))


def against_splash(device: AttentionDevice, dtype: str, seq: int, rule: AttentionRule = EVERY_TOKEN) -> str:
    """Reason against tokamax's splash attention, by the checks of tokamax 0.0.12; empty without one."""
    if device.platform != "tpu":
        return "it needs a TPU"
    if not device.tokamax:
        return "it needs tokamax, which is not installed"
    if not device.alone:
        return "tokamax's kernels run where a stage has one device"
    if rule.window:
        return "it has no windows here"
    if dtype not in ("bfloat16", "float32"):
        return f"it needs bf16 or fp32, this is {dtype}"
    return f"it needs sequences of a multiple of 128 tokens, this is {seq}" if seq % 128 else ""


LOGITS_BYTES = 2**30
"""Float32 logits of a part at the most. Every part reads and writes the weight's gradient once, which costs a GPU about
an eighth of the part's matmuls at this size with a vocabulary of 128,256, and less with a smaller one."""


def loss_chunk(tokens: int, columns: int) -> int:
    """Return the tokens of a part, of `tokens` with `columns` logits each on a device; all if they fit in one part."""
    return ceil(tokens / ceil(4 * tokens * columns / LOGITS_BYTES))
