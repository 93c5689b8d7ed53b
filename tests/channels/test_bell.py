"""A bell ends a thread's sleep, from this process and from others of its host."""

import socket
import subprocess
import sys
import threading
import time

import pytest

from axonn_jax.channels.base import Ports
from axonn_jax.channels.bell import Bell, exchange, from_all_neighbours

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="bells of other processes are for Linux")


def test_nobody_rings():
    began = time.monotonic()
    assert Bell().wait(0.05) is None
    assert time.monotonic() - began >= 0.05


def test_a_ring_before_the_sleep_ends_it():
    bell = Bell()
    bell.set()
    bell.set()
    assert bell.wait(60) == "own"
    assert bell.wait(0.0) is None  # both were heard at once


def test_where_other_processes_cannot_ring(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    bell = Bell()
    assert bell.address is None
    threading.Timer(0.05, bell.set).start()
    assert bell.wait(60) == "own"
    assert bell.wait(0.0) is None


def forbidden(*_, **__):
    raise PermissionError(1, "Operation not permitted")


@pytest.mark.parametrize("what", ["socket", "socketpair", "both"])
def test_in_a_sandbox_without_sockets_threads_still_ring(what, monkeypatch):
    for name in ("socket", "socketpair") if what == "both" else (what,):
        monkeypatch.setattr(socket, name, forbidden)
    bell = Bell()
    threading.Timer(0.05, bell.set).start()
    assert bell.wait(60) == "own"
    assert bell.wait(0.0) is None
    if what != "socketpair":
        assert bell.address is None
        assert not bell.ring(b"\0axonn_jax-of-another-process")


def test_so_many_rings_that_the_queue_is_full_do_not_wait():
    bell = Bell()
    for _ in range(100_000):
        bell.set()
    while bell.wait(0.0) == "own":
        pass
    assert bell.wait(0.0) is None


@LINUX
def test_a_peer_is_told_from_this_process():
    bell, other = Bell(), Bell()
    threading.Timer(0.05, other.ring, [bell.address]).start()
    assert bell.wait(60) == "peer"
    bell.set()
    assert other.ring(bell.address)
    assert bell.wait(60) == "peer"


@LINUX
def test_another_process_rings():
    bell = Bell()
    code = f"from axonn_jax.channels.bell import Bell; assert Bell().ring({bell.address!r})"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert bell.wait(0.0) == "peer"


@LINUX
def test_rings_that_nobody_hears_neither_wait_nor_fail():
    bell, other = Bell(), Bell()
    assert all(other.ring(bell.address) for _ in range(1000))
    assert bell.wait(60) == "peer"
    assert bell.wait(0.0) is None


@LINUX
def test_a_bell_that_is_gone():
    gone = Bell()
    address = gone.address
    del gone
    assert not Bell().ring(address)


class Ranks:
    """What a communicator of four would gather, seen from rank 0."""

    def __init__(self, *gathered):
        self.gathered = list(gathered)

    def allgather(self, own):
        return [own, *self.gathered.pop(0)]

    def Get_rank(self):
        return 0


@LINUX
def test_only_those_count_that_hear_each_other():
    own, near, deaf = Bell(), Bell(), Bell()
    # Rank 1 is near; 2 is on another host, under whose name nobody listens here; 3 does not reach rank 0.
    ranks = Ranks([near.address, b"\0axonn_jax-elsewhere", deaf.address], [{0, 1}, {2}, {3}])
    assert exchange(ranks, own) == {0: own.address, 1: near.address}
    assert exchange(Ranks([None], [set()]), own) == {0: own.address}


@pytest.mark.parametrize(
    ("stages", "ringing", "enough"),
    [((0,), {1}, True), ((1,), {0}, False), ((1,), {0, 2}, True), ((2,), {1}, False), ((3,), {2}, True)],
)
def test_who_has_to_ring_are_the_ranks_beside(stages, ringing, enough):
    ports = Ports(dict.fromkeys(stages), 4)
    assert from_all_neighbours(dict.fromkeys(ringing, b""), ports, lambda stage: stage) is enough


def test_stages_in_turn_on_two_ranks_have_the_other_beside():
    ports = Ports(dict.fromkeys((0, 2)), 4)
    assert from_all_neighbours({1: b""}, ports, lambda stage: stage % 2)
    assert not from_all_neighbours({0: b""}, ports, lambda stage: stage % 2)
