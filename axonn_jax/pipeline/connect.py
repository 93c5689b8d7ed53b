"""What ties the processes of a pipeline together: communicators, agreement, orders within a stage, the watch."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from axonn_jax.grid import Grid
from axonn_jax.pipeline.status import Status
from axonn_jax.pipeline.timeline import Recorder
from axonn_jax.pipeline.together import Alone, OverMpi, Together
from axonn_jax.pipeline.watch import Watch, WatchOverMpi
from axonn_jax.schedule.policies import Policy
from axonn_jax.schedule.tasks import Kind, Layout, Task

if TYPE_CHECKING:
    from mpi4py import MPI

_KINDS = list(Kind)


@dataclass
class Links:
    """A process's ties to the others of its pipeline; in a run of one process there are none to tie."""

    together: Together
    watch: Watch
    status: Status
    pipe: "MPI.Comm | None" = None
    """A communicator whose ranks are the pipe's places, of the processes at this one's place in their stages."""
    orders: "StageOrders | None" = None
    recorder: Recorder = field(default_factory=Recorder)


def connect(grid: Grid, layout: Layout, policy: Policy, stall_timeout: float) -> Links:
    """Makes the ties; collective over all processes of the run. Nothing is sent yet."""
    status = Status()
    if grid.size == 1:
        return Links(Alone(), Watch(status, layout, stall_timeout), status)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    place, within = divmod(grid.rank, grid.stage_processes)
    pipe = world.Split(within, place)
    orders = None
    if grid.stage_processes > 1 and policy == "message":
        orders = StageOrders(world.Split(place, within))
    watch = WatchOverMpi(status, layout, stall_timeout, world.Dup(), grid)
    return Links(OverMpi(pipe), watch, status, pipe, orders)


class StageOrders:
    """The first process of a stage tells the others which task it has chosen; messages of 16 bytes, never waited for.

    What has arrived may differ between the processes of a stage, and their programs hold collectives: they must start
    the same tasks in the same order.
    """

    def __init__(self, stage: "MPI.Comm"):
        self._comm = stage
        self.leads = stage.Get_rank() == 0
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._stop = threading.Event()

    def start(self, told: Callable[[Task, int], None], failed: Callable[[BaseException], None]) -> None:
        """Begins to listen, on a thread of its own."""
        if not self.leads:
            self._stop = threading.Event()
            thread = threading.Thread(target=self._listen, args=(told, failed, self._stop), name="axonn-orders")
            thread.daemon = True
            thread.start()

    def tell(self, task: Task, step: int) -> None:
        """Tells the others, without waiting for them."""
        order = np.array([_KINDS.index(task.kind), task.stage, task.microbatch, step], np.int32)
        self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
        self._sent += [(self._comm.Isend(order, other), order) for other in range(1, self._comm.Get_size())]

    def close(self) -> None:
        """Stops listening."""
        self._stop.set()

    def _listen(
        self, told: Callable[[Task, int], None], failed: Callable[[BaseException], None], stop: threading.Event
    ) -> None:
        order, pause = np.empty(4, np.int32), 50e-6
        try:
            while not stop.is_set():
                message = self._comm.Improbe(source=0)
                if message is None:
                    time.sleep(pause)
                    pause = min(pause * 1.2, 1e-3)
                    continue
                message.Recv(order)
                pause = 50e-6
                kind, stage, microbatch, step = order.tolist()
                told(Task(_KINDS[kind], stage, microbatch), step)
        except BaseException as error:
            failed(error)
