"""What all processes of a run tell each other about saving and stopping: short texts, and one flag a step."""

import sys
import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from axonn_jax.grid import Grid

if TYPE_CHECKING:
    from mpi4py import MPI

_LONGEST = 1000  # bytes of a text


class Agreement(ABC):
    """Exchanges between all processes; every process makes the same calls in the same order."""

    rank: int = 0
    size: int = 1

    @abstractmethod
    def gather(self, text: str) -> list[str]:
        """Everybody's text, by rank; waits for all. Longer texts than 1000 bytes are cut."""

    @abstractmethod
    def any_before(self, flag: bool) -> bool:
        """Whether any process had its flag set at the call before this one. Waits for nobody's present."""


class Alone(Agreement):
    """A run of one process."""

    def gather(self, text: str) -> list[str]:  # noqa: D102
        return [text]

    def any_before(self, flag: bool) -> bool:
        """Alone there is nobody to wait for: the present flag counts."""
        return flag


class OverMpi(Agreement):
    """Over a communicator of its own; waiting does not spin. Messages: 1 byte a step, 1000 a text."""

    def __init__(self, world: "MPI.Comm"):
        self._comm = world.Dup()
        self.rank, self.size = world.Get_rank(), world.Get_size()
        self._pending: tuple[Any, np.ndarray, np.ndarray] | None = None

    def gather(self, text: str) -> list[str]:  # noqa: D102
        everyone = np.empty((self.size, _LONGEST), np.uint8)
        self._wait(self._comm.Iallgather(_encode(text), everyone))
        return [_decode(row) for row in everyone]

    def any_before(self, flag: bool) -> bool:  # noqa: D102
        from mpi4py import MPI

        before = False
        if self._pending is not None:
            request, total, _ = self._pending
            self._wait(request)
            before = bool(total[0])
        own, total = np.array([flag], np.uint8), np.zeros(1, np.uint8)
        self._pending = (self._comm.Iallreduce(own, total, MPI.MAX), total, own)  # buffers live until it is done
        return before

    @staticmethod
    def _wait(request: "MPI.Request") -> None:
        pause = 20e-6
        while not request.Test():
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


class OverJax(Agreement):
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

    def gather(self, text: str) -> list[str]:  # noqa: D102
        from jax.experimental import multihost_utils

        return [_decode(row) for row in np.asarray(multihost_utils.process_allgather(_encode(text)))]

    def any_before(self, flag: bool) -> bool:  # noqa: D102
        import jax

        before = self._pending is not None and bool(self._pending)
        own = np.full((self._local,), flag, np.int32)
        self._pending = self._largest(jax.make_array_from_process_local_data(self._split, own))
        return before


def agreement(grid: Grid) -> Agreement:
    """How the processes of a run agree: MPI where it connects them, else jax; collective over all processes."""
    if grid.size == 1:
        return Alone()
    if "mpi4py.MPI" in sys.modules:
        from mpi4py import MPI

        if MPI.COMM_WORLD.Get_size() == grid.size:
            return OverMpi(MPI.COMM_WORLD)
    return OverJax(grid)


def _encode(text: str) -> np.ndarray:
    return np.frombuffer(text.encode()[:_LONGEST].ljust(_LONGEST, b"\0"), np.uint8)


def _decode(row: np.ndarray) -> str:
    return row.tobytes().rstrip(b"\0").decode(errors="ignore")
