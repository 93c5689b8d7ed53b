"""The host loop of a pipeline: starts what the dispatchers choose, and tells them what arrived and what has run."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import NamedTuple, Protocol

import jax

from axonn_jax.channels.base import Channel
from axonn_jax.pipeline.rank import Rank
from axonn_jax.pipeline.status import Status
from axonn_jax.pipeline.timeline import Kind as SpanKind
from axonn_jax.pipeline.timeline import Recorder
from axonn_jax.schedule.dispatcher import Follower
from axonn_jax.schedule.tasks import Kind, Layout, Message, Task, sends

SPAN_KINDS: dict[tuple[Kind, ...], SpanKind] = {
    (Kind.FORWARD,): "forward",
    (Kind.BACKWARD,): "backward",
    (Kind.BACKWARD_INPUT,): "input_gradient",
    (Kind.BACKWARD_WEIGHT,): "weight_gradient",
    (Kind.FORWARD, Kind.BACKWARD): "forward_and_backward",
    (Kind.FORWARD, Kind.BACKWARD_INPUT): "forward_and_input_gradient",
}


_JOIN_S = 5.0


class Orders(Protocol):
    """Keeps the processes of one stage at the same tasks in the same order."""

    leads: bool
    """Whether this process chooses; the others follow."""

    def follow(self, step: int, told: Callable[[Task], None], failed: Callable[[BaseException], None]) -> None:
        """Hands on a step's tasks as they are told, from any thread; those told before at once."""

    def leave(self) -> None:
        """Ends the step that is followed, once all its tasks have been told."""

    def tell(self, task: Task, step: int) -> None:
        """Tells the others what this process has chosen, without waiting."""


class _Arrived(NamedTuple):
    message: Message
    value: jax.Array


class _Ran(NamedTuple):
    place: int
    begin: float
    end: float


class _Told(NamedTuple):
    task: Task


class _Broke(NamedTuple):
    error: BaseException


class _Started(NamedTuple):
    tasks: tuple[Task, ...]
    """What one program computes: a task, or two in a row."""
    value: jax.Array | None

    def __str__(self) -> str:
        return f"{''.join(task.kind for task in self.tasks)}{self.tasks[0].stage}.{self.tasks[0].microbatch}"


class _Probe(NamedTuple):
    """A program in a device's queue: when it was started, what becomes ready with it, whom to tell."""

    at: float
    done: jax.Array
    ran: Callable[[float, float], None]


