"""Dispatchers: the next task of a rank, given the messages that have arrived and the tasks that have finished."""

from collections import deque
from collections.abc import Collection, Iterable

from axonn_jax.schedule.tasks import Kind, Message, PipelineShape, Task, needs, predecessor


class OrderedDispatcher:
    """Dispatcher that starts the tasks of one rank in a given order, each as soon as its input is there.

    The processes of a stage other than its first follow that one: their programs hold collectives, so all must start
    the same tasks in the same order. A fixed policy is an order known in advance.

    A task's dependency on its own rank (a forward before its backward, input before weight gradients) is met once the
    predecessor was *started*: a device runs its tasks in the order of their start, so a caller may start ahead.
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
        """Kinds of task that end a microbatch in a stage."""
        self._order = deque(order)  # and not yet started
        self._known: set[Task] = set()  # ever appended
        self._arrived: set[Message] = set()
        self._begun: set[Task] = set()
        self._running: set[Task] = set()
        self._count = self._forwarded = self._releases = 0

    def append(self, task: Task) -> None:
        """Append a task to the order.

        Raises ``ValueError`` for a task of another rank, or one that is in it already.
        """
        self._check_owner(task, task.stage, task.microbatch)
        if task in self._known:
            raise ValueError(f"rank {self.rank}: {task} came twice")
        self._known.add(task)
        self._order.append(task)

    def arrived(self, message: Message) -> None:
        """Record that an input has arrived.

        Raises ``ValueError`` for a message that came before or is for nobody here.
        """
        self._check_message(message)
        if message in self._arrived:
            raise ValueError(f"rank {self.rank}: {message} arrived twice")
        self._arrived.add(message)

    def next(self) -> Task | None:
        """Return the task to start now, counted as started, or None if nothing can be started."""
        if not self._order or not self._ready(self._order[0]):
            return None
        task = self._order.popleft()
        self._begun.add(task)
        return self._start(task)

    def finished(self, task: Task) -> None:
        """Record that a started task has run. Raises ``ValueError`` for a task that is not running."""
        if task not in self._running:
            raise ValueError(f"rank {self.rank}: {task} finished but is not running")
        self._running.remove(task)
        if task.kind in self._last:
            self._releases += 1

    def waiting_for(self) -> list[Message]:
        """Return the messages whose absence stops this rank now, most urgent first."""
        message = needs(self._order[0], self.shape) if self._order else None
        return [message] if message is not None and message not in self._arrived else []

    @property
    def blocked(self) -> Task | None:
        """The next task of the order if its inputs are not there, else None."""
        return self._order[0] if self._order and not self._ready(self._order[0]) else None

    @property
    def done(self) -> bool:
        """True if every task of this rank has finished."""
        return self._releases == self.shape.pairs

    @property
    def started(self) -> int:
        """Tasks started so far."""
        return self._count

    @property
    def live(self) -> int:
        """Activations alive: forwards started less backwards (or weight gradients) finished.

        A caller that starts ahead sees a larger number here than the device, by the tasks that have not run yet.
        """
        return self._forwarded - self._releases

    def _start(self, task: Task) -> Task:
        self._running.add(task)
        self._count += 1
        self._forwarded += task.kind is Kind.FORWARD
        return task

    def _ready(self, task: Task) -> bool:
        """Return True if the inputs of a task are there."""
        before = predecessor(task)
        if before is not None and Task(before, task.stage, task.microbatch) not in self._begun:
            return False
        message = needs(task, self.shape)
        return message is None or message in self._arrived

    def _check_message(self, message: Message) -> None:
        self._check_owner(message, message.stage, message.microbatch)
        if message.stage == (0 if message.direction == "forward" else self._stages - 1):
            raise ValueError(f"rank {self.rank}: nobody sends a {message}")

    def _check_owner(self, what: object, stage: int, microbatch: int) -> None:
        here = stage % self._pipe == self.rank and 0 <= stage < self._stages
        if not here or not 0 <= microbatch < self.shape.microbatches:
            raise ValueError(f"rank {self.rank} of {self.shape}: has no place for {what}")


def forward_only(shape: PipelineShape, rank: int) -> OrderedDispatcher:
    """Return an evaluation's dispatcher: microbatches in groups of `pipe`, a group through one stage at a time."""
    order = [
        Task(Kind.FORWARD, stage, microbatch)
        for start in range(0, shape.microbatches, shape.pipe)
        for stage in shape.stages_of(rank)
        for microbatch in range(start, min(start + shape.pipe, shape.microbatches))
    ]
    return OrderedDispatcher(shape, rank, order, last=(Kind.FORWARD,))
