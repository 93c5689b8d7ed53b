"""Memory limits of GPU runs: jax's share of a GPU's memory, and a process's pinned host memory."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING

from axonn_jax.core.errors import UserError

if TYPE_CHECKING:
    import jax

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's variable for pinned host memory in GiB, read when the backend starts; memory is allocated on demand."""
GIB = 1 << 30
XLA_DEFAULT_GIB = 64
"""XLA's limit in GiB if the variable is not set."""

FRACTION = 0.92
"""Share of a GPU's memory for runs, which `plan` assumes too; CUDA's context and NCCL's buffers need the remainder."""
JAX_DEFAULT_FRACTION = 0.75
"""jax's default share of a GPU's memory."""
FRACTION_VARIABLE = "XLA_CLIENT_MEM_FRACTION"
"""jax's variable for the share, read when the backend starts."""
_OLD_VARIABLE = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_ALLOCATOR = "XLA_PYTHON_CLIENT_ALLOCATOR"
VARIABLES = (FRACTION_VARIABLE, _OLD_VARIABLE, "XLA_PYTHON_CLIENT_PREALLOCATE", _ALLOCATOR)
"""jax's variables for a GPU's memory; jax refuses the first two together."""


def host_memory() -> int:
    """Return the size of this host's memory in bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_pinned_limit(processes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Let this process pin its share of the host's memory; call before jax starts.

    A limit that the user has set, or a larger default of XLA's, is not changed.

    Args:
        processes: Number of processes on this host.
        environ: Environment to change.
    """
    # The need is unknown here, since a script calls `init` before it has a model; a high limit costs nothing.
    share = host_memory() // processes // GIB
    if LIMIT not in environ and share > XLA_DEFAULT_GIB:
        environ[LIMIT] = str(share)


def pinned_limit(environ: Mapping[str, str] = os.environ) -> int:
    """Return how many bytes XLA lets a process pin; raise ``UserError`` if the variable is not a number of GiB."""
    text = environ.get(LIMIT, str(XLA_DEFAULT_GIB))
    if not text.isdecimal() or len(text) > 9:
        raise UserError(LIMIT, text[:40], "a whole number of GiB")
    return int(text) * GIB


def check_pinned(per_device: int, devices: Sequence["jax.Device"], environ: Mapping[str, str] = os.environ) -> None:
    """Check that this process may pin the host memory of its devices' optimizer state.

    Args:
        per_device: Bytes to pin for each device.
        devices: This process's devices; anything but GPUs passes.
        environ: Environment with XLA's limit.

    Raises:
        UserError: The limit is too low.
    """
    needed = per_device * len(devices)
    if devices[0].platform != "gpu" or needed <= pinned_limit(environ):
        return
    raise UserError(
        LIMIT, environ.get(LIMIT, f"not set, which is {XLA_DEFAULT_GIB}"),
        f"at least {-(-needed // GIB)} before jax starts: memory.offload = optimizer keeps {needed / GIB:.1f} GiB of "
        f"this process in pinned host memory; the host has {host_memory() / GIB:.0f} GiB",
    )  # fmt: skip


def raise_fraction(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let jax use `FRACTION` of each of this process's GPUs; call before jax starts.

    Does nothing if the user has set one of jax's variables for device memory.
    """
    if not any(environ.get(name) for name in VARIABLES):
        environ[FRACTION_VARIABLE] = str(FRACTION)


def fraction(environ: Mapping[str, str] = os.environ) -> float:
    """Return jax's largest share of a GPU's memory; raise ``UserError`` if the variable is not a number."""
    if environ.get(_ALLOCATOR, "").lower() == "platform":  # allocates without a pool, so without a limit
        return 1.0
    name = FRACTION_VARIABLE if environ.get(FRACTION_VARIABLE) else _OLD_VARIABLE
    text = environ.get(name) or str(JAX_DEFAULT_FRACTION)
    try:
        return float(text)
    except ValueError:
        raise UserError(name, text[:40], "a share of the memory, such as 0.75") from None
