"""GPUs of a host, shared out among its processes before jax starts."""

import contextlib
import os
import re
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from axonn_jax.errors import UserError
from axonn_jax.terminal import counted

View = tuple[str, ...] | None
"""Identifiers of a process's visible GPUs, by index; None where jax chooses."""

_KFD = Path("/sys/class/kfd/kfd/topology/nodes")
_DEV = Path("/dev")


class Gpu(NamedTuple):
    """A GPU allowed to a process."""

    name: str
    """UUID of the GPU, or another unique name."""
    parts: tuple[str, ...] = ()
    """UUIDs of the GPU's MIG devices; with any, a process can use only one."""


def shares(views: Sequence[View], per_process: int | None = None) -> list[tuple[int, ...]]:
    """Return the indexes of each rank's GPUs among the visible ones: `wanted` GPUs, or an equal share.

    Ranks with the same visible GPUs share by rank; a rank with its own GPUs (bound by the launcher) takes all. Empty
    where jax uses no GPUs. Raises ``UserError`` for too few or contradictory GPUs.
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
        order = views[ranks[0]] or ()
        for index, rank in enumerate(ranks):
            rank_gpus = views[rank] or ()
            assigned[rank] = tuple(rank_gpus.index(gpu) for gpu in order[index * count : (index + 1) * count])
    return assigned


def idle(views: Sequence[View], assigned: Sequence[Sequence[int]]) -> str:
    """Return one line if visible GPUs stay unused, else empty."""
    seen = {gpu for view in views for gpu in view or ()}
    used = sum(map(len, assigned))
    if not 0 < used < len(seen):
        return ""
    return f"warning: {len(seen) - used} of the {len(seen)} GPUs that the processes see stay idle"


def visible(environ: Mapping[str, str], present: Sequence[Gpu], *, rocm: bool = False) -> tuple[str, ...]:
    """Return the identifiers of a process's GPUs in the order of CUDA or ROCm.

    A list ends before the first entry without a GPU; with MIG devices CUDA sees only the first.
    """
    if rocm:
        allowed = _listed(environ.get("ROCR_VISIBLE_DEVICES"), present)
        # HIP takes an empty variable for one that is not set.
        hip = environ.get("HIP_VISIBLE_DEVICES") or environ.get("CUDA_VISIBLE_DEVICES") or None
        return tuple(gpu.name for gpu in _listed(hip, allowed))
    allowed_gpus = _listed(environ.get("CUDA_VISIBLE_DEVICES"), present)
    parts = [gpu.parts[0] for gpu in allowed_gpus if gpu.parts]
    return tuple(parts[:1] or [gpu.name for gpu in allowed_gpus])


def _listed(value: str | None, present: Sequence[Gpu]) -> list[Gpu]:
    if value is None:
        return list(present)
    gpus = []
    for token in (text.strip() for text in value.split(",")):
        gpu = _meant(token, present)
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
    has_uuids = any(gpu.name.startswith("GPU-") for gpu in present)
    return Gpu(token) if present and not has_uuids else None


def look(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Return the identifiers of jax's GPUs in this process, without starting jax or CUDA."""
    nvidia = [] if "rocm" in environ.get("JAX_PLATFORMS", "") else nvidia_gpus()
    return visible(environ, nvidia) if nvidia else visible(environ, amd_gpus(), rocm=True)


def nvidia_gpus() -> list[Gpu]:
    """Return this process's NVIDIA GPUs, by the driver's list or by opening the devices."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=60, check=True).stdout
        return parse(listing)
    gpus = []
    for device in sorted(_DEV.glob("nvidia[0-9]*"), key=lambda path: int(path.name.removeprefix("nvidia"))):
        with contextlib.suppress(OSError):  # devices that a control group forbids exist, but do not open
            os.close(os.open(device, os.O_RDWR))
            gpus.append(Gpu(f"{_host()}:{device.name}"))
    return gpus


def parse(listing: str) -> list[Gpu]:
    """Return the GPUs of `nvidia-smi -L`, with their MIG devices."""
    gpus: list[Gpu] = []
    for line in listing.splitlines():
        uuid = re.search(r"\(UUID: ([^)]+)\)", line)
        if uuid and line.startswith("GPU "):
            gpus.append(Gpu(uuid[1]))
        elif uuid and gpus:
            gpus[-1] = Gpu(gpus[-1].name, (*gpus[-1].parts, uuid[1]))
    return gpus


def amd_gpus() -> list[Gpu]:
    """Return this process's AMD GPUs in the order of ROCm's topology."""
    gpus = []
    for node in sorted(_KFD.glob("[0-9]*"), key=lambda path: int(path.name)):
        with contextlib.suppress(OSError, ValueError):  # the kernel refuses to describe forbidden GPUs
            if int((node / "gpu_id").read_text()) == 0:  # a processor
                continue
            unique = re.search(r"^unique_id (\d+)", (node / "properties").read_text(), re.MULTILINE)
            number = int(unique[1]) if unique else 0
            gpus.append(Gpu(f"GPU-{number:016x}" if number else f"{_host()}:kfd{node.name}"))
    return gpus


def _host() -> str:
    """Return an identifier of this machine, the same in all of its containers."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return os.uname().nodename


def take(rank: int, per_process: int | None, gather: Callable[[View], Sequence[View]]) -> str:
    """Give jax this process's GPUs; return a warning if some stay idle. Collective over all ranks.

    `gather` gives every rank's view in order. Raises ``UserError``, the same on all ranks, for unusable GPUs.
    """
    import jax

    views = gather(own_view())
    assigned = shares(views, per_process)
    if assigned[rank]:
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, assigned[rank])))
    return idle(views, assigned)


def own_view() -> View:
    """Return this process's GPUs; None where jax would not look for GPUs, or the user has chosen them."""
    from axonn_jax import compat

    return look(os.environ) if compat.accelerator_expected() and not selected_by_user() else None


def selected_by_user() -> bool:
    """Return True if jax's own variables or settings say which GPUs this process takes."""
    import jax

    names = ("jax_cuda_visible_devices", "jax_rocm_visible_devices")
    return "JAX_LOCAL_DEVICE_IDS" in os.environ or any(jax.config.read(name) != "all" for name in names)


def _ranks_text(ranks: Sequence[int]) -> str:
    first = ", ".join(map(str, ranks[:8]))
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {first}{', ...' if len(ranks) > 8 else ''}"
