"""Host exchanges between processes: texts, flags, numbers, and arrays of two stages."""

import contextlib
import json
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_jax.core.documents import LockHeldError, created_folder, file_lock, in_sight
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid

if TYPE_CHECKING:
    import jax
    from mpi4py import MPI

_TEXT_BYTES = 1024
LOCK = "run.lock"
"""Lock file in a run's directory, locked by the run that trains there."""
_REFUSAL = partial(UserError, "log.dir")


class HostSync(ABC):
    """Exchanges between processes through host memory; all processes make the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        """Return every process's array, stacked by rank; shape and dtype must agree."""

    @abstractmethod
    def any_flag_last_call(self, flag: bool) -> bool:
        """Return True if any process had its flag set in the previous call.

        The answer is one call late so that no process waits for the others here: the reduction of a flag runs while the
        next step is computed. Bytes: one flag a process.
        """

    def gather(self, text: str) -> list[str]:
        """Return every process's text by rank; waits for all processes.

        Bytes: 8 a process, plus the longest text's, rounded up to a power of two, if any text is not empty.
        """
        # Lengths come first, so that a text may have any length; most calls carry "no fault" and end here.
        raw = text.encode(errors="surrogateescape")
        sizes = [int(size) for size in self.gather_number(len(raw))]
        if not any(sizes):
            return ["" for _ in sizes]
        # Round up to a power of two, since jax compiles a gather for each new length.
        room = max(_TEXT_BYTES, 1 << (max(sizes) - 1).bit_length())
        rows = self._all_gather(np.frombuffer(raw.ljust(room, b"\0"), np.uint8))
        return [row[:size].tobytes().decode(errors="surrogateescape") for row, size in zip(rows, sizes, strict=True)]

    def gather_number(self, number: float) -> list[float]:
        """Return every process's number by rank; waits for all processes. Bytes: 8 a process."""
        return self._all_gather(np.array([number], np.float64))[:, 0].tolist()  # type: ignore[no-any-return]

    def gathered(self, numbers: Mapping[int, tuple[float, ...]]) -> list[list[float]]:
        """Return the numbers of all pipe ranks in the same order everywhere, so that sums of them agree bit by bit.

        Args:
            numbers: An entry for each pipe rank of this process; every process must have the same number of entries.

        Returns:
            A row for each pipe rank. Bytes: 8 a number.
        """
        local = np.array([numbers[pp_rank] for pp_rank in sorted(numbers)], np.float64)
        return self._all_gather(local).reshape(-1, local.shape[-1]).tolist()  # type: ignore[no-any-return]


class LocalSync(HostSync):
    """Exchanges of a run with one process: nothing is sent."""

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        return local[None]

    def any_flag_last_call(self, flag: bool) -> bool:
        """Return the flag, since there is nobody to wait for."""
        return flag

    def exchange(self, values: Mapping[int, "jax.Array"], pp_ranks: Sequence[int]) -> dict[int, list["jax.Array"]]:
        """Return the arrays of several pipe ranks, in the order of the ranks, on the mesh of each of them."""
        import jax

        return {
            pp_rank: [value if at == pp_rank else jax.device_put(values[at], value.sharding) for at in pp_ranks]
            for pp_rank, value in values.items()
        }


class MpiSync(HostSync):
    """Exchanges over a duplicate of an MPI communicator.

    Args:
        comm: Communicator of all processes; duplicating it is collective.
    """

    def __init__(self, comm: "MPI.Comm"):
        self._comm = comm.Dup()
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._pending: tuple[Any, np.ndarray, np.ndarray] | None = None

    def another(self) -> "MPI.Comm | None":
        """Return a further communicator of these ranks for a thread; None without THREAD_MULTIPLE. Collective."""
        from mpi4py import MPI

        return self._comm.Dup() if MPI.Query_thread() == MPI.THREAD_MULTIPLE else None

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        everyone = np.empty((self.size, *local.shape), local.dtype)
        self._wait(self._comm.Iallgather(local, everyone))
        return everyone

    def any_flag_last_call(self, flag: bool) -> bool:  # noqa: D102
        from mpi4py import MPI

        previous = False
        if self._pending is not None:
            request, total, _ = self._pending
            self._wait(request)
            previous = bool(total[0])
        local, total = np.array([flag], np.uint8), np.zeros(1, np.uint8)
        # MPI reads and writes the buffers until the reduction is complete, so they must stay alive with the request.
        self._pending = (self._comm.Iallreduce(local, total, MPI.MAX), total, local)
        return previous

    def exchange(self, values: Mapping[int, "jax.Array"], pp_ranks: Sequence[int]) -> dict[int, list["jax.Array"]]:
        """Exchange arrays of one form between pipe ranks; bytes: the local shards, to each of the other ranks.

        Args:
            values: The array of the pipe rank that this process has, by rank; empty if it is none of them.
            pp_ranks: The pipe ranks.

        Returns:
            The arrays of all these ranks, in their order, on this process's mesh, by its rank.
        """
        import jax

        from axonn_jax.core.distributed import shards

        if not values:
            return {}
        ((pp_rank, value),), peers = values.items(), [at for at in pp_ranks if at not in values]
        form = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        outgoing = [shards.host_bytes(shard) for shard in shards.local_shards(value)]
        incoming = {peer: [shards.empty_bytes(shards.shard_bytes(form)) for _ in outgoing] for peer in peers}
        requests = [self._comm.Irecv(buffer, peer, tag) for peer in peers for tag, buffer in enumerate(incoming[peer])]
        requests += [self._comm.Isend(buffer, peer, tag) for peer in peers for tag, buffer in enumerate(outgoing)]
        for request in requests:
            self._wait(request)
        devices = shards.local_devices(value.sharding)

        def arrived(peer: int) -> jax.Array:
            pairs = zip(incoming[peer], devices, strict=True)
            return shards.rebuild(form, [shards.from_bytes(buffer, form, device) for buffer, device in pairs])

        return {pp_rank: [value if at == pp_rank else arrived(at) for at in pp_ranks]}

    @staticmethod
    def _wait(request: "MPI.Request") -> None:
        # Sleep between tests: MPI's own wait spins, which would take a core from a peer on the same host.
        pause = 20e-6
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


