"""Starting for real, in processes of its own: virtual devices, explicit processes, what listens, refusals, sums."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P
from launched import finished, objects, slurm_tasks, succeeded, together

from axonn_jax.core.distributed.network import free_port
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.tensor.collectives import reduce_scatter

REPORT = """
import json, sys
{before}
import axonn_jax as ax
from axonn_jax.core.errors import UserError
try:
    grid = ax.init({arguments})
except UserError as error:
    sys.exit(f"refused: {{error}}")
import jax
print(json.dumps({{"devices": jax.device_count(), "local": jax.local_device_count(), "mesh": dict(grid.mesh.shape)}}))
{after}
"""


def words(arguments, before="", after=""):
    return [sys.executable, "-c", REPORT.format(arguments=arguments, before=before, after=after)]


def pair(**around):
    """What becomes of two processes that are told where to meet."""
    meet = f"data=2, coordinator='127.0.0.1:{free_port('127.0.0.1')}', num_processes=2, process_id="
    both = together(lambda rank: words(f"{meet}{rank}", **around), [{}, {}])
    assert [done.returncode for done in both] == [0, 0], both
    return both


def test_one_process_makes_as_many_virtual_devices_as_the_grid_needs():
    done = succeeded(words("data=2, z=1, y=2, x=3"))
    assert json.loads(done.stdout) == {
        "devices": 12,
        "local": 12,
        "mesh": {"data": 2, "expert": 1, "z": 1, "y": 2, "x": 3},
    }
    assert "1 process" in done.stderr
    assert "grid pipe 1 x data 2 x z 1 x y 2 x x 3" in done.stderr


def test_devices_that_xla_flags_ask_for_stay(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    done = succeeded(words("data=2, z=2", after="print(json.dumps({'then': str(ax.init(data=8).shape)}))"))
    assert [found.get("devices", found.get("then")) for found in objects(done.stdout)] == [8, str(GridShape(data=8))]
    assert json.loads(succeeded(words("data=12")).stdout)["devices"] == 12


def test_processes_meet_past_a_proxy(monkeypatch):
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.setenv("NO_PROXY", "elsewhere.example")
    first, second = pair(after="import os; print(json.dumps({'past': os.environ['no_proxy']}))")
    for done in first, second:
        assert objects(done.stdout)[-1] == {"past": "elsewhere.example,127.0.0.1"}
    assert first.stderr.count("joins no_proxy of this run") == 1


ORDINARY = """
import jax, jax.numpy as jnp
from flax import nnx
from jax import P
from jax.sharding import AxisType, NamedSharding
jax.config.update("jax_num_cpu_devices", 4)
meshes = {kind: jax.make_mesh((4,), ("b",), axis_types=(getattr(AxisType, kind),)) for kind in ("Explicit", "Auto")}
rows = {kind: jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("b"))) for kind, mesh in meshes.items()}

def mapped(kind):
    mesh = meshes[kind]
    f = jax.shard_map(lambda a: jax.lax.psum(a.sum(), "b"), mesh=mesh, in_specs=P("b"), out_specs=P())
    return jax.jit(f)(rows[kind])

def inside(kind):
    with jax.set_mesh(meshes[kind]):
        return jax.jit(lambda a: jax.lax.with_sharding_constraint(a * 2, P("b")))(rows["Auto"]).sharding

def named():
    with jax.set_mesh(meshes["Auto"]):
        return nnx.Linear(8, 2, kernel_init=nnx.with_partitioning(nnx.initializers.ones, ("b", None)),
                          rngs=nnx.Rngs(0)).kernel.get_value().sharding.spec

USES = {
    "shard_map, Explicit": lambda: mapped("Explicit"), "shard_map, Auto": lambda: mapped("Auto"),
    "jit, Explicit": lambda: jax.jit(jnp.sum)(rows["Explicit"]), "jit, Auto": lambda: jax.jit(jnp.sum)(rows["Auto"]),
    "pmap": lambda: jax.pmap(lambda row: row.sum())(jnp.ones((4, 2))), "set_mesh": lambda: inside("Auto"),
    "Flax's layouts by names": named, "mesh": jax.sharding.get_abstract_mesh,
    "default device": lambda: jnp.ones(3).sharding, "vmap": lambda: jax.vmap(jnp.sin)(jnp.ones(3)),
}

