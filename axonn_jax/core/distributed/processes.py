"""Discovery of a run's processes: from jax.distributed, arguments, jax's variables, MPI or Slurm, or a single one."""

import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace

from axonn_jax.core.errors import UserError, integer
from axonn_jax.core.terminal import counted

SLURM_STEP = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_STEP_NODELIST",
    "SLURM_PROCID",
    "SLURM_LOCALID",
)
"""Variables of an srun task; a batch shell or an ssh session has only some of them."""
_MPI = {"OMPI_COMM_WORLD_SIZE": "OMPI_COMM_WORLD_RANK", "PMI_SIZE": "PMI_RANK"}
"""MPI launchers' variables of a process's rank, by those of the number of processes."""
_JAX = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
"""Variables from which `jax.distributed` itself finds its processes."""
MET = "; grid "
"""Text in rank 0's line once the processes have met; `axonn-jax launch` waits for this text."""
_TORCH = ("RANK", "WORLD_SIZE", "MASTER_ADDR")
"""Variables that torchrun, `accelerate launch` and deepspeed set for each process."""
_LARGEST = 2**31 - 1
_ENOUGH_CORES = 4
"""Number of cores that is enough for a process with accelerators, whose threads wait most of the time."""


@dataclass(frozen=True)
class World:
    """Processes of a run, as seen by one process."""

    rank: int
    """This process's rank, from 0."""
    size: int
    """Number of processes."""
    hosts: int
    """Number of hosts."""
    coordinator: str | None
    """`host:port` of process 0 for `jax.distributed`; None for one process."""
    source: str
    """Source of these facts: jax.distributed, explicit arguments, JAX variables, MPI, Slurm, or one process."""
    why: str
    """Reason for the choice of the source, for people."""
    notice: str = ""
    """Warning about a slow setting of the launcher, for people; empty without one."""

    def __str__(self) -> str:
        processes = counted(self.size, "process") + (f" on {counted(self.hosts, 'host')}" if self.size > 1 else "")
        return f"{processes}, by {self.source}: {self.why}"


def detect(
    environ: Mapping[str, str],
    mpi: Callable[[], World],
    explicit: World | None = None,
    initialized: World | None = None,
) -> World:
    """Determine the processes of the run.

    Args:
        environ: The process's environment.
        mpi: Function that initializes MPI and returns its world, with the library as `why`; called only under an MPI
            launcher.
        explicit: World of explicit arguments, which take precedence over the environment.
        initialized: World of a `jax.distributed` that the script has initialized; it takes precedence over all others.

    Raises:
        UserError: Two sources contradict each other; the error has both values.
    """
    # A launcher counts only with several processes: one process runs without MPI.
    announced = next((name for name in _MPI if (number(environ, name, 1) or 1) > 1), None)
    if initialized is not None:
        if announced is not None and number(environ, announced) != initialized.size:
            accepted = f"the {initialized.size} processes that jax.distributed was initialised with"
            raise UserError(announced, environ[announced], accepted)
        return initialized if explicit is None else replace(explicit, hosts=initialized.hosts)
    if explicit is not None:
        return explicit
    jax_names = [name for name in _JAX if environ.get(name)]
    if len(jax_names) == len(_JAX):
        rank, size = _place(environ, _JAX[2], _JAX[1])
        return replace(explicit_world(environ[_JAX[0]], size, rank), source="JAX variables")
    missing = [name for name in SLURM_STEP if not environ.get(name)]
    world = None
    if announced is not None:
        _place(environ, _MPI[announced], announced)  # reports a bad rank before MPI starts
        world = _from_mpi(environ, announced, mpi(), step=not missing)
    elif not missing and (number(environ, "SLURM_STEP_NUM_TASKS", 1) or 1) > 1:
        world = _from_slurm(environ)
    if world is not None:
        return replace(world, coordinator=environ.get(_JAX[0]) or world.coordinator)
    if jax_names:
        absent = ", ".join(name for name in _JAX if name not in jax_names)
        raise UserError(jax_names[0], environ[jax_names[0]], f"set together with {absent}, or under mpirun or srun")
    if all(environ.get(name) for name in _TORCH) and (number(environ, "WORLD_SIZE") or 1) > 1:
        raise UserError(
            "WORLD_SIZE", environ["WORLD_SIZE"], "no such variable: jax joins no processes of torchrun, accelerate "
            f"or deepspeed, which would train alone; start them with `mpirun -n {environ['WORLD_SIZE']}` or srun",
        )  # fmt: skip
    why = "no MPI launcher, no complete set of Slurm variables"
    if missing and len(missing) < len(SLURM_STEP):
        why = f"Slurm variables are incomplete (no {', '.join(missing)}), so this is not an srun task"
    return World(0, 1, 1, None, "one process", why)


def number(environ: Mapping[str, str], name: str, least: int = 0) -> int | None:
    """Parse a launcher's variable.

    Args:
        environ: The process's environment.
        name: The variable.
        least: Smallest accepted value.

    Returns:
        The number; None if the variable is unset or empty.

    Raises:
        UserError: The variable is not a whole number of at least `least`.
    """
    text = environ.get(name, "")
    if not text:
        return None
    if re.fullmatch(r"[0-9]{1,10}", text) and least <= int(text) <= _LARGEST:
        return int(text)
    shown = text if len(text) <= 40 else f"{text[:40]}..."
    accepted = f"a whole number from {least} to {_LARGEST}, as a launcher sets it, or no such variable"
    raise UserError(name, shown, accepted)


def _place(environ: Mapping[str, str], name: str, of: str) -> tuple[int, int]:
    rank, size = number(environ, name) or 0, number(environ, of, 1) or 1
    if rank >= size:
        raise UserError(name, rank, f"0 to {of} - 1 = {size - 1}")
    return rank, size


