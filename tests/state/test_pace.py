"""Saving at a pace: bursts and rests, lots of bytes, and that nobody who waits waits for rests."""

import asyncio
import threading
import time

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import GridShape
from axonn_jax.state import pace, part
from axonn_jax.state.agree import Alone
from axonn_jax.state.checkpoint import load, newest
from axonn_jax.state.pace import Lots, Pace
from axonn_jax.state.saver import Saver


def arrays(count, elements):
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    return {f"params.{i}": jax.device_put(jnp.full(elements, i, jnp.float32), one) for i in range(count)}


def waited(work):
    began = time.monotonic()
    work()
    return time.monotonic() - began


def test_rests_are_in_proportion_to_the_work():
    now = Pace()
    assert waited(lambda: now.rest(10.0)) < 5  # until a share is set it has all of the time
    now.begin(0.1)
    assert waited(lambda: now.rest(0.02)) >= 0.18
    now.begin(1.0)
    assert waited(lambda: now.rest(10.0)) < 5


def test_who_waits_ends_the_rest_and_all_later_ones():
    now = Pace()
    now.begin(0.01)
    threading.Timer(0.1, now.hurry).start()
    assert waited(lambda: now.rest(10.0)) < 10
    assert waited(lambda: now.rest(10.0)) < 10
    now.begin(0.5)
    assert waited(lambda: now.rest(0.05)) >= 0.05


def test_a_save_does_not_rest_for_ever(monkeypatch):
    monkeypatch.setattr(pace, "_LONGEST_S", 0.1)
    now = Pace()
    now.begin(0.001)
    assert waited(lambda: now.rest(10.0)) < 10
    assert waited(lambda: now.rest(10.0)) < 10


class Rests(Pace):
    """Counts rests instead of resting."""

    def __init__(self):
        super().__init__()
        self.rests = 0

    def rest(self, worked):
        assert worked >= 0
        self.rests += 1


@pytest.mark.parametrize("sizes", [[3] * 10, [30, 1, 1, 30, 9, 9], [10, 1, 10, 1], list(range(1, 12)), [7]])
def test_no_more_than_a_lot_is_written_at_a_time(sizes):
    now = Rests()
    lots, writing, most, done = Lots(10, now), 0, 0, []

    async def write(number, size):
        nonlocal writing, most
        await lots.wait_for_bytes(size)
        writing += size
        if writing > size:
            most = max(most, writing)
        await asyncio.sleep(0.001 * (number % 3))
        writing -= size
        done.append(size)
        await lots.release_bytes(size)

    async def everything():
        await asyncio.gather(*(write(number, size) for number, size in enumerate(sizes)))

    asyncio.run(everything())
    assert sorted(done) == sorted(sizes)
    assert most <= 10
    assert sum(sizes) / (10 + max(sizes)) <= now.rests <= len(sizes)


def saved(folder, said):
    return Saver(folder, grids.lay(GridShape()), Alone(), warn=said.append)


def test_a_save_left_alone_rests_and_one_that_is_waited_for_does_not(tmp_path, monkeypatch):
    monkeypatch.setattr(part, "_PACED_LOT", 100_000)
    monkeypatch.setattr(part, "SHARE", 1e-5)  # a millisecond of work, then more than a minute of rest
    state, said = arrays(12, 10_000), []
    made = saved(tmp_path, said)
    made.save(2, dict(state), {})
    time.sleep(1)
    assert made.busy
    assert waited(made.settle) < 30
    assert said == []
    made.close()
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    wanted = {name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=one) for name, value in state.items()}
    loaded = load(newest(tmp_path, Alone(), pytest.fail), wanted)
    for name, value in state.items():
        np.testing.assert_array_equal(loaded[name], value)


class Watch:
    """Notes how it is used, in the place of what looks after the growth of the process."""

    def __init__(self, margin):
        self.margin, self.closed = margin, False

    def close(self):
        self.closed = True


def test_the_growth_of_the_process_is_watched_until_a_save_is_written(tmp_path, monkeypatch):
    watches, said = [], []
    monkeypatch.setattr(part, "Growth", lambda margin: watches.append(Watch(margin)) or watches[-1])
    monkeypatch.setattr(part, "WORTH_IT", 100_000)
    made = saved(tmp_path, said)
    made.save(2, arrays(4, 10_000), {})
    (watch,) = watches
    assert watch.margin == 8_000
    assert made.settle() == ""
    assert watch.closed
    made.save(4, arrays(4, 1_000), {})  # too little to look after
    assert made.settle() == ""
    assert len(watches) == 1
    made.close()


@pytest.mark.slow
def test_an_array_may_be_larger_than_what_is_written_or_read_at_a_time(tmp_path):
    state, said = arrays(2, 260_000_000), []
    wanted = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for name, value in state.items()
    }
    made = saved(tmp_path, said)
    made.save(2, dict(state), {})
    assert made.settle() == ""
    made.close()
    del state
    loaded = load(newest(tmp_path, Alone(), pytest.fail), wanted)
    assert [float(loaded[f"params.{i}"].mean()) for i in range(2)] == [0.0, 1.0]
