"""Small exchanges between processes through host memory: texts, flags, sums of numbers, and arrays of two stages."""

import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_jax.documents import Held, held, in_sight, made
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid

if TYPE_CHECKING:
    import jax
    from mpi4py import MPI

_TEXT_BYTES = 1024
LOCK = "run.lock"
"""Lock file in a run's directory, held by the run that trains there."""
_REFUSAL = partial(UserError, "log.dir")


class HostSync(ABC):
    """Exchanges between processes; every process makes the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        """Return every process's array of one shape and dtype, stacked by rank."""

    @abstractmethod
    def any_before(self, flag: bool) -> bool:
        """Return True if any process had its flag set at the call before this one; waits for nobody's present."""

    def gather(self, text: str) -> list[str]:
        """Return every process's whole text, by rank; waits for all.

        Bytes: 8 a process, and the longest text's where any process has one.
        """
        # Lengths come first, so that no text is cut, however long: most calls carry "no fault" and end here.
        raw = text.encode(errors="surrogateescape")
        sizes = [int(size) for size in self.gather_number(len(raw))]
        if not any(sizes):
            return ["" for _ in sizes]
        # A power of two, as jax compiles a gather for each new length.
        room = max(_TEXT_BYTES, 1 << (max(sizes) - 1).bit_length())
        rows = self._all_gather(np.frombuffer(raw.ljust(room, b"\0"), np.uint8))
        return [row[:size].tobytes().decode(errors="surrogateescape") for row, size in zip(rows, sizes, strict=True)]

    def gather_number(self, number: float) -> list[float]:
        """Return every process's number, by rank; waits for all. Bytes: 8 a process."""
        return self._all_gather(np.array([number], np.float64))[:, 0].tolist()  # type: ignore[no-any-return]

    def gathered(self, numbers: Mapping[int, tuple[float, ...]]) -> list[list[float]]:
        """Return the numbers of all pipe ranks in one order, so that sums are the same everywhere.

        `numbers` has an entry for each pipe rank of this process, as many on every process. Bytes: 8 a number.
        """
        local = np.array([numbers[pp_rank] for pp_rank in sorted(numbers)], np.float64)
        return self._all_gather(local).reshape(-1, local.shape[-1]).tolist()  # type: ignore[no-any-return]


class LocalSync(HostSync):
    """The one process of a run: nothing is sent."""

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        return local[None]

    def any_before(self, flag: bool) -> bool:
        """Return the flag: there is nobody to wait for."""
        return flag

    def swap(self, values: Mapping[int, "jax.Array"], first: int, last: int) -> dict[int, "jax.Array"]:
        """Swap arrays between the meshes of ranks `first` and `last`."""
        import jax

        return {
            first: jax.device_put(values[last], values[first].sharding),
            last: jax.device_put(values[first], values[last].sharding),
        }


class MpiSync(HostSync):
    """Over a duplicate of an MPI communicator; waiting does not spin, which would take a core from the peer."""

    def __init__(self, comm: "MPI.Comm"):
        self._comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._pending: tuple[Any, np.ndarray, np.ndarray] | None = None

    def another(self) -> "MPI.Comm | None":
        """Return another communicator of these ranks, for a thread; None where MPI allows none. Collective."""
        from mpi4py import MPI

        return self._comm.Dup() if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        everyone = np.empty((self.size, *local.shape), local.dtype)
        self._wait(self._comm.Iallgather(local, everyone))
        return everyone

    def any_before(self, flag: bool) -> bool:  # noqa: D102
        from mpi4py import MPI

        previous = False
        if self._pending is not None:
            request, total, _ = self._pending
            self._wait(request)
            previous = bool(total[0])
        local, total = np.array([flag], np.uint8), np.zeros(1, np.uint8)
        self._pending = (self._comm.Iallreduce(local, total, MPI.MAX), total, local)  # buffers live until it is done
        return previous

    def swap(self, values: Mapping[int, "jax.Array"], first: int, last: int) -> dict[int, "jax.Array"]:
        """Give the pipe ranks `first` and `last` each other's array of one shape and layout, on their own meshes.

        `values` has an entry for each of the two pipe ranks in this process; of the communicator's ranks only these two
        call MPI. Bytes: the local shards, each way.
        """
        import jax

        from axonn_jax.distributed import shards

        if not values:
            return {}
        ((pp_rank, value),) = values.items()
        peer = last if pp_rank == first else first
        form = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        outgoing = [shards.host_bytes(shard) for shard in shards.local_shards(value)]
        incoming = [shards.empty_bytes(shards.shard_bytes(form)) for _ in outgoing]
        requests = [self._comm.Irecv(buffer, peer, tag) for tag, buffer in enumerate(incoming)]
        requests += [self._comm.Isend(buffer, peer, tag) for tag, buffer in enumerate(outgoing)]
        for request in requests:
            self._wait(request)
        devices = shards.local_devices(value.sharding)
        received = [shards.from_bytes(buffer, form, device) for buffer, device in zip(incoming, devices, strict=True)]
        return {pp_rank: shards.rebuild(form, received)}

    @staticmethod
    def _wait(request: "MPI.Request") -> None:
        pause = 20e-6
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


