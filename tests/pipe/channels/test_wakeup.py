"""A wakeup ends a thread's sleep, from this process and from others of its host."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from axonn_jax.pipe.channels.base import Ports
from axonn_jax.pipe.channels.wakeup import Wakeup

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="notices of other processes are for Linux")


def test_nobody_notifies():
    began = time.monotonic()
    assert Wakeup().wait(0.05) is None
    assert time.monotonic() - began >= 0.05


def test_a_notice_before_the_sleep_ends_it():
    wakeup = Wakeup()
    wakeup.wake()
    wakeup.wake()
    assert wakeup.wait(60) == "own"
    assert wakeup.wait(0.0) is None  # both were heard at once


def forbidden(*_, **__):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("missing", [["socket"], ["socketpair"], ["socket", "socketpair"], []], ids=str)
def test_where_other_processes_cannot_notify_threads_still_wake_each_other(missing, monkeypatch):
    """In a sandbox without sockets, or on another system than Linux."""
    monkeypatch.setattr(sys, "platform", sys.platform if missing else "darwin")
    for name in missing:
        monkeypatch.setattr(socket, name, forbidden)
    wakeup = Wakeup()
    threading.Timer(0.05, wakeup.wake).start()
    assert wakeup.wait(60) == "own"
    assert wakeup.wait(0.0) is None
    if missing != ["socketpair"]:
        assert wakeup.address is None
        assert not wakeup.send(b"\0axonn_jax-of-another-process")


def test_so_many_notices_that_the_queue_is_full_do_not_wait():
    wakeup = Wakeup()
    for _ in range(100_000):
        wakeup.wake()
    while wakeup.wait(0.0) == "own":
        pass
    assert wakeup.wait(0.0) is None


@LINUX
def test_a_peer_is_told_from_this_process():
    wakeup, other = Wakeup(), Wakeup()
    threading.Timer(0.05, other.send, [wakeup.address]).start()
    assert wakeup.wait(60) == "peer"
    wakeup.wake()
    assert other.send(wakeup.address)
    assert wakeup.wait(60) == "peer"


@LINUX
def test_another_process_notifies():
    wakeup = Wakeup()
    code = f"from axonn_jax.pipe.channels.wakeup import Wakeup; assert Wakeup().send({wakeup.address!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert wakeup.wait(0.0) == "peer"


@LINUX
def test_notices_that_nobody_reads_neither_wait_nor_fail():
    wakeup, other = Wakeup(), Wakeup()
    assert all(other.send(wakeup.address) for _ in range(1000))
    assert wakeup.wait(60) == "peer"
    assert wakeup.wait(0.0) is None


@LINUX
def test_a_process_that_is_gone():
    gone = Wakeup()
    address = gone.address
    del gone
    assert not Wakeup().send(address)


class Ranks:
    """What a communicator would gather of the others, seen from one of its ranks."""

    def __init__(self, *gathered, rank=0, size=4):
        self.gathered, self.rank, self.size = list(gathered), rank, size

    def allgather(self, own):
        others = list(self.gathered.pop(0))
        return [*others[: self.rank], own, *others[self.rank :]]

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size


@LINUX
def test_only_those_count_that_hear_each_other():
    own, near, deaf = Wakeup(), Wakeup(), Wakeup()
    # Rank 1 is near; 2 is on another host, under whose name nobody listens here; 3 does not reach rank 0.
    ranks = Ranks([near.address, b"\0axonn_jax-elsewhere", deaf.address], [{0, 1}, {2}, {3}])
    own.connect(ranks, Ports({}, 4))
    assert own.peers == {0: own.address, 1: near.address}
    own.connect(Ranks([None], [set()]), Ports({}, 4))
    assert own.peers == {0: own.address}


@LINUX
@pytest.mark.parametrize(
    ("stages", "near", "notified"),
    [((0,), {1}, True), ((1,), {0}, False), ((1,), {0, 2}, True), ((2,), {1}, False), ((3,), {2}, True)],
)
def test_who_has_to_notify_are_the_neighbouring_ranks(stages, near, notified):
    assert connected(stages, near).notified is notified


@LINUX
def test_stages_in_turn_on_two_ranks_have_the_other_as_neighbour():
    assert connected((0, 2), {1}, size=2).notified
    assert not connected((0, 2), set(), size=2).notified


def connected(stages, near, size=4):
    """The wakeup of the rank that holds `stages` and shares its host with the ranks `near`."""
    rank = stages[0] % size
    others = [other for other in range(size) if other != rank]
    wakeup, peers = Wakeup(), [Wakeup() for _ in others]
    mutual = [{rank} if other in near else set() for other in others]
    wakeup.connect(
        Ranks([peer.address for peer in peers], mutual, rank=rank, size=size), Ports(dict.fromkeys(stages), 4)
    )
    return wakeup


def test_sleeps_stay_a_small_share_of_the_wait():
    now = [0.0]
    wakeup = Wakeup(lambda: now[0])
    seen = []
    for waited in (0.0, 0.02, 0.2, 5.0):
        seen.append([])
        for computing, transferring in ((False, False), (True, False), (True, True)):
            wakeup.computing(computing)
            now[0] = waited
            seen[-1].append(wakeup.seconds(transferring=transferring))
    assert seen == [[50e-6, 4e-3, 50e-6], [200e-6, 4e-3, 1e-3], [1e-3, 12.5e-3, 1e-3], [1e-3, 16e-3, 1e-3]]
    wakeup.progressed()
    wakeup.computing(False)
    assert wakeup.seconds(transferring=False) == 50e-6
    wakeup.notified = True  # only a transfer is looked after
    for computing in (False, True):
        wakeup.computing(computing)
        assert wakeup.seconds(transferring=False) == 20e-3
        assert wakeup.seconds(transferring=True) == 50e-6
