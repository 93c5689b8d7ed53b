"""GPUs of a host, divided among its processes before jax starts."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import counted

View = tuple[str, ...] | None
"""Identifiers of a process's visible GPUs, by index; None if the choice is left to jax."""

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_DEV = Path("/dev")


class Gpu(NamedTuple):
    """A GPU that a process may use."""

    name: str
    """UUID of the GPU, or another unique name."""
    parts: tuple[str, ...] = ()
    """UUIDs of the GPU's MIG devices; if there are any, a process can use only one of them."""


def shares(views: Sequence[View], per_process: int | None = None) -> list[tuple[int, ...]]:
    """Assign GPUs to ranks.

    Ranks that see the same GPUs divide them by rank; a rank that alone sees its GPUs (bound by the launcher) gets them.

    Args:
        views: Visible GPUs of every rank.
        per_process: GPUs for each process; None: an equal share.

    Returns:
        Indices into each rank's visible GPUs; empty for ranks where jax uses no GPUs.

    Raises:
        UserError: There are too few GPUs, or ranks see sets of GPUs that overlap without being equal.
    """
    groups: dict[frozenset[str], list[int]] = {}
    for rank, view in enumerate(views):
        if view is not None:
            groups.setdefault(frozenset(view), []).append(rank)
    without = groups.pop(frozenset(), [])
    owner: dict[str, list[int]] = {}
    assigned: list[tuple[int, ...]] = [()] * len(views)
    for gpus, ranks in groups.items():
        if without:
            raise UserError(
                f"GPUs seen by {_ranks_text(without)}", 0, f"GPUs for all or none; {_ranks_text(ranks)} has some"
            )
        for gpu in gpus:
            if gpu in owner:
                raise UserError(
                    f"GPUs seen by {_ranks_text(ranks)}", ",".join(sorted(gpus)),
                    f"the same GPUs as {_ranks_text(owner[gpu])}, or none in common; {gpu} is in both",
                )  # fmt: skip
            owner[gpu] = ranks
        count = len(gpus) // len(ranks) if per_process is None else per_process
        if count * len(ranks) > len(gpus) or count == 0:
            raise UserError(
                f"GPUs seen by {_ranks_text(ranks)}", len(gpus),
                f"at least {max(count, 1) * len(ranks)}, {max(count, 1)} for each of {counted(len(ranks), 'process')}; "
                "start fewer processes on a host, or give the grid fewer devices for each",
            )  # fmt: skip
        # Ranks may list the same GPUs in different orders: divide them in the first rank's order, by identifier.
        order = views[ranks[0]] or ()
        for index, rank in enumerate(ranks):
            rank_gpus = views[rank] or ()
            assigned[rank] = tuple(rank_gpus.index(gpu) for gpu in order[index * count : (index + 1) * count])
    return assigned


def idle(views: Sequence[View], assigned: Sequence[Sequence[int]]) -> str:
    """Return a warning if some visible GPUs stay unused, otherwise an empty text.

    Args:
        views: Visible GPUs of every rank.
        assigned: GPUs of every rank, as `shares` returns them.
    """
    seen = {gpu for view in views for gpu in view or ()}
    used = sum(map(len, assigned))
    if not 0 < used < len(seen):
        return ""
    return f"warning: {len(seen) - used} of the {len(seen)} GPUs that the processes see stay idle"


def visible(environ: Mapping[str, str], present: Sequence[Gpu], *, rocm: bool = False) -> tuple[str, ...]:
    """Return the identifiers of a process's GPUs in the order of CUDA or ROCm.

    Args:
        environ: Environment with the runtime's variables of visible devices.
        present: GPUs that the process may use.
        rocm: True for AMD's variables, False for NVIDIA's.
    """
    if rocm:
        allowed = _listed(environ.get("ROCR_VISIBLE_DEVICES"), present)
        # HIP treats an empty variable as unset.
        hip = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or None
        return tuple(gpu.name for gpu in _listed(hip, allowed))
    allowed_gpus = _listed(environ.get("CUDA_VISIBLE_DEVICES"), present)
    # With MIG devices CUDA sees the first one only.
    parts = [gpu.parts[0] for gpu in allowed_gpus if gpu.parts]
    return tuple(parts[:1] or [gpu.name for gpu in allowed_gpus])


