"""Checks of packages, devices, host and Slurm, none of which import jax or MPI into this process."""

import os
import platform
import shutil
import socket
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

from axonn_jax.cli.doctor.probes import (
    Probe,
    Row,
    checkout,
    installed,
    loopback,
    pip_command,
    probe,
    python,
    ranges,
    release,
    satisfies,
    setup_command,
)
from axonn_jax.core.distributed.gpu_limits import (
    FRACTION,
    FRACTION_VARIABLE,
    GIB,
    LIMIT,
    VARIABLES,
    XLA_DEFAULT_GIB,
    fraction,
    host_memory,
    pinned_limit,
)
from axonn_jax.core.distributed.gpus import idle, shares
from axonn_jax.core.distributed.processes import SLURM_STEP
from axonn_jax.core.errors import UserError

_FAILS = {
    "jax": "everything that computes",
    "jaxlib": "everything that computes",
    "numpy": "everything that computes",
    "flax": "models: train, generate, convert",
    "optax": "training",
    "orbax-checkpoint": "saving and resuming a run",
    "grain": "reading training data",
    "tokenizers": "prepare and generate",
    "safetensors": "convert and pretrained weights",
    "ml_dtypes": "convert and pretrained weights",
    "tensorstore": "convert of a run",
    "rich": "progress of a run on a terminal",
    "matplotlib": "loss.png, timeline.png and plots of the planner",
}
_EXTRAS = {
    "tensorboardX": ("tensorboard", "[log] tensorboard"),
    "wandb": ("wandb", "[log] wandb"),
    "mlflow-skinny": ("mlflow", "[log] mlflow"),  # the full mlflow package depends on it
    "pyarrow": ("data", "prepare of Parquet files"),
    "transformers": ("hf", "convert --check"),
    "huggingface_hub": ("hub", "names on the Hub, such as org/name"),
    "torch": ("", "convert --check, and scripts that make oracle values or compare with PyTorch"),
}
_IMPORTS = """
import importlib
for name in sys.argv[1:]:
    try:
        importlib.import_module(name)
        note = ""
    except BaseException as error:
        note = (type(error).__name__ + ": " + " ".join(str(error).split()))[:300]
    tell(**{name: note})
import jax
tell(devices=[[d.platform, d.device_kind] for d in jax.devices()])
from axonn_jax.core.backend.small_products import sums_are_wrong
tell(sums=sums_are_wrong())
"""
_GPUS = "from axonn_jax.core.distributed.initialize import gpu_views\ntell(gpus=gpu_views())"
_RANKS_SHOWN = 16


def packages(timeout: float) -> Iterator[Row]:
    """Yield findings on the required packages, which are actually imported, and on the devices that jax finds."""
    requirements = {name: range_ for name, (range_, extra) in ranges("axonn_jax").items() if not extra}
    if not requirements:
        fix = setup_command() or pip_command("-e", str(checkout()))
        yield Row("axonn_jax", "missing", "not installed: no metadata", "the axonn-jax command", fix, True)
        requirements = dict.fromkeys(_FAILS, "")
    requirements["jaxlib"] = ranges("jax").get("jaxlib", ("", False))[0]
    order = sorted(requirements, key=lambda name: [*_FAILS, name].index(name))
    modules = {"flax": "flax.nnx", "orbax-checkpoint": "orbax.checkpoint"}
    module_names = {name: modules.get(name, name.replace("-", "_")) for name in order}
    imports = probe(python(_IMPORTS, *module_names.values()), timeout)
    for name in order:
        yield _package(name, requirements[name], imports.answers.get(module_names[name], imports.trouble))
    yield devices(imports)  # listed by the same process, which has started jax already
    if imports.answers.get("sums"):
        wrong = (
            "XLA's sums over products of 3 numbers are wrong on CPUs, from the 32,769th on; runs compile around that"
        )
        fix = "export XLA_FLAGS=--xla_cpu_experimental_ynn_fusion_type=-reduce"
        yield Row("sums", "warning", wrong, "such sums in your own jax.jit programs", fix)
    if any(backend == "gpu" for backend, _ in imports.answers.get("devices", ())):
        yield preallocated(os.environ)
        yield pinned(os.environ)


def _package(name: str, range_: str, trouble: str) -> Row:
    fails = _FAILS.get(name, "whatever imports it")
    version = installed(name)
    fix = setup_command("--again") or pip_command("--upgrade", name + range_)
    supported = f" (supported: {range_})" if range_ else ""
    if version is None:
        finding = f"not installed{supported}"
    elif not satisfies(version, range_):
        finding = f"{version} is outside the supported range {range_}"
    elif trouble:
        finding = f"{version} does not import: {trouble}"
    else:
        return Row(name, "ok", version + supported, fails, "", True)
    return Row(name, "missing", finding, fails, fix, True)


