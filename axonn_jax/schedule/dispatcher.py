"""Decides which task one rank starts next: told what has arrived and finished, it knows no clock, no jax, no MPI."""

from collections import deque
from collections.abc import Sequence
from itertools import islice

from axonn_jax.schedule.message_driven import MessageDriven
from axonn_jax.schedule.policies import Policy, check_policy, fixed_order
from axonn_jax.schedule.tasks import Kind, Layout, Message, Task, needs, predecessor, sends

_FEW = 8
"""Missing messages that a dispatcher names."""


class Follower:
    """Starts the tasks of one rank in an order told from outside, each as soon as its input is there.

    The processes of a stage other than its first follow that one: their programs hold collectives, so all must start
    the same tasks in the same order. A fixed policy is an order told in advance.

    What a task needs from its own rank (a forward before its backward, input before weight gradients) is met once
    the predecessor was *started*: a device runs its tasks in the order of their start, so a caller may start ahead.
    """

    def __init__(self, layout: Layout, rank: int):
        if not 0 <= rank < layout.pipe:
            raise ValueError(f"rank {rank} of a pipeline of {layout.pipe}")
        self.layout, self.rank = layout, rank
        self._pipe, self._stages = layout.pipe, layout.stages
        self._told: deque[Task] = deque()  # and not yet started
        self._known: set[Task] = set()  # ever told
        self._arrived: set[Message] = set()
        self._begun: set[Task] = set()
        self._running: set[Task] = set()
        self._count = self._forwards = self._releases = 0

    def tell(self, task: Task) -> None:
        """Appends a task to the order.

        Raises ``ValueError`` for a task of another rank, or one told before.
        """
        self._check_place(task, task.stage, task.microbatch)
        if task in self._known:
            raise ValueError(f"rank {self.rank}: {task} was told twice")
        self._known.add(task)
        self._told.append(task)

    def arrived(self, message: Message) -> None:
        """Takes note that an input is there.

        Raises ``ValueError`` for a message that came before or is for nobody here.
        """
        self._check_message(message)
        if message in self._arrived:
            raise ValueError(f"rank {self.rank}: {message} arrived twice")
        self._arrived.add(message)

    def next(self) -> Task | None:
        """Returns the task to start now and counts it as started, or None if nothing can be started."""
        if not self._told or not self._ready(self._told[0]):
            return None
        task = self._told.popleft()
        self._begun.add(task)
        return self._start(task)

    def finished(self, task: Task) -> None:
        """Takes note that a started task has run. Raises ``ValueError`` if it is not running."""
        if task not in self._running:
            raise ValueError(f"rank {self.rank}: {task} finished but is not running")
        self._running.remove(task)
        if task.kind in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
            self._releases += 1

    def waiting_for(self) -> list[Message]:
        """Returns the messages whose absence stops this rank now, most urgent first."""
        message = needs(self._told[0], self.layout) if self._told else None
        return [message] if message is not None and message not in self._arrived else []

    @property
    def blocked(self) -> Task | None:
        """The next task of the order if its inputs are not there, else None."""
        return self._told[0] if self._told and not self._ready(self._told[0]) else None

    @property
    def done(self) -> bool:
        """Whether every task of this rank has finished."""
        return self._releases == self.layout.microbatches * self.layout.virtual_stages

    @property
    def started(self) -> int:
        """Tasks started so far."""
        return self._count

    @property
    def live(self) -> int:
        """Activations alive: forwards started less backwards (or weight gradients) finished.

        A caller that starts ahead sees a larger number here than the device, by the tasks that have not run yet.
        """
        return self._forwards - self._releases

    def _start(self, task: Task) -> Task:
        self._running.add(task)
        self._count += 1
        self._forwards += task.kind is Kind.FORWARD
        return task

    def _ready(self, task: Task) -> bool:
        """Whether the inputs of a task are there."""
        before = predecessor(task)
        if before is not None and Task(before, task.stage, task.microbatch) not in self._begun:
            return False
        message = needs(task, self.layout)
        return message is None or message in self._arrived

    def _check_message(self, message: Message) -> None:
        self._check_place(message, message.stage, message.microbatch)
        if message.stage == (0 if message.direction == "forward" else self._stages - 1):
            raise ValueError(f"rank {self.rank}: nobody sends a {message}")

    def _check_place(self, what: object, stage: int, microbatch: int) -> None:
        here = stage % self._pipe == self.rank and 0 <= stage < self._stages
        if not here or not 0 <= microbatch < self.layout.microbatches:
            raise ValueError(f"rank {self.rank} of {self.layout}: has no place for {what}")


