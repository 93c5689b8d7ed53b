"""The MPI channels between real processes; one start of tests/pipe/mpi/channel_worker.py runs all the checks it can."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from launched import MPIRUN, OF_OPEN_MPI_5, UNDER_MPIRUN, environment

pytestmark = UNDER_MPIRUN
WORKER = Path(__file__).with_name("channel_worker.py")
MPI4JAX = pytest.mark.skipif(find_spec("mpi4jax") is None, reason="no mpi4jax")
CHANNELS = ["mpi4py", pytest.param("mpi4jax", marks=MPI4JAX)]

PLAIN = ["traffic/1", "traffic/4", "burst/1", "burst/2", "unready/1", "steps/2", "mismatch/1", "unclosed/1"]
UNHEARD = ["traffic-unnotified/2", "burst-unnotified/2", "unready-unnotified/2"]
BUFFERS = ["traffic-device/4", "burst-device/2", "steps-device/1"]
LOOKS = {"looks/1": {"idle": 50, "busy": 50}, "looks-unnotified/1": {"idle": 1000, "busy": 250}}
AWAKE = "awake/1"
BOTH_WAYS = [*PLAIN[:-1], *UNHEARD, *LOOKS]
RING = ["burst/1", "withheld/1"]
PIECES = ["traffic/2", "burst/2"]


def at(channel, checks):
    return [f"{channel}/{check}" for check in checks]


# Name: ranks, options of mpirun, the checks that run one after another. What mpi4jax blocks in is a thread of jax's
# pool, of which more devices have more: its checks on one device have a start of their own. Unclosed is last, as the
# interpreter ends then.
STARTS = {
    "mpi4py": (2, (), at("mpi4py", [*BOTH_WAYS, *BUFFERS, AWAKE, PLAIN[-1]])),
    "mpi4jax": (2, (), at("mpi4jax", [check for check in [*BOTH_WAYS, PLAIN[-1]] if check.endswith("/1")])),
    "mpi4jax on devices": (2, (), at("mpi4jax", [check for check in BOTH_WAYS if not check.endswith("/1")])),
    "ring": (3, (), [f"{channel}/{check}" for check in RING for channel in ("mpi4py", "mpi4jax")]),
    # Without a copy straight from the other process, both ends have to go on with a message again and again.
    "in pieces": (2, ("--mca", "smsc", "^cma,knem,xpmem"), at("mpi4py", PIECES)),
}


def start(ranks, options, checks, seconds=300):
    """Its exit status, None where it had to be ended; what each check reported, by rank; and what it said."""
    words = [MPIRUN, *options, "--oversubscribe", "-n", str(ranks), sys.executable, str(WORKER), *checks]
    with subprocess.Popen(words, stdout=-1, stderr=-1, text=True, env=environment()) as process:
        try:
            (out, err), status = process.communicate(timeout=seconds), process.returncode
        except subprocess.TimeoutExpired:
            process.terminate()  # mpirun ends its processes
            (out, err), status = process.communicate(timeout=60), None
    reports = {}
    for line in out.splitlines():
        if line.startswith("{"):
            report = json.loads(line)
            reports.setdefault(report["check"], {})[report["rank"]] = report
    return status, reports, err


@pytest.fixture(scope="module")
def started():
    """Starts what STARTS names, once."""
    done = {}

    def of(name):
        if name not in done:
            done[name] = start(*STARTS[name])
        return done[name]

    return of


def found(name, check, started):
    """What a check found, by rank; fails with its tracebacks, or with what is known where it did not report."""
    status, reports, err = started(name)
    mine = reports.get(check, {})
    failed = [f"rank {rank}:\n{report['error']}" for rank, report in sorted(mine.items()) if "error" in report]
    assert not failed, "\n".join(failed)
    known = f"status {status} (None: ended after its time); reported: {sorted(reports)}\n{err[-3000:]}"
    assert sorted(mine) == list(range(STARTS[name][0])), f"ranks {sorted(mine)} have reported {check}; {known}"
    return [mine[rank]["found"] for rank in sorted(mine)]


def start_of(check):
    """The first start of two ranks that a check is in."""
    return next(
        name for name, (ranks, options, checks) in STARTS.items() if check in checks and (ranks, options) == (2, ())
    )


# The first check of a start waits for all of them.
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("check", PLAIN)
def test_two_ranks(check, channel, started):
    (name,) = at(channel, [check])
    found(start_of(name), name, started)


@pytest.mark.parametrize("name", [pytest.param(name, marks=[MPI4JAX] * ("mpi4jax" in name)) for name in STARTS])
def test_every_process_ends_well(name, started):
    status, _, err = started(name)
    assert status == 0, err[-3000:]


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("check", RING)
def test_three_ranks(check, channel, started):
    found("ring", f"{channel}/{check}", started)


def test_what_is_ready_leaves_from_send(started):
    found("mpi4py", f"mpi4py/{AWAKE}", started)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("check", UNHEARD)
def test_ranks_that_do_not_hear_each_other_look(check, channel, started):
    (name,) = at(channel, [check])
    found(start_of(name), name, started)


@pytest.mark.parametrize("check", PIECES)
def test_messages_in_many_pieces(check, started):
    found("in pieces", f"mpi4py/{check}", started)


@pytest.mark.parametrize("check", BUFFERS)
def test_messages_between_buffers_of_the_devices(check, started):
    found("mpi4py", f"mpi4py/{check}", started)


@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("check", LOOKS)
def test_waiting_is_a_look_now_and_then(channel, check, started):
    """Every 20 ms where peers ring, else every 1 and every 4 ms at most; scripts/bench/channels has what it costs."""
    (name,) = at(channel, [check])
    for rates in found(start_of(name), name, started):
        for state, rate in rates.items():
            assert 0 < rate <= 1.05 * LOOKS[check][state], (state, rates)


@MPI4JAX
def test_mpi4jax_is_refused_where_it_could_not_receive_while_it_sends(monkeypatch):
    monkeypatch.setenv("NPROC", "1")
    _, reports, err = start(2, (), ["mpi4jax/traffic/1"])
    errors = [report["error"] for report in reports["mpi4jax/traffic/1"].values()]
    assert len(errors) == 2, err[-3000:]
    assert all("pipeline.channel = 'mpi4jax': mpi4py where jax's CPU pool has one thread" in error for error in errors)


@OF_OPEN_MPI_5
@pytest.mark.alone
@pytest.mark.parametrize("channel", CHANNELS)
@pytest.mark.parametrize("scenario", ["killed", "stopped"])
def test_a_dead_peer_ends_flush_and_close_in_time(scenario, channel):
    # Otherwise mpirun ends the survivor before it can tell.
    check = f"{channel}/{scenario}/1"
    _, reports, err = start(2, ("--runtime-options", "continuous"), [check])
    assert reports[check].keys() == {0}, err[-3000:]
    told = reports[check][0]["found"]
    assert "forward message for stage 3, microbatch 0" in told["told"]
    assert told["flush_s"] < 2
    assert told["close_s"] < 2
    assert told["clean"] is False
