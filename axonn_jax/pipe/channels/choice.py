"""Choice of the channel between pipeline stages, and its opening."""

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, get_args

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.options import ChannelName
from axonn_jax.pipe.channels.base import Channel, Ports

if TYPE_CHECKING:
    from mpi4py import MPI

_GET_IT = "install the extra `mpi` (scripts/setup does; `axonn-jax doctor` shows what is missing)"
_FIELD = "pipeline.channel"


def choose(name: str, processes: int) -> str:
    """Return the channel to use: `local`, `mpi4py` or `mpi4jax`.

    Args:
        name: Value of `pipeline.channel`; `auto` is `local` in one process and `mpi4py` in several.
        processes: Number of processes of the run.

    Raises:
        UserError: The name is unknown or the channel cannot be used.
    """
    # `auto` prefers mpi4py: for host memory it takes 0.7 to 1.0 of mpi4jax's time for messages of up to 1 MB, which
    # travel alike, and 0.5 to 0.8 for larger ones (scripts/bench/channels), and it needs one thread and no free core.
    # On GPUs each larger mpi4jax message waits for the tasks in the compute stream (by its sources, not measured).
    if name not in (names := get_args(ChannelName)):
        raise UserError(_FIELD, name, f"one of {', '.join(names)}{nearest(name, names)}")
    if processes == 1 and name in ("auto", "local"):
        return "local"
    if processes == 1:
        raise UserError(_FIELD, name, "local or auto in a run of one process; mpirun or srun starts several")
    if name == "local":
        raise UserError(_FIELD, name, f"mpi4py, mpi4jax or auto in a run of {processes} processes")
    if name == "mpi4jax":
        from axonn_jax.pipe.channels.mpi4jax import check_pool

        _need("mpi4jax", name)
        check_pool()
    mpi = _need("mpi4py.MPI", name)
    level = mpi.Query_thread()
    if level != mpi.THREAD_MULTIPLE:  # a channel's threads call MPI concurrently with the caller's
        levels = {getattr(mpi, f"THREAD_{word}"): word for word in ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")}
        raise UserError(
            _FIELD, name,
            f"an MPI of thread level MPI_THREAD_MULTIPLE; this one gave MPI_THREAD_{levels.get(level, level)} "
            f"({mpi.Get_library_version().split(',')[0].strip()}); `axonn-jax doctor` shows it",
        )  # fmt: skip
    return "mpi4py" if name == "auto" else name


def open_channel(name: str, ports: Ports, comm: "MPI.Comm | None" = None) -> Channel:
    """Construct a channel without starting it; collective over `comm`.

    Args:
        name: Result of `choose`.
        ports: Arrays that arrive at this process.
        comm: Communicator over the pipe; virtual stage `s` lives on its rank `s % comm.Get_size()`.
    """
    if name == "local":
        from axonn_jax.pipe.channels.local import LocalChannel

        return LocalChannel(ports)
    if comm is None:
        raise UserError(_FIELD, name, "local without an MPI communicator")
    if name == "mpi4jax":
        from axonn_jax.pipe.channels.mpi4jax import Mpi4jaxChannel

        return Mpi4jaxChannel(comm, ports)
    from axonn_jax.pipe.channels.mpi4py import Mpi4pyChannel

    return Mpi4pyChannel(comm, ports)


def _need(module: str, name: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        alternative = " or channel mpi4py" if package == "mpi4jax" else ""
        accepted = f"a channel with a package that imports; {package} does not ({error}): {_GET_IT}{alternative}"
        raise UserError(_FIELD, name, accepted) from None
