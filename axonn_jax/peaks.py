"""Published dense peaks of accelerators, for percent-of-peak figures; no jax."""

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
    # TPUs as jax names them, a chip, which from v4 on is a device (docs.cloud.google.com/tpu/docs/v4, v5e, v5p, v6e)
    "TPU v4": 275e12,
    "TPU v4 lite": 138e12,  # v4i (Jouppi et al., ISCA 2021)
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,  # v5p
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
}
"""FLOP/s by a part of the device's name, from the vendors' data sheets (without sparsity); the longest name counts."""


def peak_flops(device_kind: str) -> float | None:
    """Half-precision matmul peak in FLOP/s of the device jax names so; None where it is not known."""
    matches = [name for name in _BF16_FLOPS if name.lower() in device_kind.lower()]
    return _BF16_FLOPS[max(matches, key=len)] if matches else None