def explicit_world(coordinator: str, num_processes: int, process_id: int) -> World:
    """Return the world that the arguments of `init` describe.

    Args:
        coordinator: Address of process 0, host:port.
        num_processes: Number of processes.
        process_id: Rank of this process.

    Raises:
        UserError: A number is out of range, or the address is malformed.
    """
    if integer("process_id", process_id, 0) >= integer("num_processes", num_processes, 1):
        raise UserError("process_id", process_id, f"0 to num_processes - 1 = {num_processes - 1}")
    if not re.fullmatch(r"[^:\s]+:\d+|\[[0-9a-fA-F:]+\]:\d+", coordinator):
        raise UserError("coordinator", coordinator, "host:port of process 0")
    # Only a loopback address proves that all processes are on one host.
    hosts = 1 if coordinator.startswith(("127.", "localhost:", "[::1]")) else num_processes
    return World(process_id, num_processes, hosts, coordinator, "explicit arguments", f"coordinator {coordinator}")


def _from_mpi(environ: Mapping[str, str], announced: str, world: World, *, step: bool) -> World:
    size = number(environ, announced)
    # Under srun with another MPI than mpi4py's, mpi4py sees a single process, but Slurm's variables are complete.
    if world.size == 1 and step and number(environ, "SLURM_STEP_NUM_TASKS", 1) == size:
        return _from_slurm(environ)
    if world.size != size:
        sees = f"the number of processes mpi4py sees, which is {world.size} ({world.why})"
        advice = "mpi4py must use the MPI that mpirun belongs to"
        if "SLURM_JOB_ID" in environ:
            advice += ", or srun does without one, by `srun --mpi=none`"
        raise UserError(announced, size, f"{sees}: {advice}; `axonn-jax doctor` shows both")
    why = f"{announced}={size} and mpi4py ({world.why}) agree"
    if "SLURM_PROCID" in environ and environ.get("SLURM_PROCID") != str(world.rank):
        why += "; Slurm variables describe mpirun's shell and are ignored"
    return replace(world, why=why)


def binding_notice(bound: Sequence[AbstractSet[int]], offered: AbstractSet[int], *, on_cpus: bool) -> str:
    """Return a warning if mpirun leaves cores idle, otherwise an empty text.

    By default Open MPI binds one or two processes to a core each, and more to a socket or memory domain each.

    Args:
        bound: Cores that each process on this host is bound to.
        offered: Cores that the launcher may use on this host.
        on_cpus: True if the run computes on CPUs.
    """
    used: AbstractSet[int] = frozenset[int]().union(*bound)
    if len(used) >= len(offered) or not (on_cpus or min(map(len, bound)) < _ENOUGH_CORES):
        return ""
    return (
        f"warning: mpirun bound the {len(bound)} processes of this host to {len(used)} of its {len(offered)} cores; "
        "`mpirun --bind-to none` lets them use all"
    )


def slurm_notice(environ: Mapping[str, str], cores: int, *, on_cpus: bool) -> str:
    """Return a warning if an srun task has fewer cores than sbatch asked for, otherwise an empty text.

    srun does not inherit -c from sbatch; it needs SRUN_CPUS_PER_TASK or its own -c.

    Args:
        environ: The process's environment.
        cores: Number of cores of this task.
        on_cpus: True if the run computes on CPUs.
    """
    requested = number(environ, "SLURM_CPUS_PER_TASK") or 0
    if requested <= cores or not environ.get("SLURM_STEP_ID") or not (on_cpus or cores < _ENOUGH_CORES):
        return ""
    return (
        f"warning: srun gave this task {cores} of the {requested} cores of SLURM_CPUS_PER_TASK; "
        f"`srun -c {requested}`, or SRUN_CPUS_PER_TASK={requested} in its environment, gives it all"
    )


def _from_slurm(environ: Mapping[str, str]) -> World:
    if components := environ.get("SLURM_HET_SIZE"):
        raise UserError("SLURM_HET_SIZE", components, "no such variable: a job of one component")
    size = number(environ, "SLURM_STEP_NUM_TASKS", 1)
    if number(environ, "SLURM_NTASKS", 1) not in (None, size):
        accepted = f"equal to SLURM_NTASKS = {environ['SLURM_NTASKS']}; start with srun -n"
        raise UserError("SLURM_STEP_NUM_TASKS", size, accepted)
    rank, size = _place(environ, "SLURM_PROCID", "SLURM_STEP_NUM_TASKS")
    step, nodes = f"{environ['SLURM_JOB_ID']}.{environ['SLURM_STEP_ID']}", environ["SLURM_STEP_NODELIST"]
    hosts = number(environ, "SLURM_STEP_NUM_NODES", 1) or number(environ, "SLURM_NNODES", 1) or 1
    host = "127.0.0.1" if hosts == 1 else first_slurm_host(nodes)
    # Every task must come to the same port without communication, so hash job and step into the dynamic range.
    port = 49152 + zlib.crc32(step.encode(errors="replace")) % 16384
    return World(rank, size, hosts, f"{host}:{port}", "Slurm", f"step {step} has {size} tasks on {nodes}")


def first_slurm_host(nodelist: str) -> str:
    """Return the first host of a Slurm node list: ``gpu[007-009,12],x1`` -> ``gpu007``, ``r[0-1]n[0-9]`` -> r0n0."""
    match = re.match(r"(?:[\w.-]+|\[\w[\w,-]*\])+(?=,|$)", nodelist, re.ASCII)
    if match is None:
        raise UserError("SLURM_STEP_NODELIST", nodelist, "a Slurm node list such as gpu[007-009]")
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", match[0])
