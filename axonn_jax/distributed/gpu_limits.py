"""Memory limits on GPUs: jax's share of a GPU's memory, and a process's pinned host memory."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from axonn_jax.errors import UserError

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's variable, in GiB, read when the backend starts; memory is taken on demand."""
GIB = 1 << 30
XLAS_OWN = 64
"""GiB without the variable."""

FRACTION = 0.92
"""Share of a GPU's memory for runs, as `plan` assumes; CUDA's context and NCCL's buffers have the rest."""
JAX_DEFAULT_FRACTION = 0.75
"""Default share of a GPU's memory for jax."""
FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
"""jax's variable for the share, read when the backend starts."""
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
VARIABLES = (FRACTION_VARIABLE, _OLD_VARIABLE, "XLA_PYTHON_CLIENT_PREALLOCATE", _ALLOCATOR)
"""Variables of jax for a GPU's memory; jax refuses the first two together."""


def host_memory() -> int:
    """Return the bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_pinned_limit(processes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let this process, one of so many of its host, pin its share of the host's memory; call before jax starts.

    The model is not known yet where a script calls `init`; a high limit costs nothing. A limit set by the user, or a
    larger one of XLA's, stays.
    """
    share = host_memory() // processes // GIB
    if LIMIT not in environ and share > XLAS_OWN:
        environ[LIMIT] = str(share)


def pinned_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many bytes XLA lets a process pin; ``UserError`` where the variable is no number of GiB."""
    text = environ.get(LIMIT, str(XLAS_OWN))
    if not text.isdecimal() or len(text) > 9:
        raise UserError(LIMIT, text[:40], "a whole number of GiB")
    return int(text) * GIB


def check_pinned(per_device: int, devices: Sequence[Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raise ``UserError`` where this process may not pin `each` bytes for each GPU."""
    needed = per_device * len(devices)
    if devices[0].platform != "gpu" or needed <= pinned_limit(environ):
        return
    raise UserError(
        LIMIT, environ.get(LIMIT, f"not set, which is {XLAS_OWN}"),
        f"at least {-(-needed // GIB)} before jax starts: memory.offload = optimizer keeps {needed / GIB:.1f} GiB of "
        f"this process in pinned host memory; the host has {host_memory() / GIB:.0f} GiB",
    )  # fmt: skip


def raise_fraction(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let jax take `FRACTION` of each of this process's GPUs; call before jax starts.

    A variable for device memory set by the user stays.
    """
    if not any(environ.get(name) for name in VARIABLES):
        environ[FRACTION_VARIABLE] = str(FRACTION)


def fraction(environ: Mapping[str, str] = os.environ) -> float:
    """Return jax's greatest share of a GPU's memory; ``UserError`` for a value other than a number."""
    if environ.get(_ALLOCATOR, "").lower() == "platform":  # which has no pool
        return 1.0
    name = FRACTION_VARIABLE if environ.get(FRACTION_VARIABLE) else _OLD_VARIABLE
    text = environ.get(name) or str(JAX_DEFAULT_FRACTION)
    try:
        return float(text)
    except ValueError:
        raise UserError(name, text[:40], "a share of the memory, such as 0.75") from None
