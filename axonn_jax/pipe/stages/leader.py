"""Broadcast of a stage's order of tasks from its first process to the others."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from axonn_jax.pipe.schedule.tasks import Kind, Task

if TYPE_CHECKING:
    from mpi4py import MPI

_KINDS = list(Kind)


class LeaderBroadcast:
    """Nonblocking broadcast of the tasks that a stage's first process picks, in messages of 16 bytes.

    Messages may arrive at the processes of a stage in different orders, and the stage's programs contain collectives:
    all processes must start the same tasks in the same order.
    """

    def __init__(self, stage: "MPI.Comm"):
        self._comm = stage
        rank, size = stage.Get_rank(), stage.Get_size()
        self.leads = rank == 0
        # A binary tree: no process sends an order more than twice, whatever the size of the stage.
        self._children = [child for child in (2 * rank + 1, 2 * rank + 2) if child < size]
        self._sent: list[tuple[MPI.Request, np.ndarray]] = []
        self._lock = threading.Lock()
        self._early: dict[int, list[Task]] = {}
        self._followed: int | None = None
        self._ordered: Callable[[Task], None] = lambda task: None
        self._failed: Callable[[BaseException], None] = lambda error: None
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="axonn-orders", daemon=True)
        if not self.leads:
            self._thread.start()

    def follow(self, step: int, ordered: Callable[[Task], None], failed: Callable[[BaseException], None]) -> None:
        """Call `ordered` with each of a step's tasks, or `failed` with an error.

        Tasks received before this call are passed on immediately, later ones from the listening thread.
        """
        with self._lock:
            self._followed, self._ordered, self._failed = step, ordered, failed
            for task in self._early.pop(step, []):
                ordered(task)
            if self._error is not None:
                failed(self._error)

    def leave(self) -> None:
        """Stop following the current step; call it once all of the step's tasks have arrived."""
        with self._lock:
            self._followed = None

    def send(self, task: Task, step: int) -> None:
        """Send a task to the stage's other processes, without waiting for them."""
        self._pass_on(np.array([_KINDS.index(task.kind), task.stage, task.microbatch, step], np.int32))

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _pass_on(self, order: np.ndarray) -> None:
        # The buffer must outlive its request, so both are kept until MPI has sent it.
        self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
        self._sent += [(self._comm.Isend(order, child), order) for child in self._children]

    def _listen(self) -> None:
        # Polling with a growing pause, not a blocking receive: `close` must be able to end the thread.
        parent, pause = (self._comm.Get_rank() - 1) // 2, 50e-6
        try:
            while not self._stop.is_set():
                message = self._comm.Improbe(source=parent)
                if message is None:
                    time.sleep(pause)
                    pause = min(pause * 1.2, 1e-3)
                    continue
                order = np.empty(4, np.int32)
                message.Recv(order)
                pause = 50e-6
                self._pass_on(order)
                kind, stage, microbatch, step = order.tolist()
                task = Task(_KINDS[kind], stage, microbatch)
                with self._lock:
                    # The leader may be a step ahead, or this process may still be compiling the step's batch shape.
                    if step == self._followed:
                        self._ordered(task)
                    else:
                        self._early.setdefault(step, []).append(task)
        except BaseException as error:
            with self._lock:
                self._error = error
                self._failed(error)
