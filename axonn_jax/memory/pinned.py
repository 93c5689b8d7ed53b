"""Pinned host memory on GPUs: XLA's limit on it, which is a process's share of the host's here."""

import os
from collections.abc import Mapping, MutableMapping, Sequence
from typing import Any

from axonn_jax.errors import UserError

LIMIT = "XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"
"""XLA's variable, in GiB, read when the backend starts; the memory is taken as it is needed."""
GIB = 1 << 30
XLAS_OWN = 64
"""GiB without the variable."""


def host_memory() -> int:
    """Returns the bytes of this host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def raise_limit(processes: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Lets this process, one of so many of its host, pin its share of the host's memory; call before jax starts.

    Which model will train is not known yet where a script calls `init`; a limit that is not reached costs nothing. It
    is left alone where the user has set it, and where XLA's own is larger.
    """
    share = host_memory() // processes // GIB
    if LIMIT not in environ and share > XLAS_OWN:
        environ[LIMIT] = str(share)


def limit(environ: Mapping[str, str] = os.environ) -> int:
    """Returns how many bytes XLA lets a process pin; ``UserError`` where the variable is no number of GiB."""
    said = environ.get(LIMIT, str(XLAS_OWN))
    if not said.isdecimal() or len(said) > 9:
        raise UserError(LIMIT, said[:40], "a whole number of GiB")
    return int(said) * GIB


def check_room(each: int, devices: Sequence[Any], environ: Mapping[str, str] = os.environ) -> None:
    """Raises ``UserError`` where this process may not pin `each` bytes for each of its devices, if they are GPUs."""
    needed = each * len(devices)
    if devices[0].platform != "gpu" or needed <= limit(environ):
        return
    raise UserError(
        LIMIT, environ.get(LIMIT, f"not set, which is {XLAS_OWN}"),
        f"at least {-(-needed // GIB)} before jax starts: memory.offload = optimizer keeps {needed / GIB:.1f} GiB of "
        f"this process in pinned host memory; the host has {host_memory() / GIB:.0f} GiB",
    )  # fmt: skip
