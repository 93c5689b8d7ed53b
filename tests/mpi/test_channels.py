"""The MPI channels between two real processes; tests/mpi/channel_worker.py is what each of them runs."""

import json
import re
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import MPIRUN, OF_OPEN_MPI_5, UNDER_MPIRUN, finished

pytestmark = UNDER_MPIRUN
WORKER = Path(__file__).with_name("channel_worker.py")
CHANNELS = [
    "mpi4py",
    pytest.param("mpi4jax", marks=pytest.mark.skipif(find_spec("mpi4jax") is None, reason="no mpi4jax")),
]


def ranks(scenario, channel, devices=1, flags=(), count=2):
    command = [MPIRUN, *flags, "--oversubscribe", "-n", str(count), sys.executable, str(WORKER), scenario, channel]
    return finished([*command, str(devices)], timeout=120)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("scenario", "devices"),
    [
        ("traffic", 1),
        ("traffic", 4),
        ("burst", 1),
        ("burst", 2),
        ("unready", 1),
        ("steps", 2),
        ("mismatch", 1),
        ("unclosed", 1),
    ],
)
def test_two_ranks(scenario, devices, channel):
    done = ranks(scenario, channel, devices)
    assert done.returncode == 0, done.stderr[-3000:]
    assert sorted(re.findall(r"rank \d done", done.stdout)) == ["rank 0 done", "rank 1 done"]


@pytest.mark.parametrize("channel", CHANNELS)
def test_a_ring_of_three_ranks(channel):
    done = ranks("burst", channel, count=3)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 3


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("scenario", ["traffic-unnotified", "burst-unnotified", "unready-unnotified"])
def test_ranks_that_do_not_hear_each_other_look(scenario, channel):
    done = ranks(scenario, channel, 2)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2


@pytest.mark.parametrize("scenario", ["traffic", "burst"])
def test_messages_in_many_pieces(scenario):
    # Without a copy straight from the other process, both ends have to go on with a message again and again.
    done = ranks(scenario, "mpi4py", 2, flags=("--mca", "smsc", "^cma,knem,xpmem"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2


@pytest.mark.parametrize(("scenario", "devices"), [("traffic-device", 4), ("burst-device", 2), ("steps-device", 1)])
def test_messages_between_buffers_of_the_devices(scenario, devices):
    done = ranks(scenario, "mpi4py", devices)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("done") == 2


@pytest.mark.skipif(find_spec("mpi4jax") is None, reason="no mpi4jax")
def test_mpi4jax_is_refused_where_it_could_not_receive_while_it_sends(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    done = ranks("traffic", "mpi4jax")
    assert done.returncode != 0
    assert "pipeline.channel = 'mpi4jax': mpi4py in processes of one CPU core" in done.stderr


@OF_OPEN_MPI_5
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("scenario", ["killed", "stopped"])
def test_a_dead_peer_ends_flush_and_close_in_time(scenario, channel):
    # Otherwise mpirun ends the survivor before it can tell.
    done = ranks(scenario, channel, flags=("--runtime-options", "continuous"))
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(lines) == 1, done.stderr[-3000:]
    told = json.loads(lines[0])
    assert "forward message for stage 3, microbatch 0" in told["told"]
    assert told["flush_s"] < 2
    assert told["close_s"] < 2
    assert told["clean"] is False


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize(
    ("scenario", "most"), [("looks", {"idle": 50, "busy": 50}), ("looks-unnotified", {"idle": 1000, "busy": 250})]
)
def test_waiting_is_a_look_now_and_then(channel, scenario, most):
    """Every 20 ms where peers ring, else every 1 and every 4 ms at most; scripts/bench/channels has what it costs."""
    done = ranks(scenario, channel)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(found) == 2
    threads = {"mpi4py": 1, "mpi4jax": 2}[channel]
    for rates in found:
        for state, rate in rates.items():
            assert 0 < rate <= 1.05 * most[state] * threads, (state, rates)
