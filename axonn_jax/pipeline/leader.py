"""Broadcast of a stage's order of tasks from its first process to the others."""

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from axonn_jax.schedule.tasks import Kind, Task

if TYPE_CHECKING:
    from mpi4py import MPI

_KINDS = list(Kind)


class LeaderBroadcast:
    """Broadcast of the first process's choice of tasks to the others of a stage, in messages of 16 bytes without waits.

    Arrivals may differ between the processes of a stage, and their programs hold collectives: they must start the same
    tasks in the same order. Orders go down a binary tree, so that none sends more than two. A step's orders wait here
    until the step is followed: it may be of a batch shape that is still being compiled.
    """

    def __init__(self, stage: "MPI.Comm"):
        self._comm = stage
        rank, size = stage.Get_rank(), stage.Get_size()
        self.leads = rank == 0
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
        """Hand on a step's tasks as their orders come, from any thread; at once for orders that have come before."""
        with self._lock:
            self._followed, self._ordered, self._failed = step, ordered, failed
            for task in self._early.pop(step, []):
                ordered(task)
            if self._error is not None:
                failed(self._error)

    def leave(self) -> None:
        """End the step that is followed, once all its tasks have come."""
        with self._lock:
            self._followed = None

    def send(self, task: Task, step: int) -> None:
        """Send the others a task, without waiting for them."""
        self._pass_on(np.array([_KINDS.index(task.kind), task.stage, task.microbatch, step], np.int32))

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(1.0)

    def _pass_on(self, order: np.ndarray) -> None:
        self._sent = [(request, buffer) for request, buffer in self._sent if not request.Test()]
        self._sent += [(self._comm.Isend(order, child), order) for child in self._children]

    def _listen(self) -> None:
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
                    if step == self._followed:
                        self._ordered(task)
                    else:
                        self._early.setdefault(step, []).append(task)
        except BaseException as error:
            with self._lock:
                self._error = error
                self._failed(error)