class Dispatcher(Follower):
    """Chooses the tasks of one rank by a policy; the same calls in the same order give the same choices.

    `in_flight` limits the microbatches between their first forward and their last backward under the message-driven
    policy (`in_flight_limit`) and with them the activations (`live_bound`), 0 for the defaults; `split` says whether
    that policy computes input and weight gradients as separate tasks. Fixed policies ignore both.

    Raises:
        UserError: the policy is unknown or cannot run with this layout, or `in_flight` is below 0.
    """

    def __init__(self, layout: Layout, rank: int, policy: Policy, in_flight: int = 0, split: bool = True):
        super().__init__(layout, rank)
        check_policy(policy, layout)
        self._rule = MessageDriven(layout, rank, in_flight, split) if policy == "message" else None
        if policy != "message":
            self._told.extend(fixed_order(policy, layout, rank))

    def tell(self, task: Task) -> None:
        """Refuses: a dispatcher follows nobody."""
        raise ValueError(f"rank {self.rank}: told {task}, but this rank chooses by itself")

    def arrived(self, message: Message) -> None:
        """Takes note that an input is there.

        Raises ``ValueError`` for a message that came before or is for nobody here.
        """
        if self._rule is None:
            super().arrived(message)
            return
        self._check_message(message)
        direction, stage, microbatch = message
        if direction == "forward":
            self._rule.forward_ready(stage, microbatch)
        else:
            self._rule.backward_ready(stage, microbatch)

    def next(self) -> Task | None:
        """Returns the task to start now and counts it as started, or None if nothing can be started."""
        if self._rule is None:
            return super().next()
        task = self._rule.choose()
        return None if task is None else self._start(task)

    def waiting_for(self) -> list[Message]:
        """Returns the messages whose absence stops this rank now, most urgent first.

        In a fixed order this is the next task's message; under the message-driven policy, the first few of those that
        would let a task start: a rank asks whenever it has nothing to do, and shows one.
        """
        return super().waiting_for() if self._rule is None else list(islice(self._rule.missing(), _FEW))


def check_feasible(orders: Sequence[Sequence[Task]], layout: Layout) -> None:
    """Runs fixed orders, one a rank, against each other and pairs every send with its receive.

    Raises ``ValueError`` that names the blocked tasks if the ranks would wait for each other, a task that does not
    belong where it is or comes twice, or a rank whose order is not complete.
    """
    if len(orders) != layout.pipe:
        raise ValueError(f"{len(orders)} orders for {layout.pipe} ranks")
    ranks = [Follower(layout, rank) for rank in range(layout.pipe)]
    for follower, order in zip(ranks, orders, strict=True):
        for told in order:
            follower.tell(told)
    work = deque(range(layout.pipe))
    while work:
        follower = ranks[work.popleft()]
        while (task := follower.next()) is not None:
            follower.finished(task)
            message = sends(task, layout)
            if message is not None:
                ranks[layout.rank_of(message.stage)].arrived(message)
                work.append(layout.rank_of(message.stage))
    blocked = [f"rank {rank.rank} at {rank.blocked}" for rank in ranks if rank.blocked is not None]
    if blocked:
        raise ValueError("these orders deadlock: " + ", ".join(blocked))
    short = [str(rank.rank) for rank in ranks if not rank.done]
    if short:
        raise ValueError(f"tasks are missing from the order of rank {', '.join(short)}")