class Executor:
    """Runs steps on the ranks of this process (one, or all of them in a run of one process).

    Nothing here waits for a device value: a thread a rank does (asleep, not spinning), and says when a program has
    run. Then its result is sent, the dispatcher is told, and the next task is started. On accelerators, where
    starting a program takes a noticeable part of its time, a rank keeps two programs in its device's queue.
    """

    def __init__(
        self,
        ranks: Mapping[int, Rank],
        layout: Layout,
        channel: Channel,
        status: Status,
        recorder: Recorder,
        orders: Orders | None = None,
    ):
        self._ranks, self._layout, self._channel = ranks, layout, channel
        self._status, self._recorder, self._orders = status, recorder, orders
        self._on_host = jax.default_backend() == "cpu"
        self._depth = 1 if self._on_host else 2
        self._events: queue.SimpleQueue[_Arrived | _Ran | _Told | _Broke] = queue.SimpleQueue()
        self._early: deque[_Arrived] = deque()  # of the next step, come before this one ended
        self._probes: dict[int, queue.SimpleQueue[_Probe | None]] = {}
        self._threads: list[threading.Thread] = []
        for place in ranks:
            self._probes[place] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._wait, args=(place,), name=f"axonn-device-{place}"))
            self._threads[-1].daemon = True
            self._threads[-1].start()
        # Also where nobody closes: a thread left in jax when the interpreter ends would abort the process.
        self._end_threads = weakref.finalize(self, _end, list(self._probes.values()), self._threads)
        channel.start(lambda message, value: self._events.put(_Arrived(message, value)), self._broke)

    def close(self) -> None:
        """Ends the threads and the channel."""
        self._end_threads()
        self._channel.close()

    def then(self, place: int, done: jax.Array, name: str, kind: SpanKind, step: int, at: float) -> None:
        """Records a program that was started on a rank's device at time `at`, outside the tasks."""

        def record(begin: float, end: float) -> None:
            self._recorder.add(place, name, kind, begin, end, step)

        self._probes[place].put(_Probe(at, done, record))

    def run(self, dispatchers: Mapping[int, Follower], step: int, *, train: bool = True) -> None:
        """Runs every task of a step, or of an evaluation after it; returns when the last has run here.

        Raises what broke a program or the channel.
        """
        self._status.step = step
        self._status.now("in a step")
        self._dispatchers = dispatchers
        running: dict[int, deque[_Started]] = {place: deque() for place in self._ranks}
        held: dict[int, Task] = {}  # by place, a forward to be started with its backward, once that is told
        early, self._early = self._early, deque()
        for kept in early:
            self._take(kept)
        orders = self._orders if train else None
        if orders is not None and not orders.leads:
            orders.follow(step, lambda task: self._events.put(_Told(task)), self._broke)
        while True:
            active = fresh = False
            for place, rank in self._ranks.items():
                while len(running[place]) < self._depth and (task := dispatchers[place].next()) is not None:
                    if orders is not None and orders.leads:
                        orders.tell(task, step)
                    if train and rank.joins(task):
                        held[place] = task
                        continue
                    tasks = (held.pop(place), task) if place in held else (task,)
                    at = time.monotonic()
                    ran = rank.start(*tasks, train=train)
                    running[place].append(_Started(tasks, ran.value))
                    self._probes[place].put(_Probe(at, ran.done, partial(self._ran, place)))
                    fresh = True
                active = active or bool(running[place])
            if not active and all(dispatcher.done for dispatcher in dispatchers.values()):
                if orders is not None:
                    orders.leave()
                return
            if fresh or not active:
                self._channel.busy(active and self._on_host)
            self._note(running)
            event = self._events.get()
            if isinstance(event, _Broke):
                raise event.error
            if not isinstance(event, _Ran):
                self._take(event)
                continue
            started = running[event.place].popleft()
            if train:
                kind = SPAN_KINDS[tuple(task.kind for task in started.tasks)]
                self._recorder.add(event.place, str(started), kind, event.begin, event.end, step)
            for task in started.tasks:
                message = sends(task, self._layout)
                if message is not None:
                    assert started.value is not None
                    self._channel.send(message, started.value)
                dispatchers[event.place].finished(task)
            self._status.finished = str(started)

    def _take(self, event: _Arrived | _Told) -> None:
        """Gives an arrival or an order to its dispatcher; an arrival that is early is kept for the next step."""
        if isinstance(event, _Told):
            self._dispatchers[self._layout.rank_of(event.task.stage)].tell(event.task)
            return
        place = self._layout.rank_of(event.message.stage)
        if self._dispatchers[place].done:
            self._early.append(event)
        else:
            self._ranks[place].arrived(event.message, event.value)
            self._dispatchers[place].arrived(event.message)

    def _note(self, running: Mapping[int, Sequence[_Started]]) -> None:
        tasks = [str(queued[0]) for queued in running.values() if queued]
        waiting = [] if tasks else [m for d in self._dispatchers.values() for m in d.waiting_for()]
        self._status.now(running=", ".join(tasks), waiting=waiting)

    def _wait(self, place: int) -> None:
        last = 0.0
        while (probe := self._probes[place].get()) is not None:
            try:
                probe.done.block_until_ready()
            except BaseException as error:
                self._broke(error)
                return
            now = time.monotonic()
            probe.ran(max(probe.at, last), now)  # a device runs its programs one after the other
            last = now

    def _ran(self, place: int, begin: float, end: float) -> None:
        self._events.put(_Ran(place, begin, end))

    def _broke(self, error: BaseException) -> None:
        self._events.put(_Broke(error))


def _end(queues: Sequence["queue.SimpleQueue[_Probe | None]"], threads: Sequence[threading.Thread]) -> None:
    for probes in queues:
        probes.put(None)
    for thread in threads:
        thread.join(_JOIN_S)