def _listed(value: str | None, present: Sequence[Gpu]) -> list[Gpu]:
    if value is None:
        return list(present)
    gpus = []
    for token in (text.strip() for text in value.split(",")):
        gpu = _meant(token, present)
        # Like the runtimes, ignore everything from the first entry that is not a GPU.
        if gpu is None:
            break
        gpus.append(gpu)
    return gpus


def _meant(token: str, present: Sequence[Gpu]) -> Gpu | None:
    """Return the GPU of a list's entry: an index, or the beginning of a UUID."""
    if token.isdecimal() and len(token) < 20:
        return present[int(token)] if int(token) < len(present) else None
    if not token.startswith(("GPU-", "MIG-")):
        return None
    for gpu in present:
        if gpu.name.startswith(token):
            return gpu
        for part in gpu.parts:
            if part.startswith(token):
                return Gpu(gpu.name, (part,))
    # Without UUIDs (no nvidia-smi), the entry cannot be compared and is taken at its word.
    has_uuids = any(gpu.name.startswith("GPU-") for gpu in present)
    return Gpu(token) if present and not has_uuids else None


def look(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the identifiers of the GPUs that jax would see in this process, without starting jax or CUDA.

    Args:
        environ: The process's environment.
    """
    nvidia = [] if "rocm" in environ.get("JAX_PLATFORMS", "") else nvidia_gpus()
    return visible(environ, nvidia) if nvidia else visible(environ, amd_gpus(), rocm=True)


def nvidia_gpus() -> list[Gpu]:
    """Return the NVIDIA GPUs that this process may use, from nvidia-smi, or else by opening the device files."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
        return parse(listing)
    gpus = []
    for device in sorted(_DEV.glob("nvidia[0-9]*"), key=lambda path: int(path.name.removeprefix("nvidia"))):
        # Devices that a control group forbids exist, but cannot be opened.
        with contextlib.suppress(OSError):
            os.close(os.open(device, os.O_RDWR))
            gpus.append(Gpu(f"{_host()}:{device.name}"))
    return gpus


def parse(listing: str) -> list[Gpu]:
    """Parse the output of `nvidia-smi -L` into GPUs with their MIG devices."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        uuid = re.search(r"\(UUID: ([^)]+)\)", line)
        if uuid and line.startswith("GPU "):
            gpus.append(Gpu(uuid[1]))
        elif uuid and gpus:
            gpus[-1] = Gpu(gpus[-1].name, (*gpus[-1].parts, uuid[1]))
    return gpus


def amd_gpus() -> list[Gpu]:
    """Return the AMD GPUs that this process may use, in the order of ROCm's topology."""
    gpus = []
    for node in sorted(_KFD.glob("[0-9]*"), key=lambda path: int(path.name)):
        # The kernel refuses to describe GPUs that are forbidden to this process.
        with contextlib.suppress(OSError, ValueError):
            if int((node / "gpu_id").read_text()) == 0:  # a CPU
                continue
            unique = re.search(r"^unique_id (\d+)", (node / "properties").read_text(), re.MULTILINE)
            number = int(unique[1]) if unique else 0
            gpus.append(Gpu(f"GPU-{number:016x}" if number else f"{_host()}:kfd{node.name}"))
    return gpus


def _host() -> str:
    # The boot id is the same in all containers of a machine, while their host names differ.
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


def take(rank: int, per_process: int | None, gather: Callable[[View], Sequence[View]]) -> str:
    """Restrict jax to this process's GPUs, and return a warning if some stay idle. Collective over all ranks.

    Args:
        rank: This process's rank.
        per_process: GPUs for each process; None: an equal share.
        gather: Exchange that returns every rank's visible GPUs by rank.

    Raises:
        UserError: The GPUs cannot be divided (`shares`); the same error on all ranks.
    """
    import jax

    views = gather(visible_gpus())
    assigned = shares(views, per_process)
    if assigned[rank]:
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, assigned[rank])))
    return idle(views, assigned)


def visible_gpus() -> View:
    """Return this process's visible GPUs; None if jax would not look for GPUs, or the user has selected them."""
    from axonn_jax.core import compat

    return look(os.environ) if compat.accelerator_expected() and not selected_by_user() else None


def selected_by_user() -> bool:
    """Return True if jax's variables or settings select this process's GPUs."""
    import jax

    names = ("jax_cuda_visible_devices", "jax_rocm_visible_devices")
    return "JAX_LOCAL_DEVICE_IDS" in os.environ or any(jax.config.read(name) != "all" for name in names)


def _ranks_text(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first}{', ...' if len(ranks) > 8 else ''}"
