"""The heartbeat in virtual time: who is waited for, how long, and what every rank is told of the others."""

import os
import signal
from collections import defaultdict, deque

import pytest
from launched import until

from axonn_jax.core.distributed import gossip
from axonn_jax.core.distributed import heartbeat as heartbeat_module
from axonn_jax.core.distributed.gossip import Awaited, RankStatus
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.grid import Grid, GridShape

TIMEOUT = 10.0
BEAT = 0.5


class Clock:
    """Stands in for the module `time`."""

    now = 1000.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Mail:
    """A message, and the request that it was sent by."""

    def __init__(self, record):
        self.record = bytes(record)

    def Recv(self, into):
        into[:] = self.record

    def Test(self):
        return True


class Comm:
    """One rank's end of messages that arrive at once."""

    def __init__(self, rank, size, boxes):
        self.rank, self.size, self.boxes, self.sent = rank, size, boxes, []

    def allgather(self, _):
        return [(f"host{rank}", os.getpid()) for rank in range(self.size)]

    def Isend(self, record, to):
        self.sent.append(len(record))
        self.boxes[to].append(Mail(record))
        return Mail(record)

    def Improbe(self):
        return self.boxes[self.rank].popleft() if self.boxes[self.rank] else None


class Ended(Exception):
    pass


class Run:
    """Heartbeats of several ranks that beat in turn."""

    def __init__(self, clock, pipe, per_stage=1, *, waiting=()):
        self.clock, size, boxes = clock, pipe * per_stage, defaultdict(deque)
        self.statuses = [RankStatus(since=clock.now) for _ in range(size)]
        self.comms = [Comm(rank, size, boxes) for rank in range(size)]
        self.heartbeats = [
            Heartbeat(status, Grid(GridShape(pipe, per_stage), None, {}, rank, size), TIMEOUT, comm)
            for rank, (status, comm) in enumerate(zip(self.statuses, self.comms, strict=True))
        ]
        for rank in waiting:
            self.statuses[rank].now("in a step", waiting=Awaited("the gradient of microbatch 2 from stage 1", 1 % pipe))
        self.stopped = set()
        self.ended = {}
        """Rank: when, and the line it left."""

    def passes(self, seconds, moving=()):
        """Lets time pass, in which the ranks named move at every beat."""
        until = self.clock.now + seconds
        while self.clock.now < until:
            self.clock.now += BEAT
            for rank, heartbeat in enumerate(self.heartbeats):
                if rank in self.stopped or rank in self.ended:
                    continue
                if rank in moving:
                    self.statuses[rank].now(running="the update of bucket 3")
                try:
                    heartbeat._beat()
                    heartbeat._check(self.clock.now)
                except Ended as end:
                    self.ended[rank] = (self.clock.now, str(end))


@pytest.fixture
def clock(monkeypatch):
    def end(line, status, farewell):
        assert status == 1
        raise Ended(line)

    made = Clock()
    monkeypatch.setattr(heartbeat_module, "time", made)
    monkeypatch.setattr(gossip, "time", made)
    monkeypatch.setattr(heartbeat_module, "_end", end)
    return made


@pytest.mark.parametrize("phase", ["compiling", "saving"])
def test_a_peer_at_something_long_is_waited_for_but_not_for_ever(phase, clock):
    run = Run(clock, pipe=2, waiting=[0])
    run.statuses[1].now(phase)
    began = clock.now
    run.passes(1100)
    assert not run.ended
    run.passes(200)
    at, line = run.ended[1]
    assert at - began == pytest.approx(1200, abs=2 * BEAT)
    assert f"is {phase}" in line
    assert "the longest time without a sign = 1200" in line
    assert "waits for the gradient of microbatch 2 from stage 1" in run.ended[0][1]


def test_who_has_waited_for_a_compilation_waits_as_long_as_ever_for_what_follows(clock):
    run = Run(clock, pipe=2, waiting=[0])
    run.passes(5 * TIMEOUT)
    run.statuses[1].now("in a step", running="F1.0")
    began = clock.now
    run.passes(0.8 * TIMEOUT)
    assert not run.ended
    run.passes(TIMEOUT)
    assert run.ended[0][0] - began == pytest.approx(TIMEOUT, abs=3 * BEAT)


@pytest.mark.parametrize("per_stage", [1, 4])
def test_who_moves_is_waited_for(per_stage, clock):
    """As one that compiles programs of its update, bucket by bucket, while the others wait for its activations."""
    run = Run(clock, pipe=4, per_stage=per_stage, waiting=range(4 * per_stage))
    run.passes(4 * TIMEOUT, moving=[len(run.heartbeats) - 1])
    assert not run.ended
    run.passes(2 * TIMEOUT)
    assert len(run.ended) == len(run.heartbeats)


@pytest.mark.parametrize(("timeout", "allowed"), [(10, 1200), (120, 1200), (600, 6000)])
def test_one_process_alone_may_compile_long_but_not_for_ever(timeout, allowed, clock):
    status = RankStatus(since=clock.now)
    heartbeat = Heartbeat(status, Grid(GridShape(2), None, {}), timeout)
    clock.now += allowed - 1
    heartbeat._check(clock.now)
    status.now()
    clock.now += allowed - 1
    heartbeat._check(clock.now)
    clock.now += 2
    with pytest.raises(Ended, match=r"is compiling.*the longest time without a sign"):
        heartbeat._check(clock.now)


