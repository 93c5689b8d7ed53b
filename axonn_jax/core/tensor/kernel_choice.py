"""Choice of kernels without importing jax: the attention kernel for a device, and the chunk size of the loss."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.errors import UserError
from axonn_jax.core.hardware import AttentionDevice
from axonn_jax.core.options import AttentionKernel

FIELD = "model.attention"
_NO_CAP = "it has no cap on scores here"
_AMPERE, _HOPPER, _BLACKWELL_ULTRA = (8, 0), (9, 0), (10, 3)


@dataclass(frozen=True)
class Tiles:
    """Tile sizes of blocked attention."""

    queries: int
    """Queries per block."""
    scores: int
    """Maximum number of scores that a chunk of heads computes at a time."""

    def blocks(self, seq: int) -> Iterator[slice]:
        """Return the slice of queries of each block."""
        return (slice(start, min(start + self.queries, seq)) for start in range(0, seq, self.queries))

    def computed(self, seq: int) -> int:
        """Return the number of scores that a head computes: each block against the keys up to the block's end."""
        return sum((block.stop - block.start) * block.stop for block in self.blocks(seq))

    def chunk(self, heads: int, seq: int) -> int:
        """Return the number of heads per chunk: the largest divisor of all heads whose scores fit `scores`."""
        most = max(1, self.scores // (min(seq, self.queries) * seq))
        return next(size for size in range(min(heads, most), 0, -1) if heads % size == 0)


def tiles(platform: str, seq: int) -> Tiles:
    """Return the tile sizes for a platform and a sequence length."""
    # On CPUs half a megabyte of float32 scores, within a core's level-2 cache.
    if computes_on_cores(platform):
        return Tiles(128, 128 * 1024)
    # Elsewhere 256 MB, and at most 16 blocks, since each is compiled separately and should fill the device.
    return Tiles(max(128, ceil(seq / 16)), 2**26)


class AttentionRule(NamedTuple):
    """Attention rule of a layer; not every kernel supports every rule."""

    window: int = 0
    """Number of tokens that a token sees, including itself; 0 for all earlier tokens."""
    cap: float = 0.0
    """Soft cap of scores (`elementwise.capped`); 0 for none."""

    def __str__(self) -> str:
        window = [f"windows of {self.window} tokens"] if self.window else []
        return " and ".join(window + ([f"scores capped at {self.cap:g}"] if self.cap else [])) or "sight of every token"


EVERY_TOKEN = AttentionRule()
"""Attention to all earlier tokens."""


@dataclass(frozen=True)
class AttentionForm:
    """Resolved attention kernel, with the reasons for the choice."""

    kernel: AttentionKernel
    """Kernel in use; never "auto"."""
    why: str = ""
    """Reasons why faster kernels are not used; empty if there are none."""

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
    """Resolve the attention kernel.

    Args:
        requested: The kernel to use; "auto" selects the fastest that the device supports.
        device: Traits of the device.
        dtype: Name of the operands' dtype.
        head_dim: Features per head.
        seq: Sequence length.
        rule: The layer's rule.
        packed: True for packed documents.

    Raises:
        UserError: The requested kernel is not supported.
    """
    against = {"cudnn": against_cudnn(device, dtype, head_dim), "splash": against_splash(device, dtype, seq, rule)}
    accepted = "auto or blocked" if rule.cap else "auto, blocked or xla"
    if rule.cap:
        against = {kernel: fault or _NO_CAP for kernel, fault in (against | {"xla": ""}).items()}
    if packed:  # neither kernel is known to support masks that depend on the batch
        against = {kernel: fault or "it is not used for packed documents" for kernel, fault in against.items()}
    if requested == "auto":
        fast: AttentionKernel = "splash" if device.platform == "tpu" else "cudnn"
        return AttentionForm("blocked", f"not {fast}: {against[fast]}") if against[fast] else AttentionForm(fast)
    if fault := against.get(requested):
        raise UserError(FIELD, requested, f"{accepted}: {fault}")
    return AttentionForm(requested)


def against_cudnn(device: AttentionDevice, dtype: str, head_dim: int) -> str:
    """Return why cuDNN's fused attention is not supported, by the checks of jax 0.10.2; "" if it is."""
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
    """Return why tokamax's splash attention is not supported, by the checks of tokamax 0.0.12; "" if it is."""
    if device.platform != "tpu":
        return "it needs a TPU"
    if not device.tokamax:
        return "it needs tokamax, which is not installed"
    if not device.single_device:
        return "tokamax's kernels run where a stage has one device"
    if rule.window:
        return "it has no windows here"
    if dtype not in ("bfloat16", "float32"):
        return f"it needs bf16 or fp32, this is {dtype}"
    return f"it needs sequences of a multiple of 128 tokens, this is {seq}" if seq % 128 else ""


LOGITS_BYTES = 2**30
"""Maximum bytes of float32 logits in a chunk. Every chunk reads and writes the weight's gradient once, which at this
size costs a GPU about an eighth of the chunk's matmuls with a vocabulary of 128,256, and less with a smaller one."""


def loss_chunk(tokens: int, columns: int) -> int:
    """Return the tokens per chunk of the loss, for `tokens` with `columns` logits each on a device."""
    return ceil(tokens / ceil(4 * tokens * columns / LOGITS_BYTES))
