"""Accelerator rates without importing jax: published peaks by name, and a model of an H100 for time estimates."""

from dataclasses import dataclass
from typing import Literal

_BF16_FLOPS = {
    "V100": 125e12,  # fp16: it has no bf16
    "A100": 312e12,
    "H100 PCIe": 756e12,
    "H100": 989e12,
    "H200": 989e12,
    "GH200": 989e12,
    "B200": 2250e12,
    "MI250X": 191.5e12,  # one GCD
    "MI300X": 1307e12,
    # TPUs by jax's names, per chip, which from v4 on is a device (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e)
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,  # v4i (Jouppi et al., ISCA 2021)
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""FLOP/s by substring of the device's name, from vendors' data sheets (without sparsity); the longest match counts."""


def peak_flops(device_kind: str) -> float | None:
    """Return the half-precision matmul peak in FLOP/s of a device, by jax's name for it; None if unknown."""
    matches = [name for name in _BF16_FLOPS if name.lower() in device_kind.lower()]
    return _BF16_FLOPS[max(matches, key=len)] if matches else None


Link = Literal["node", "network"]
"""Kind of links that determines a collective's time."""


@dataclass(frozen=True)
class Accelerator:
    """Rates of an accelerator, for estimates of programs' times."""

    name: str
    flops_per_s: float
    """Measured, not advertised, FLOP/s of large matmuls in half precision."""
    bytes_per_s: float
    """Memory bandwidth of a device in bytes per second."""
    node_devices: int
    """Number of devices connected by a node's fast links; consecutive devices of the mesh form a node."""
    node_bytes_per_s: float
    """Bytes per second from a device to other devices of the node."""
    network_bytes_per_s: float
    """Bytes per second from a node to other nodes."""
    latency_s: float
    """Latency of a collective in seconds."""


# 813 TFLOP/s is the matmul rate that SC 24 measured on an H100 (0.82 of its peak); memory as in XLA's description.
# NVLink 4 has 450 GB/s per direction, 8 ports of 400 Gb/s make 400 GB/s per node; rings reach about 0.8 of either.
H100 = Accelerator("H100 SXM, 8 a node", 813e12, 3.35e12, 8, 0.8 * 450e9, 0.8 * 400e9, 1e-5)


@dataclass(frozen=True)
class AttentionDevice:
    """Traits of a device and its libraries that determine the attention kernel."""

    platform: Literal["cpu", "cuda", "rocm", "tpu"] | str
    capability: tuple[int, int] = (0, 0)
    """Compute capability of an NVIDIA GPU."""
    cudnn: int = 0
    """Version of cuDNN, such as 91100; 0 without cuDNN."""
    tokamax: bool = False
    """True if tokamax can be imported."""
    single_device: bool = True
    """True if the program runs on one device: jax rejects tokamax's kernels in manual regions that check axes."""
