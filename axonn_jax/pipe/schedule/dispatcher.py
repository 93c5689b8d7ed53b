"""Dispatcher of a rank's tasks, by the messages that have arrived and the tasks that have finished."""

from collections import deque
from collections.abc import Collection, Iterable

from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task, needs, predecessor


class OrderedDispatcher:
    """Dispatcher that starts the tasks of one rank in a fixed order, each as soon as its input has arrived.

    Policies with a fixed order pass all tasks to the constructor. Under the message-driven policy, every process of a
    stage but the first appends the tasks that the first one broadcasts: the stage's programs contain collectives, so
    all its processes must start the same tasks in the same order.

    A dependency between two tasks of the rank (a forward before its backward, input before weight gradients) is met
    once the predecessor has *started*: a device runs tasks in the order of their start, so a caller may start ahead.

    Raises:
        ValueError: The pipeline has no such rank.
    """

    def __init__(
        self,
        shape: PipelineShape,
        rank: int,
        order: Iterable[Task] = (),
        *,
        last: Collection[Kind] = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT),
    ):
        if not 0 <= rank < shape.pipe:
            raise ValueError(f"rank {rank} of a pipeline of {shape.pipe}")
        self.shape, self.rank = shape, rank
        self._pipe, self._stages = shape.pipe, shape.stages
        self._last = last
        """Kinds of task that finish a microbatch in a stage."""
        self._order = deque(order)  # tasks not started yet
        self._appended: set[Task] = set()
        self._arrived: set[Message] = set()
        self._begun: set[Task] = set()
        self._running: set[Task] = set()
        self._count = self._forwarded = self._releases = 0

    def append(self, task: Task) -> None:
        """Append a task to the order.

        Raises:
            ValueError: The task belongs to another rank, or was appended before.
        """
        self._check_owner(task, task.stage, task.microbatch)
        if task in self._appended:
            raise ValueError(f"rank {self.rank}: {task} came twice")
        self._appended.add(task)
        self._order.append(task)

    def arrived(self, message: Message) -> None:
        """Record that an input has arrived.

        Raises:
            ValueError: The message arrived before, or no stage of this rank receives it.
        """
        self._check_message(message)
        if message in self._arrived:
            raise ValueError(f"rank {self.rank}: {message} arrived twice")
        self._arrived.add(message)

    def next(self) -> Task | None:
        """Return the task to start now and count it as started; None if no task can start."""
        if not self._order or not self._ready(self._order[0]):
            return None
        task = self._order.popleft()
        self._begun.add(task)
        return self._start(task)

    def finished(self, task: Task) -> None:
        """Record that a started task has run.

        Raises:
            ValueError: The task is not running.
        """
        if task not in self._running:
            raise ValueError(f"rank {self.rank}: {task} finished but is not running")
        self._running.remove(task)
        if task.kind in self._last:
            self._releases += 1

    def waiting_for(self) -> list[Message]:
        """Return the missing messages that this rank waits for, most urgent first."""
        message = needs(self._order[0], self.shape) if self._order else None
        return [message] if message is not None and message not in self._arrived else []

    @property
    def blocked(self) -> Task | None:
        """Next task of the order if its inputs are missing, else None."""
        return self._order[0] if self._order and not self._ready(self._order[0]) else None

    @property
    def done(self) -> bool:
        """True if every task of this rank has finished."""
        return self._releases == self.shape.pairs

    @property
    def started(self) -> int:
        """Number of tasks started so far."""
        return self._count

    @property
    def live(self) -> int:
        """Number of live activations: forwards started minus backwards (or weight gradients) finished.

        For a caller that starts ahead it exceeds the device's number by the tasks that have not run yet.
        """
        return self._forwarded - self._releases

    def _start(self, task: Task) -> Task:
        self._running.add(task)
        self._count += 1
        self._forwarded += task.kind is Kind.FORWARD
        return task

    def _ready(self, task: Task) -> bool:
        previous = predecessor(task)
        if previous is not None and Task(previous, task.stage, task.microbatch) not in self._begun:
            return False
        message = needs(task, self.shape)
        return message is None or message in self._arrived

    def _check_message(self, message: Message) -> None:
        self._check_owner(message, message.stage, message.microbatch)
        if message.stage == (0 if message.direction == "forward" else self._stages - 1):
            raise ValueError(f"rank {self.rank}: nobody sends a {message}")

    def _check_owner(self, item: object, stage: int, microbatch: int) -> None:
        is_local = stage % self._pipe == self.rank and 0 <= stage < self._stages
        if not is_local or not 0 <= microbatch < self.shape.microbatches:
            raise ValueError(f"rank {self.rank} of {self.shape}: has no place for {item}")


def forward_only(shape: PipelineShape, rank: int) -> OrderedDispatcher:
    """Return the dispatcher of an evaluation."""
    # With several stages on a rank, a group of `pipe` microbatches passes one stage before it needs the next: the first
    # microbatch is back from the other ranks by then.
    order = [
        Task(Kind.FORWARD, stage, microbatch)
        for start in range(0, shape.microbatches, shape.pipe)
        for stage in shape.stages_of(rank)
        for microbatch in range(start, min(start + shape.pipe, shape.microbatches))
    ]
    return OrderedDispatcher(shape, rank, order, last=(Kind.FORWARD,))