class JaxSync(HostSync):
    """Over the devices of one `jax.distributed` world, where no MPI connects the processes (`srun`)."""

    def __init__(self, grid: Grid):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self.rank, self.size = grid.rank, grid.size
        mesh = grid.mesh
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._local = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
        self._largest = jax.jit(lambda flags: flags.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending: Any = None

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        from jax.experimental import multihost_utils

        # As bytes: jax would round numbers of 8 bytes.
        rows = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(local).reshape(-1).view(np.uint8)))
        return rows.reshape(self.size, -1).view(local.dtype).reshape(self.size, *local.shape)

    def any_before(self, flag: bool) -> bool:  # noqa: D102
        import jax

        previous = self._pending is not None and bool(self._pending)
        local = np.full((self._local,), flag, np.int32)
        self._pending = self._largest(jax.make_array_from_process_local_data(self._split, local))
        return previous


def host_sync(grid: Grid) -> HostSync:
    """Return the connection of a run's processes: MPI if all are MPI ranks, else jax; collective over all processes."""
    if grid.size == 1:
        return LocalSync()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == grid.size:
            return MpiSync(MPI.COMM_WORLD)
    return JaxSync(grid)


@contextlib.contextmanager
def together(sync: HostSync, kind: type[Exception] = UserError) -> Iterator[None]:
    """Run a part in which each process may fail, and raise the first one's error on all of them.

    The field of a ``UserError`` says whose it is, where the first process has none.

    Args:
        sync: Connection of the processes, all of which must run the part.
        kind: ``UserError``, or an exception made of its text. Any other error leaves the part at once.
    """
    local_error, fault = None, ""
    try:
        yield
    except kind as error:
        local_error = error
        parts = (error.field, str(error.value), error.accepted) if isinstance(error, UserError) else (str(error),)
        fault = json.dumps(parts)
    for rank, text in enumerate(sync.gather(fault)):
        if text and rank == sync.rank and local_error is not None:
            raise local_error  # as it is: a value that is no text is shown as one elsewhere
        if text and kind is UserError:
            field, value, accepted = json.loads(text)
            raise UserError(f"rank {rank}'s {field}" if rank else field, value, accepted)
        if text:
            raise kind(*json.loads(text))


@contextlib.contextmanager
def only_run_in(
    directory: str,
    sync: HostSync,
    say: Callable[[str], None],
    refusal: Callable[[str, str], Exception] = _REFUSAL,
) -> Iterator[None]:
    """Hold a run's directory; the run's first process does that for all of them.

    The directory is made, and removed in the end if it stays empty, as on bad input.

    Raises the `refusal` of the directory and what is accepted on all processes where another run holds the directory,
    it cannot be written, or processes do not share it; nothing in it has been touched then.
    """
    with contextlib.ExitStack() as stack:
        fault = ""
        if sync.rank == 0:
            try:
                stack.enter_context(made(Path(directory)))  # and a run that cannot start leaves none
                if not stack.enter_context(held(Path(directory) / LOCK)):
                    say(f"warning: the file system of {directory} has no locks: nothing keeps a second run out of it")
            except Held as holder:
                fault = f"a directory without another run; {holder} trains in this one"
            except OSError as error:
                fault = f"a directory that can be written in: {error.strerror or error}"
        if (fault := sync.gather(fault)[0]) != "":
            raise refusal(directory, fault)
        lock = Path(directory) / LOCK
        locks = sync.gather(lock.read_text() if in_sight(lock) else "")
        if unshared := [rank for rank, content in enumerate(locks) if content != locks[0]]:
            accepted = f"a directory shared by all processes; rank {unshared[0]} does not see rank 0's files"
            raise refusal(directory, accepted)
        yield