def devices(seen: Probe) -> Row:
    """Return the finding on jax's devices, a warning if there is a GPU that jax does not use."""
    fails = "everything that computes"
    gpus = probe(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], 10)
    names = [line.strip() for line in gpus.output.splitlines() if line.strip()] if gpus.ok else []
    visible = seen.answers.get("devices")
    if visible is None:
        fix = "export JAX_PLATFORMS=cpu" if seen.timed_out or names else setup_command("--again") or pip_command("jax")
        return Row("devices", "missing", f"jax.devices(): {seen.trouble}", fails, fix, True)
    kinds = Counter(f"{kind} ({backend})" if kind != backend else kind for backend, kind in visible)
    summary = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    if names and all(backend == "cpu" for backend, _ in visible):
        cuda = "cuda13" if release(names[0].rpartition(",")[2].strip()) >= (580,) else "cuda12"
        setup = setup_command()
        fix = f"AXONN_EXTRAS={cuda} {setup}" if setup else pip_command(f"axonn_jax[{cuda}]")
        why = f"{summary}, though nvidia-smi shows {len(names)} x {names[0]}"
        return Row("devices", "warning", why, "nothing, but runs use the CPU", fix, True)
    return Row("devices", "ok", summary, fails, "", True)


def gpu_shares(timeout: float) -> Row:
    """Return the finding on the GPUs that each process of this launch takes."""
    fails = "runs of several processes on GPUs"
    fix = "axonn-jax doctor under the same mpirun or srun, with as many processes a host as it has GPUs"
    seen = probe(python(_GPUS), timeout, launched=True)
    views = seen.answers.get("gpus")
    if views is None:
        return Row("gpus", "warning", f"GPUs that a process sees are unknown: {seen.trouble}", fails, fix)
    try:
        assigned = shares(views)
    except UserError as error:
        return Row("gpus", "warning", str(error), fails, fix)
    lines = [
        f"rank {rank} takes {','.join(map(str, gpus))} of {len(view)} ({', '.join(view[index] for index in gpus)})"
        for rank, (view, gpus) in enumerate(zip(views, assigned, strict=True))
        if view
    ]
    taking = "; ".join(filter(None, [*lines[:_RANKS_SHOWN], idle(views, assigned)]))
    return Row("gpus", "ok", taking or "no GPUs that jax would use", fails)


def preallocated(environ: Mapping[str, str]) -> Row:
    """Return the finding on the share of a GPU's memory that runs take."""
    name, fails = "device memory", "configurations that plan says fit"
    by_user = [key for key in VARIABLES if environ.get(key)]
    if not by_user:
        return Row(name, "ok", f"{FRACTION_VARIABLE} is not set: runs take {FRACTION:.0%} of a GPU's", fails)
    share = fraction(environ)
    setting = f"{', '.join(f'{key} = {environ[key]}' for key in by_user)}: runs take at most {share:.0%} of a GPU's"
    less = share < FRACTION
    return Row(name, "warning" if less else "ok", setting, fails, f"unset {' '.join(by_user)}" if less else "")


def pinned(environ: Mapping[str, str]) -> Row:
    """Return the finding on the limit of pinned host memory."""
    fails = "[memory] offload = optimizer, where a process keeps more on the host"
    have = f"the host has {host_memory() / GIB:.0f} GiB"
    if LIMIT not in environ:
        raised = f"{LIMIT} is not set: runs raise it from {XLA_DEFAULT_GIB} to their share of the host's memory; {have}"
        return Row("pinned memory", "ok", raised, fails)
    try:
        allowed = pinned_limit(environ)
    except UserError as error:
        return Row("pinned memory", "warning", str(error), fails, f"unset {LIMIT}")
    setting = f"{LIMIT} = {allowed // GIB}; {have}"
    small = allowed < min(XLA_DEFAULT_GIB * GIB, host_memory())
    return Row("pinned memory", "warning" if small else "ok", setting, fails, f"unset {LIMIT}" if small else "")


def extras() -> Iterator[Row]:
    """Yield findings on optional packages."""
    supported = ranges("axonn_jax")
    for name, (extra, fails) in _EXTRAS.items():
        version, range_ = installed(name), supported.get(name, ("", True))[0]
        # Suggest the extra rather than the package: it pins versions, and scripts/setup installs only some extras.
        fix = pip_command(f"axonn_jax[{extra}]" if extra else name)
        if version is None:
            yield Row(name, "missing", "not installed (optional)", fails, fix)
        elif not satisfies(version, range_):
            yield Row(name, "warning", f"{version} is outside the supported range {range_}", fails, fix)
        else:
            yield Row(name, "ok", version, fails)


