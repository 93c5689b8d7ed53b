"""Addresses: what a coordinator offers and listens at, and that a run listens where the page says and nowhere else."""

import re
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from launched import OF_OPEN_MPI_5, UNDER_MPIRUN, Launched, command, until, write_config

from axonn_jax.core.distributed.network import exposed, free_port, listen_at, listening, offer, reachable_address
from axonn_jax.core.errors import UserError

GLOO, COORDINATOR = "every rank, by gloo", "first rank, as coordinator"
PAGE = Path(__file__).resolve().parents[3] / "docs/launch.md"


def documented():
    """The table of the page: process to its addresses on one host and on several."""
    section = PAGE.read_text().split("## What listens")[1].split("\n## ")[0]
    rows = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): [set(re.findall(r"`([^`]+)`", cell)) for cell in cells[1:3]] for cells in rows[1:]}


def resolving(monkeypatch, **names):
    def getaddrinfo(name, *_, **__):
        if name not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(None, None, None, "", (address, 0)) for address in names[name].split()]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    monkeypatch.setattr(socket, "gethostname", lambda: "me")


@pytest.mark.parametrize(
    ("addresses", "own"),
    [
        ("10.1.2.3", "10.1.2.3"),
        ("127.0.1.1 10.1.2.3", "10.1.2.3"),
        ("fd00::5 10.1.2.3", "10.1.2.3"),
        ("fe80::1%eth0 fd00::5", "fd00::5"),
        ("127.0.1.1", None),
        ("::1 fe80::1%eth0", None),
    ],
)
def test_a_host_offers_an_address_that_others_can_reach(addresses, own, monkeypatch):
    resolving(monkeypatch, me=addresses)
    if own is None:
        with pytest.raises(UserError, match="hostname = 'me': an address other hosts can reach; it resolves to"):
            reachable_address(2)
    else:
        assert reachable_address(2) == own


def test_a_name_that_does_not_resolve_is_named(monkeypatch):
    resolving(monkeypatch)
    with pytest.raises(UserError, match="hostname = 'me': a name that resolves"):
        reachable_address(2)
    assert offer(1).startswith("127.0.0.1:")


def test_the_coordinator_listens_where_the_others_are_told(monkeypatch):
    resolving(monkeypatch, one="127.0.0.2", many="127.0.0.2 192.0.2.77", **{"::1": "::1", "192.0.2.77": "192.0.2.77"})
    assert listen_at("127.0.0.1:5000", 1) == "127.0.0.1:5000"
    assert listen_at("192.0.2.77:5000", 2) == "[::]:5000"  # none of this host's: behind a translation of addresses
    assert listen_at("one:5000", 2) == "[::]:5000"  # as in many hosts' own /etc/hosts: the others know another address
    assert listen_at("gone:5000", 2) == "[::]:5000"


def test_an_address_of_this_host_is_listened_at():
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe, suppress(OSError):
        probe.connect(("192.0.2.77", 9))  # sends nothing: asks which address would be the sender's
        own = probe.getsockname()[0]
        assert listen_at(f"{own}:5000", 2) == (f"{own}:5000" if exposed({own}) else "[::]:5000")


@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="no Linux")
@pytest.mark.parametrize("address", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_listening_sees_every_kind_of_address(address):
    family = "AF_INET6" if ":" in address else "AF_INET"
    code = f"import socket, time; server = socket.create_server(({address!r}, 0), family=socket.{family}); "
    code += "print(flush=True); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        try:
            process.stdout.readline()
            shown = f"[{address}]" if ":" in address else address
            assert listening(process.pid) == {shown}
            assert exposed({shown}) == ({shown} if address in ("0.0.0.0", "::") else set())
        finally:
            process.kill()
    assert listening(process.pid) == set()


def runs_sockets(run):
    """The addresses that each process of a run listens on, by its name on the page."""
    found = {"`mpirun`": listening(run.mpirun.pid)}
    for rank, pid in run.ranks().items():
        found[f"rank {rank}"] = listening(pid)
    return found


def expected(ranks, stages):
    table, own = documented(), socket.gethostbyname(socket.gethostname())
    each = ranks // stages
    found = {"`mpirun`": set().union(*(cells[0] for name, cells in table.items() if name.startswith("`mpirun`")))}
    for rank in range(ranks):
        kinds = [GLOO] * (each > 1) + [COORDINATOR] * (each > 1 and rank % each == 0)
        cells = set().union(*(table[kind][0] for kind in ["every rank", *kinds]))
        found[f"rank {rank}"] = {own if cell == "ADDRESS" else cell for cell in cells}
    return found


@pytest.mark.mpi
@pytest.mark.skipif(UNDER_MPIRUN[1].args[0], reason="no MPI; scripts/setup installs one")
@OF_OPEN_MPI_5
@pytest.mark.parametrize(
    ("ranks", "axes"),
    [
        (2, {"grid_data": 2}),
        pytest.param(2, {"grid_pipe": 2}, marks=pytest.mark.slow),
        pytest.param(4, {"grid_pipe": 2, "grid_x": 2}, marks=pytest.mark.slow),
    ],
    ids=["data 2", "pipe 2", "pipe 2 x 2"],
)
def test_a_run_listens_where_the_page_says_and_nowhere_else(ranks, axes, prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared, 2)
    wanted = expected(ranks, axes.get("grid_pipe", 1))
    with Launched(command(config, tmp_path / "run", ranks, train_steps=1_000_000, **axes), tmp_path) as run:
        run.wait_for("step 1/")
        until(lambda: runs_sockets(run) == wanted, lambda: (runs_sockets(run), wanted), 10)


def test_a_free_port_is_of_an_address_of_this_host():
    assert 0 < free_port("127.0.0.1") < 65536
    with pytest.raises(OSError, match="assign"):
        free_port("192.0.2.77")
