"""Starting for real, in processes of its own: virtual devices, explicit processes, what listens, refusals."""

import json
import os
import re
import socket
import subprocess
import sys

import pytest

REPORT = """
import json, sys
{before}
import axonn_jax as ax
from axonn_jax.errors import UserError
try:
    grid = ax.init({arguments})
except UserError as error:
    sys.exit(f"refused: {{error}}")
import jax
print(json.dumps({{"devices": jax.device_count(), "local": jax.local_device_count(), "mesh": dict(grid.mesh.shape)}}))
{after}
"""


def clean_environment(**changes):
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_", "XLA_FLAGS"))}
    return {**kept, "JAX_PLATFORMS": "cpu", **changes}


def launch(arguments, before="", after="", **environment):
    code = REPORT.format(arguments=arguments, before=before, after=after)
    return subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**environment),
    )


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def test_one_process_makes_as_many_virtual_devices_as_the_grid_needs():
    out, err = launch("data=2, z=1, y=2, x=3").communicate(timeout=120)
    assert json.loads(out) == {"devices": 12, "local": 12, "mesh": {"data": 2, "expert": 1, "z": 1, "y": 2, "x": 3}}
    assert "1 process" in err
    assert "grid pipe 1 x data 2 x z 1 x y 2 x x 3" in err


def test_a_grid_that_is_not_the_device_count_is_refused():
    process = launch("x=4", JAX_NUM_CPU_DEVICES="2")
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    assert re.search(r"refused: grid = .*device count, 2 cpu device\(s\).*this is 4", err)


def test_import_starts_nothing():
    code = (
        "import sys, threading, axonn_jax as ax; print(threading.active_count(), 'jax' in sys.modules, ax.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["1", "False"]


LISTENING = """
import os
def listening():
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    mine = {os.readlink(link) for link in links if os.path.islink(link)}
    found = []
    for table in ("tcp", "tcp6"):
        for line in list(open(f"/proc/net/{table}"))[1:]:
            parts = line.split()
            if parts[3] == "0A" and f"socket:[{parts[9]}]" in mine:
                found.append(parts[1].split(":")[0])
    return found
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
over = NamedSharding(grid.mesh, P("data"))
total = jax.jit(lambda: jnp.sum(jax.lax.with_sharding_constraint(jnp.arange(8.0), over)))()
print(json.dumps({"sum": float(total), "listening": listening()}))
"""

LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.skipif(not os.path.exists("/proc/net/tcp"), reason="reads /proc/net/tcp")
def test_two_explicit_processes_work_together_and_listen_on_loopback_only():
    port = free_port()
    pair = [
        launch(f"data=2, coordinator='127.0.0.1:{port}', num_processes=2, process_id={rank}", after=LISTENING)
        for rank in range(2)
    ]
    results = [process.communicate(timeout=240) for process in pair]
    for (out, err), process in zip(results, pair, strict=True):
        assert process.returncode == 0, err
        first, second = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
        assert first == {"devices": 2, "local": 1, "mesh": {"data": 2, "expert": 1, "z": 1, "y": 1, "x": 1}}
        assert second["sum"] == 28.0
        assert set(second["listening"]) <= LOOPBACK, second
    assert results[0][1].count("axonn_jax:") == 1  # rank 0 says what was chosen
    assert results[1][1].count("axonn_jax:") == 0


HANDLER = """
import os, signal, time
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
"""


def test_joining_processes_leaves_a_script_its_handler_of_sigterm():
    """jax.distributed's service for preemptions would take it."""
    port = free_port()
    pair = [
        launch(
            f"data=2, coordinator='127.0.0.1:{port}', num_processes=2, process_id={rank}",
            before="import signal; signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))",
            after=HANDLER,
        )
        for rank in range(2)
    ]
    for process in pair:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert "handled" in out.splitlines(), out


def test_two_slurm_tasks_find_each_other():
    """The variables that srun sets, on one node, without srun itself."""
    slurm = {
        "SLURM_JOB_ID": str(free_port()),  # the coordinator's port comes from it: another one each time
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_STEP_NUM_NODES": "1",
        "SLURM_STEP_NODELIST": "localhost",
    }
    pair = [launch("z=2", **slurm, SLURM_PROCID=str(rank), SLURM_LOCALID=str(rank)) for rank in range(2)]
    for process in pair:
        out, err = process.communicate(timeout=240)
        assert process.returncode == 0, err
        assert json.loads(next(line for line in out.splitlines() if line.startswith("{")))["devices"] == 2