def host() -> Iterator[Row]:
    """Yield findings on Python and the machine."""
    needs = metadata.metadata("axonn_jax")["Requires-Python"] if installed("axonn_jax") else ""
    version, good = platform.python_version(), satisfies(platform.python_version(), needs)
    fix = "" if good else f"AXONN_PYTHON=$(command -v python3.11) {setup_command() or 'bash scripts/setup'}"
    shown = f"{version} ({sys.executable}{needs and f'; supported: {needs}'})"
    yield Row("python", "ok" if good else "missing", shown, "everything", fix, True)
    linux = sys.platform == "linux"
    where = "" if linux else "use Linux (on Windows: wsl --install)"
    yield Row("platform", "ok" if linux else "warning", platform.platform(), "tested on Linux only", where)
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield Row("cores", "ok", f"{usable} usable of {os.cpu_count()}", "speed on the CPU")
    yield _amount("memory", host_memory() / GIB, 4, "GiB", "training on the CPU, building mpi4jax", "free -h")


def _amount(check: str, have: float, least: float, unit: str, fails: str, look: str) -> Row:
    low = have < least
    shown = f"{have:.1f} {unit}" + (f", less than {least:g}" if low else "")
    return Row(check, "warning" if low else "ok", shown, fails, look if low else "")


def places() -> Iterator[Row]:
    """Return findings on network names and disk space."""
    name = socket.gethostname()
    code = f"import socket; print(socket.gethostbyname({name!r}))"
    seen = probe(python(code), 10)  # in another process: an unresponsive name server would block this one
    joins = "processes finding each other: jax.distributed and mpirun"
    if seen.ok:
        yield Row("hostname", "ok", f"{name} is {seen.output.strip()}", joins)
    else:
        fix = f"echo '127.0.1.1 {name}' | sudo tee -a /etc/hosts"
        yield Row("hostname", "warning", f"{name} does not resolve: {seen.trouble}", joins, fix)
    trouble = loopback()
    fix = "sudo ip link set lo up" if trouble else ""
    yield Row("loopback", "warning" if trouble else "ok", trouble or "127.0.0.1 works", joins, fix)
    try:
        folder = Path.cwd()
        free = shutil.disk_usage(folder).free / GIB
        yield _amount("disk", free, 2, "GiB free here", "checkpoints, prepared data", f"df -h {folder}")
    except OSError as error:
        yield Row("disk", "warning", f"the working directory: {error}", "paths that begin here", "cd")
    if Path("/dev/shm").is_dir():
        shared = shutil.disk_usage("/dev/shm").free / GIB
        grow = "sudo mount -o remount,size=1G /dev/shm"
        yield _amount("/dev/shm", shared, 0.25, "GiB free", "MPI between ranks of one machine, data workers", grow)


def slurm(environ: Mapping[str, str]) -> Row:
    """Return the finding on the Slurm variables, a warning if they contradict each other or those of MPI."""
    fails = "a process started without srun or mpirun would take a wrong rank or number of processes"
    seen = {name: environ[name] for name in (*SLURM_STEP, "SLURM_NTASKS") if name in environ}
    if not seen:
        return Row("slurm", "ok", "no Slurm variables", "nothing: processes are found without Slurm")
    shown = " ".join(f"{name.removeprefix('SLURM_')}={value}" for name, value in seen.items())
    if missing := [name.removeprefix("SLURM_") for name in SLURM_STEP if name not in seen]:
        batch = f"{shown}; no {', '.join(missing)}: a batch shell, no srun task, so a command typed here is one process"
        return Row("slurm", "ok", batch, fails)
    pairs = [
        ("SLURM_PROCID", "OMPI_COMM_WORLD_RANK"),
        ("SLURM_PROCID", "PMI_RANK"),
        ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"),
        ("SLURM_STEP_NUM_TASKS", "PMI_SIZE"),
        ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
    ]
    wrong = [
        f"{slurm_name}={environ[slurm_name]} but {mpi_name}={environ[mpi_name]}"
        for slurm_name, mpi_name in pairs
        if environ.get(mpi_name, environ[slurm_name]) != environ[slurm_name]
    ]
    numbers = [seen[name] for name in ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")]
    if not all(number.isdecimal() and len(number) < 20 for number in numbers):
        wrong.append("a rank or size that is no number")
    elif not int(numbers[0]) <= int(numbers[1]) < int(numbers[2]):
        wrong.append("they break LOCALID <= PROCID < STEP_NUM_TASKS")
    if wrong:
        return Row("slurm", "warning", f"{shown}: {'; '.join(wrong)}", fails, f"unset {' '.join(seen)}")
    return Row("slurm", "ok", f"{shown}: they agree", fails)
