"""Executor of a pipeline: the host loop that starts tasks and reports arrivals and results to the dispatchers."""

import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.distributed.gossip import Awaited, RankStatus
from axonn_jax.pipe.channels.base import Channel
from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.tasks import Message, PipelineShape, Task, sends
from axonn_jax.pipe.stages.leader import LeaderBroadcast
from axonn_jax.pipe.stages.rank_worker import RankWorker
from axonn_jax.pipe.timeline.spans import KIND_OF, Recorder
from axonn_jax.pipe.timeline.spans import Kind as SpanKind

_JOIN_S = 5.0


class _Started(NamedTuple):
    tasks: tuple[Task, ...]
    """Tasks that one program computes: one, or two consecutive ones."""
    value: jax.Array | None

    def __str__(self) -> str:
        return f"{''.join(task.kind for task in self.tasks)}{self.tasks[0].stage}.{self.tasks[0].microbatch}"


class _Probe(NamedTuple):
    """Program in a device's queue."""

    at: float
    """Start time."""
    done: jax.Array
    """Array that is ready when the program has run."""
    ran: Callable[[float, float], None]
    """Callback (begin, end), called on the rank's thread."""


class Executor:
    """Executor of steps on the ranks of this process: one, or all of them in a run of one process.

    The host loop never waits for a device value. One thread per rank does (asleep, not spinning) and posts an event
    when a program has run. The loop then sends the result, informs the dispatcher and starts the next task.
    """

    def __init__(
        self,
        ranks: Mapping[int, RankWorker],
        pipe_shape: PipelineShape,
        channel: Channel,
        status: RankStatus,
        recorder: Recorder,
        leader: LeaderBroadcast | None = None,
    ):
        self._ranks, self._pipe_shape, self._channel = ranks, pipe_shape, channel
        self._status, self._recorder, self._leader = status, recorder, leader
        self._on_host = computes_on_cores(jax.default_backend())
        # On accelerators, starting a program takes a noticeable part of its run time: keep a second one queued.
        self._depth = 1 if self._on_host else 2
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()  # run by the host loop
        self._early: list[tuple[Message, jax.Array]] = []  # for the next step, received before this one ended
        self._probes: dict[int, queue.SimpleQueue[_Probe | None]] = {}
        self._threads: list[threading.Thread] = []
        for pp_rank in ranks:
            self._probes[pp_rank] = queue.SimpleQueue()
            self._threads.append(threading.Thread(target=self._wait, args=(pp_rank,), name=f"axonn-device-{pp_rank}"))
            self._threads[-1].daemon = True
            self._threads[-1].start()
        # Runs even if nobody calls `close`: a thread still inside jax at interpreter exit would abort the process.
        self._end_threads = weakref.finalize(self, _end, list(self._probes.values()), self._threads)
        channel.start(partial(self._post, self._arrived), self._broke)

    def close(self) -> None:
        """Stop the threads and close the channel."""
        self._end_threads()
        self._channel.close()

    def then(self, pp_rank: int, done: jax.Array, name: str, kind: SpanKind, step: int, at: float) -> None:
        """Record the span of a program that is not a task.

        Args:
            pp_rank: Rank whose device runs it.
            done: Array that is ready when the program has run; must not be donated.
            name: Name of the span.
            kind: Kind of the span.
            step: Step it belongs to.
            at: Start time, of `time.monotonic`.
        """

        def record(begin: float, end: float) -> None:
            self._recorder.add(pp_rank, name, kind, begin, end, step)

        self._probes[pp_rank].put(_Probe(at, done, record))

    def run(self, dispatchers: Mapping[int, OrderedDispatcher], step: int, *, train: bool = True) -> None:
        """Run this process's tasks of a step, or of an evaluation after it, and return once all have run.

        Raises:
            BaseException: The exception of a failed program or channel.
        """
        self._status.step = step
        self._status.now("in a step")
        self._dispatchers = dispatchers
        running: dict[int, deque[_Started]] = {pp_rank: deque() for pp_rank in self._ranks}

        def ran(pp_rank: int, begin: float, end: float) -> None:
            started = running[pp_rank].popleft()
            if train:
                kind = KIND_OF[tuple(task.kind for task in started.tasks)]
                self._recorder.add(pp_rank, str(started), kind, begin, end, step)
            for task in started.tasks:
                message = sends(task, self._pipe_shape)
                if message is not None:
                    assert started.value is not None
                    self._channel.send(message, started.value)
                dispatchers[pp_rank].finished(task)
            self._status.finished = str(started)

        def order(task: Task) -> None:
            dispatchers[self._pipe_shape.rank_of(task.stage)].append(task)

        pending: dict[int, Task] = {}  # by pipe rank, a forward that waits to start together with its backward
        early, self._early = self._early, []
        for message, value in early:
            self._arrived(message, value)
        leader = self._leader if train else None
        if leader is not None and not leader.leads:
            leader.follow(step, partial(self._post, order), self._broke)
        while True:
            active = fresh = False
            for pp_rank, rank in self._ranks.items():
                while len(running[pp_rank]) < self._depth and (task := dispatchers[pp_rank].next()) is not None:
                    if leader is not None and leader.leads:
                        leader.send(task, step)
                    if train and rank.joins(task):
                        pending[pp_rank] = task
                        continue
                    tasks = (pending.pop(pp_rank), task) if pp_rank in pending else (task,)
                    at = time.monotonic()
                    result = rank.start(*tasks, train=train)
                    running[pp_rank].append(_Started(tasks, result.value))
                    self._probes[pp_rank].put(_Probe(at, result.done, partial(self._post, ran, pp_rank)))
                    fresh = True
                active = active or bool(running[pp_rank])
            if not active and all(dispatcher.done for dispatcher in dispatchers.values()):
                if leader is not None:
                    leader.leave()
                return
            if fresh or not active:
                # Polling for messages would take cores from the programs that run on them.
                self._channel.busy(active and self._on_host)
            self._note(running)
            self._events.get()()

    def _arrived(self, message: Message, value: jax.Array) -> None:
        pp_rank = self._pipe_shape.rank_of(message.stage)
        if self._dispatchers[pp_rank].done:
            # The sender is a step ahead: the message belongs to the next step, whose dispatcher does not exist yet.
            self._early.append((message, value))
        else:
            self._ranks[pp_rank].arrived(message, value)
            self._dispatchers[pp_rank].arrived(message)

    def _note(self, running: Mapping[int, Sequence[_Started]]) -> None:
        tasks = [str(queued[0]) for queued in running.values() if queued]
        waiting = () if tasks else (m for d in self._dispatchers.values() for m in d.waiting_for())
        self._status.now(running=", ".join(tasks), waiting=awaited(next(iter(waiting), None), self._pipe_shape))

    def _wait(self, pp_rank: int) -> None:
        last = 0.0
        while (probe := self._probes[pp_rank].get()) is not None:
            try:
                probe.done.block_until_ready()
            except BaseException as error:
                self._broke(error)
                return
            now = time.monotonic()
            # A device runs its programs in sequence: a queued one begins when the previous one ends.
            probe.ran(max(probe.at, last), now)
            last = now

    def _post(self, event: Callable[..., None], *args: Any) -> None:
        """Have the host loop call a function; safe from any thread."""
        self._events.put(partial(event, *args))

    def _broke(self, error: BaseException) -> None:
        """Have the host loop raise another thread's error."""

        def throw() -> None:
            raise error

        self._events.put(throw)


def awaited(message: Message | None, pipe_shape: PipelineShape) -> Awaited | None:
    """Return a message in the words and with the sending rank that the heartbeat reports."""
    if message is None:
        return None
    value = "the activations" if message.direction == "forward" else "the gradient"
    name = f"{value} of microbatch {message.microbatch} from stage {message.sender}"
    return Awaited(name, pipe_shape.rank_of(message.sender))


def _end(queues: Sequence["queue.SimpleQueue[_Probe | None]"], threads: Sequence[threading.Thread]) -> None:
    for probes in queues:
        probes.put(None)
    for thread in threads:
        thread.join(_JOIN_S)