def tried():
    return {name: str(use()) for name, use in USES.items()}

before = tried()
"""
AFTERWARDS = """
import numpy as np, optax
model = nnx.Linear(4, 2, rngs=nnx.Rngs(0))
trainer = ax.Trainer(model, optax.sgd(0.1), grid, loss=lambda model, batch: (model(batch) ** 2).mean())
between = tried()
trainer.step(np.ones((4, 4), np.float32))
print(json.dumps({'tried': [before, between, tried()]}))
"""


def test_ordinary_uses_of_jax_go_on_around_a_trainer():
    done = succeeded(words("data=2", before=ORDINARY, after=AFTERWARDS))
    before, between, after = objects(done.stdout)[-1]["tried"]
    assert before == between == after
    assert len(before) == 10


def test_a_grid_that_is_not_the_device_count_is_refused(monkeypatch):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "2")
    done = finished(words("x=4"))
    assert done.returncode == 1
    assert re.search(r"refused: grid = .*device count, 2 cpu devices in 1 process;.*this is 4", done.stderr)


def test_import_starts_nothing():
    code = (
        "import sys, threading, axonn_jax as ax; print(threading.active_count(), 'jax' in sys.modules, ax.__version__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split()[:2] == ["1", "False"]


def test_public_names_are_what_a_prompt_completes():
    code = (
        "import sys, axonn_jax as ax, rlcompleter; complete = rlcompleter.Completer({'ax': ax}).attr_matches; "
        "print(sorted(dir(ax)) == sorted(ax.__all__), dir(ax.models) == ax.models.__all__, 'jax' in sys.modules, "
        "complete('ax.Tr'), [each for each in complete('ax.') + complete('ax.models.') if 'import' in each])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True True False ['ax.Trainer('] []"


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
    both = pair(after=LISTENING)
    for done in both:
        first, second = objects(done.stdout)
        assert first == {"devices": 2, "local": 1, "mesh": {"data": 2, "expert": 1, "z": 1, "y": 1, "x": 1}}
        assert second["sum"] == 28.0
        assert set(second["listening"]) <= LOOPBACK, second
    assert [done.stderr.count("axonn_jax:") for done in both] == [1, 0]  # rank 0 says what was chosen


HANDLER = """
import os, signal, time
os.kill(os.getpid(), signal.SIGTERM)
time.sleep(0.2)
"""


def test_joining_processes_leaves_a_script_its_handler_of_sigterm():
    """jax.distributed's service for preemptions would take it."""
    handles = "import signal; signal.signal(signal.SIGTERM, lambda *_: print('handled', flush=True))"
    for done in pair(before=handles, after=HANDLER):
        assert "handled" in done.stdout.splitlines(), done


def test_two_slurm_tasks_find_each_other():
    """The variables that srun sets, on one node, without srun itself."""
    for done in together(lambda rank: words("z=2"), slurm_tasks()):
        assert done.returncode == 0, done.stderr
        assert objects(done.stdout)[0]["devices"] == 2


SCRIPT = str(Path(__file__).with_name("sums_script.py"))


def test_large_sums_between_processes_are_right_every_time():
    address = f"127.0.0.1:{free_port('127.0.0.1')}"
    for done in together(lambda rank: [sys.executable, SCRIPT, address, str(rank)], [{}, {}]):
        assert done.returncode == 0, done.stderr[-3000:]
        assert objects(done.stdout) == [{"wrong": 0, "reduce-scatters": 0}]


def test_devices_of_one_process_reduce_and_scatter_at_once():
    mesh = build_grid(GridShape(z=2), jax.devices()[:2]).mesh
    mapped = jax.shard_map(lambda x: reduce_scatter(x[0], "z", 0), mesh=mesh, in_specs=P("z"), out_specs=P("z"))
    text = jax.jit(mapped).lower(jnp.ones((2, 8))).compile().as_text()
    assert "reduce-scatter" in text
    assert "all-to-all" not in text


@pytest.mark.parametrize("platform", ["nothing", "cpu,nothing"])
def test_a_platform_that_jax_does_not_know_is_one_line(platform):
    done = finished(words(""), JAX_PLATFORMS=platform)
    assert done.returncode == 1
    assert done.stderr.startswith(f"refused: JAX_PLATFORMS = '{platform}': cpu, or another platform that")
    assert done.stderr.count("\n") == 1