class JaxSync(HostSync):
    """Exchanges over the devices of a `jax.distributed` world, for processes that MPI does not connect (`srun`).

    Args:
        grid: The grid, whose mesh spans all processes.
    """

    def __init__(self, grid: Grid):
        import jax
        from jax.sharding import NamedSharding, PartitionSpec

        self.rank, self.size = grid.rank, grid.size
        mesh = grid.mesh
        self._split = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
        self._local = sum(device.process_index == jax.process_index() for device in mesh.devices.flat)
        self._largest = jax.jit(lambda flags: flags.max(), out_shardings=NamedSharding(mesh, PartitionSpec()))
        self._pending = None

    def _all_gather(self, local: np.ndarray) -> np.ndarray:
        from jax.experimental import multihost_utils

        # Send bytes: jax would round 8-byte numbers to 32 bits.
        rows = np.asarray(multihost_utils.process_allgather(np.ascontiguousarray(local).reshape(-1).view(np.uint8)))
        return rows.reshape(self.size, -1).view(local.dtype).reshape(self.size, *local.shape)

    def any_flag_last_call(self, flag: bool) -> bool:  # noqa: D102
        import jax

        # Reading the pending flag blocks only until the previous call's reduction is complete.
        previous = self._pending is not None and bool(self._pending)
        local = np.full((self._local,), flag, np.int32)
        self._pending = self._largest(jax.make_array_from_process_local_data(self._split, local))
        return previous


def host_sync(grid: Grid) -> HostSync:
    """Return the exchange between a run's processes; collective over all of them.

    Args:
        grid: The grid of the run.

    Returns:
        MPI's if all processes are MPI ranks, otherwise jax's.
    """
    if grid.size == 1:
        return LocalSync()
    # `sys.modules` instead of an import, which would initialize MPI in a run that does without it.
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == grid.size:
            return MpiSync(MPI.COMM_WORLD)
    return JaxSync(grid)


@contextlib.contextmanager
def together(sync: HostSync, kind: type[Exception] = UserError) -> Iterator[None]:
    """Context in which any process may fail; at its end the first rank's error is raised on all processes.

    The field of a ``UserError`` names the rank, unless it is rank 0. Collective: one `gather` at the end.

    Args:
        sync: Exchange between the processes, all of which must enter the context.
        kind: ``UserError``, or an exception type that is constructed from its text. Other errors propagate immediately.
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
            raise local_error  # the original, whose value need not be a text as on the other processes
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
    """Context that locks a run's directory against other runs; collective over all processes.

    Rank 0 creates and locks the directory, and removes it at the end if it is still empty, as after bad input.

    Args:
        directory: The run directory.
        sync: Host exchange between the processes.
        say: Printer of a line for people.
        refusal: Constructor of the error from the directory and what would be accepted.

    Raises:
        UserError: Or the error that `refusal` returns, on all processes: another run has the lock, the directory cannot
            be written, or the processes do not share it. Nothing in the directory has changed then.
    """
    with contextlib.ExitStack() as stack:
        fault = ""
        if sync.rank == 0:
            try:
                stack.enter_context(
                    created_folder(Path(directory))
                )  # so that a run that cannot start leaves no directory
                if not stack.enter_context(file_lock(Path(directory) / LOCK)):
                    say(f"warning: the file system of {directory} has no locks: nothing keeps a second run out of it")
            except LockHeldError as holder:
                fault = f"a directory without another run; {holder} trains in this one"
            except OSError as error:
                fault = f"a directory that can be written in: {error.strerror or error}"
        if (fault := sync.gather(fault)[0]) != "":
            raise refusal(directory, fault)
        # Compare the lock's content with rank 0's, since a path may exist on several hosts without being shared.
        lock = Path(directory) / LOCK
        locks = sync.gather(lock.read_text() if in_sight(lock) else "")
        if unshared := [rank for rank, content in enumerate(locks) if content != locks[0]]:
            accepted = f"a directory shared by all processes; rank {unshared[0]} does not see rank 0's files"
            raise refusal(directory, accepted)
        yield