def test_every_rank_is_told_of_one_that_stopped(clock):
    run = Run(clock, pipe=32, per_stage=8, waiting=range(256))
    run.passes(4 * BEAT, moving=range(256))
    began = clock.now
    run.stopped.add(201)
    run.passes(0.8 * TIMEOUT)
    assert all(heartbeat.peer_failed() for rank, heartbeat in enumerate(run.heartbeats) if rank != 201)
    run.passes(TIMEOUT)
    assert run.ended.keys() == set(range(256)) - {201}
    for at, line in run.ended.values():
        assert at - began < TIMEOUT + 4.0
        assert "nothing heard of rank 201 (place 25 of the pipe, host host201) for " in line
    for beside in (193, 209):  # those that exchange activations with it know what it did
        assert "it had finished nothing yet in step 0 and is at the update of bucket 3" in run.ended[beside][1]


@pytest.mark.parametrize("size", [2, 20])
def test_processes_of_one_mesh_end_at_a_silence_and_say_whose(size, clock):
    """Their steps may take longer than any stall, and jax and gloo would end them 30 s behind the silence's begin."""
    run = Run(clock, pipe=1, per_stage=size, waiting=range(size))
    run.passes(8 * TIMEOUT, moving=range(size))
    assert not run.ended
    began, silent = clock.now, size - 1
    run.stopped.add(silent)
    run.passes(heartbeat_module.LOST_S - 1, moving=range(size))
    assert not run.ended
    run.passes(5, moving=range(size))
    assert run.ended.keys() == set(range(size)) - {silent}
    for rank, (at, line) in run.ended.items():
        assert at - began < 25
        assert f"error: run ended: nothing heard of rank {silent} (host host{silent}) for 2" in line
        assert f"; step 0: rank {rank} has finished nothing yet" in line


def test_processes_of_one_mesh_wait_for_one_that_compiles(clock):
    run = Run(clock, pipe=1, per_stage=2)  # which has the longest time, too, as PATIENCE has it
    run.stopped.add(1)
    run.passes(100)
    assert not run.ended


def test_one_that_goes_on_is_no_longer_accused(clock):
    run = Run(clock, pipe=16, waiting=range(16))
    run.passes(2 * BEAT)
    run.stopped.add(9)
    run.passes(0.8 * TIMEOUT, moving=range(16))
    assert any(heartbeat.peer_failed() for heartbeat in run.heartbeats)
    run.stopped.clear()
    run.passes(TIMEOUT, moving=range(16))
    assert not any(heartbeat.peer_failed() for heartbeat in run.heartbeats)


def test_what_a_rank_sends_does_not_grow_with_their_number(clock):
    sent = []
    for pipe, per_stage in ((4, 4), (16, 64)):
        run = Run(clock, pipe, per_stage)
        run.passes(BEAT)
        assert max(len(comm.sent) for comm in run.comms) <= 11
        sent.append({size for comm in run.comms for size in comm.sent})
    assert sent[0] == sent[1]
    assert len(sent[0]) == 1


@pytest.fixture
def handler():
    """A script's handler of SIGTERM, and its own wake-up descriptor; both must be there again at the end."""
    called, (read, write) = [], os.pipe()
    os.set_blocking(write, False)

    def note(number, _):
        called.append(number)

    before, fd_before = signal.signal(signal.SIGTERM, note), signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    yield called, read
    assert signal.set_wakeup_fd(fd_before) == write
    assert signal.signal(signal.SIGTERM, before) is note
    os.close(read)
    os.close(write)


def of_rank_0(comm):
    heartbeat = Heartbeat(RankStatus(), Grid(GridShape(2), None, {}, 0, 2), TIMEOUT, comm)
    heartbeat.start()
    return heartbeat


def test_a_script_keeps_its_handler_and_its_wake_up_descriptor(handler, monkeypatch):
    called, read = handler
    monkeypatch.setattr(heartbeat_module, "_end", lambda *said: called.append(said))
    comm = Comm(0, 2, defaultdict(deque))
    heartbeat = of_rank_0(comm)
    os.kill(os.getpid(), signal.SIGTERM)
    assert os.read(read, 1) == bytes([signal.SIGTERM])
    sent = len(comm.sent)
    until(lambda: len(comm.sent) > sent + 1, lambda: "no beat", 20)  # two beats later it is still there
    heartbeat.close()
    assert called == [signal.SIGTERM]


def test_trainers_that_end_in_the_order_of_their_beginning_end_without_an_error():
    """The second one's previous descriptor is the first one's, which must still be a pipe by then."""
    before = signal.set_wakeup_fd(-1)
    heartbeats = [of_rank_0(Comm(0, 2, defaultdict(deque))) for _ in range(3)]
    for heartbeat in heartbeats:
        heartbeat.close()
    signal.set_wakeup_fd(before)
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="counts files in /proc")
def test_a_watch_leaves_no_files_open():
    heartbeat = Heartbeat(RankStatus(), Grid(GridShape(2), None, {}), TIMEOUT)
    before = set(os.listdir("/proc/self/fd"))
    heartbeat.start()
    heartbeat.close()
    heartbeat.close()
    assert set(os.listdir("/proc/self/fd")) == before


def test_sigterm_without_a_handler_ends_the_process_once_it_has_said_so(monkeypatch, capfd):
    said = []
    monkeypatch.setattr(heartbeat_module, "_end", lambda *end: said.append(end))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    heartbeat = of_rank_0(Comm(0, 2, defaultdict(deque)))
    os.kill(os.getpid(), signal.SIGTERM)
    until(lambda: said, lambda: "no word", 20)
    heartbeat.close()
    assert said[0][:2] == ("", 128 + signal.SIGTERM)
    assert "told to end (SIGTERM); step 0: rank 0 (place 0 of the pipe)" in capfd.readouterr().err
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
