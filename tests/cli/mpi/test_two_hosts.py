"""Two network namespaces as two hosts, joined by a slow link: the same curves, and an end in time when it is cut.

`ip netns exec NAME` shows /etc/netns/NAME in place of /etc, so the names of the hosts need no change of /etc/hosts.
"""

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from launched import AXONN, MPIRUN, OF_OPEN_MPI_5, UNDER_MPIRUN, Launched, command, complete, curves, succeeded

from axonn_jax.core.distributed.network import listening

PAGE = Path(__file__).resolve().parents[3] / "docs/launch.md"
TOLERANCE = 2e-6  # as in test_curves
STALL_S, CUT_S = 10, 25
LONG = {"train_steps": 100_000, "checkpoint_every": 0}
HOSTS = Path("/etc/hosts")
NETNS = Path("/etc/netns")
FORWARDED = ("PATH", "JAX_PLATFORMS", "JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
             "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "AXONN_TEST_RUN")  # fmt: skip


def ip(*words, check=True):
    return subprocess.run(["ip", *words], check=check, capture_output=True, text=True, timeout=20)


def why_not():
    """Why two hosts cannot be made here; an empty string where they can."""
    missing = [tool for tool in ("ip", "tc", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"two hosts need {', '.join(missing)} (Debian: iproute2, util-linux)"
    if os.geteuid() != 0:
        return "two hosts need root, for network namespaces"
    probe = f"axonn-probe-{os.getpid()}"
    made = ip("netns", "add", probe, check=False)
    if made.returncode:
        return f"two hosts need network namespaces: {made.stderr.strip()}"
    ip("netns", "del", probe)
    return ""


pytestmark = [*UNDER_MPIRUN, OF_OPEN_MPI_5]


class Hosts:
    """Two namespaces, their link, and mpirun across them."""

    def __init__(self, folder):
        self.names = [f"axonn-{os.getpid()}-{number}" for number in (1, 2)]
        self.ends = [f"axn{os.getpid() % 10**7}{end}" for end in "ab"]  # at most 15 characters
        self.addresses = ["10.213.7.1", "10.213.7.2"]
        self._made_netns = not NETNS.exists()
        self.agent = folder / "agent"
        """What mpirun starts in place of ssh."""

    def make(self):
        lines = [f"{address} {name}\n" for address, name in zip(self.addresses, self.names, strict=True)]
        for name in self.names:
            (NETNS / name).mkdir(parents=True)
            (NETNS / name / "hosts").write_text("127.0.0.1 localhost\n" + "".join(lines))
            ip("netns", "add", name)
        ip("link", "add", self.ends[0], "type", "veth", "peer", "name", self.ends[1])
        for name, end, address in zip(self.names, self.ends, self.addresses, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "address", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", end, "up")
            limit = ["rate", "1gbit", "burst", "256kb", "latency", "100ms"]
            subprocess.run(["tc", "-n", name, "qdisc", "add", "dev", end, "root", "tbf", *limit], check=True)
        self.agent.write_text(
            '#!/bin/bash\nhost=$1; shift\nexec ip netns exec "$host" unshare --uts bash -c "hostname $host; $*"\n'
        )
        self.agent.chmod(0o755)

    def remove(self):
        for name, end in zip(self.names, self.ends, strict=True):
            ip("link", "del", end, check=False)  # where it has not been moved yet
            ip("netns", "del", name, check=False)
            shutil.rmtree(NETNS / name, ignore_errors=True)
        if self._made_netns:
            with suppress(OSError):
                NETNS.rmdir()

    def link(self, state):
        ip("-n", self.names[0], "link", "set", self.ends[0], state)

    def mpirun(self, ranks, words):
        """`mpirun` on the first host, as many ranks on each."""
        slots = ",".join(f"{name}:{ranks // 2}" for name in self.names)
        kept = [word for name in FORWARDED if name in os.environ or name.startswith("AXONN") for word in ("-x", name)]
        inside = [MPIRUN, "--prtemca", "plm_ssh_agent", str(self.agent), "--host", slots, "-n", str(ranks),
                  "--map-by", "slot", "--bind-to", "none", *kept, *words]  # fmt: skip
        return self.on(self.names[0], inside)

    def on(self, name, words):
        """The words that run a command on a host."""
        start = f"hostname {name}; exec {shlex.join(words)}"
        return ["ip", "netns", "exec", name, "unshare", "--uts", "bash", "-c", start]


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    if reason := why_not():
        pytest.skip(reason)
    before = HOSTS.read_bytes()
    made = Hosts(tmp_path_factory.mktemp("hosts"))
    try:
        made.make()
        yield made
    finally:
        made.remove()
    assert HOSTS.read_bytes() == before
    assert not set(made.names) & set(ip("netns", "list").stdout.split())
    assert not [end for end in made.ends if Path("/sys/class/net", end).exists()]


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (4, {"grid_pipe": 2, "grid_x": 2}),
        pytest.param(2, {"grid_pipe": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"grid_data": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"grid_pipe": 2, "grid_data": 2, "pipeline_channel": "mpi4jax"}, marks=pytest.mark.slow),
        pytest.param(4, {"grid_pipe": 4}, marks=pytest.mark.slow),
        pytest.param(4, {"grid_data": 2, "grid_x": 2}, marks=pytest.mark.slow),
    ],
    ids=["pipe 2 x 2", "pipe 2", "data 2", "pipe 2 data 2 mpi4jax", "pipe 4", "data 2 x 2"],
)
def test_the_curve_across_two_hosts_is_that_of_one_process(ranks, axes, hosts, config, one_process, tmp_path):
    options = {"checkpoint_every": 0, **axes}
    done = succeeded(hosts.mpirun(ranks, command(config, tmp_path / "run", **options)))
    (losses, _, held_out), want = curves(tmp_path / "run"), curves(one_process("gpt"))
    np.testing.assert_allclose(losses, want[0], rtol=TOLERANCE)
    np.testing.assert_allclose(held_out, want[2], rtol=TOLERANCE)
    assert f"{ranks} processes on 2 hosts, by MPI" in done.stderr


def of_the_page(own, *processes):
    """The addresses that the documentation gives processes of several hosts."""
    section = PAGE.read_text().split("## What listens")[1].split("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    cells = {row[0]: row[2].replace("ADDRESS", own) for row in rows}
    return {address for process in processes for address in re.findall(r"`([^`]+)`", cells[process])}


@pytest.mark.slow
def test_two_hosts_listen_where_the_page_says_and_nowhere_else(hosts, config, tmp_path):
    """A coordinator and gloo listen at the hosts' own addresses; `ss` sees what /proc tells."""
    with Launched(
        hosts.mpirun(2, command(config, tmp_path / "run", grid_data=2, train_steps=100_000, checkpoint_every=0)),
        tmp_path,
    ) as run:
        run.wait_for("step 1/")
        time.sleep(2)
        ranks = run.ranks()
        daemon = int(Path(f"/proc/{ranks[1]}/stat").read_text().rsplit(")", 1)[1].split()[1])
        first, second = hosts.addresses
        pages = {
            run.mpirun.pid: of_the_page(first, "`mpirun`", "`mpirun`, for its daemons"),
            daemon: of_the_page(second, "`prted` on every other host"),
            ranks[0]: of_the_page(first, "every rank", "every rank, by gloo", "first rank, as coordinator"),
            ranks[1]: of_the_page(second, "every rank", "every rank, by gloo"),
        }
        assert {pid: listening(pid) for pid in pages} == pages
        seen = {pid: set() for pid in pages}
        for name in hosts.names if shutil.which("ss") else ():
            for line in ip("netns", "exec", name, "ss", "-ltnpH").stdout.splitlines():
                local = line.split()[3].rpartition(":")[0]
                for pid in map(int, re.findall(r"pid=(\d+)", line)):
                    seen.setdefault(pid, set()).add(re.sub(r"\[::ffff:(.*)\]", r"\1", local.replace("*", "[::]")))
        assert seen == pages or not shutil.which("ss")


@pytest.mark.slow
def test_the_lines_of_the_page_train_on_both_hosts_and_save_at_sigterm(hosts, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(PAGE.parents[1] / "examples")
    Path("runs").mkdir()
    Path("runs/text").symlink_to(prepared)
    shown = PAGE.read_text().split("## Hosts without Slurm")[1].split("```")[1].removeprefix("sh\n")
    for number, name in enumerate(hosts.names, 1):
        shown = shown.replace(f"node{number}", name)
    hostfile, train = shown.splitlines()
    subprocess.run(["bash", "-c", hostfile], check=True)
    short = "--train.steps 100000 --train.eval_every 0 --checkpoint.every 0 --model.layers 2 --model.hidden 32"
    words = [*AXONN, *shlex.split(train)[1:], *short.split()]
    with Launched(hosts.on(hosts.names[0], ["env", f"PRTE_MCA_plm_ssh_agent={hosts.agent}", *words]), tmp_path) as run:
        run.wait_for("step 1/")
        assert "4 processes on 2 hosts, by MPI" in run.stderr
        run.mpirun.send_signal(signal.SIGTERM)
        assert run.mpirun.wait(60) == 128 + signal.SIGTERM, run.stderr
        assert complete(Path("runs/hosts")) > 0


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (2, {"grid_pipe": 2}),
        pytest.param(4, {"grid_pipe": 2, "grid_x": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"grid_pipe": 4}, marks=pytest.mark.slow),
    ],
    ids=["pipe 2", "pipe 2 x 2", "pipe 4"],
)
def test_a_cut_link_ends_every_rank_on_both_hosts(ranks, axes, hosts, config, tmp_path, capsys):
    long = {
        **axes,
        "checkpoint_every": 0,
        "train_steps": 100_000,
        "train_eval_every": 50,
        "pipeline_stall_timeout": STALL_S,
    }
    try:
        with Launched(hosts.mpirun(ranks, command(config, tmp_path / "run", **long)), tmp_path) as run:
            run.wait_for("step 1/")
            time.sleep(1)
            assert len(run.ranks()) == ranks
            hosts.link("down")
            # mpirun itself waits, for the daemon of the host that it can no longer tell to end.
            took = run.wait_until_gone(CUT_S, mpirun=False)
            silent = rf"nothing heard of rank \d \(place \d of the pipe, host {hosts.names[1]}\) for \d+ s"
            run.wait_for_error(silent)
            assert run.mpirun.poll() != 0
            with capsys.disabled():
                print(f"\n{axes}: link cut: all ranks gone in {took:.2f} s", file=sys.stderr)
    finally:
        hosts.link("up")
