"""XLA's limit on pinned host memory and jax's share of a GPU's: what `init` makes of them; state without room."""

import os
import subprocess
import sys
from types import SimpleNamespace

import grids
import jax
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax import GridShape, UserError
from axonn_jax.core.distributed import gpu_limits
from axonn_jax.core.distributed.gpu_limits import (
    FRACTION,
    GIB,
    LIMIT,
    VARIABLES,
    check_pinned,
    raise_fraction,
    raise_pinned_limit,
)
from axonn_jax.core.memory import offload
from axonn_jax.models import Transformer

GPU = SimpleNamespace(platform="gpu")
START = """
import sys
import axonn_jax as ax
from axonn_jax.core.distributed import gpu_limits
gpu_limits.host_memory = lambda: int(sys.argv[1]) << 30
try:
    ax.init(x=2)
except Exception:  # there is no GPU here
    pass
"""
PLUGIN = """
import os
from jaxlib import xla_client
def initialize():  # jax calls it when it starts
    options = xla_client.generate_pjrt_gpu_plugin_options()
    print(os.environ.get("XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB"), options.get("memory_fraction"))
"""
OF_GPUS = "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_PREALLOCATE"


@pytest.mark.parametrize(
    ("gib", "set_by_user", "read_by_jax"),
    [
        (512, {"JAX_PLATFORMS": "cuda"}, f"512 {FRACTION}"),
        (32, {}, f"None {FRACTION}"),  # the plugin's name says that there are GPUs to look for
        (512, {LIMIT: "80", "XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "80 0.5"),
        (512, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "512 None"),
        (512, {"JAX_PLATFORMS": "cpu"}, "None None"),
    ],
)
def test_init_raises_the_limits_before_the_backend_starts(gib, set_by_user, read_by_jax, tmp_path):
    plugin = tmp_path / "jax_plugins/xla_cuda99/__init__.py"
    plugin.parent.mkdir(parents=True)
    plugin.write_text(PLUGIN)
    ours = {LIMIT, *OF_GPUS, "JAX_PLATFORMS"}
    env = {k: v for k, v in os.environ.items() if not k.startswith(("OMPI_", "PMI", "SLURM_")) and k not in ours}
    env |= {"PYTHONPATH": f"{tmp_path}:{env.get('PYTHONPATH', '')}", **set_by_user}
    command = [sys.executable, "-c", START, str(gib)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == read_by_jax, done.stderr


@pytest.mark.parametrize("name", VARIABLES)
def test_who_told_jax_how_to_take_memory_is_left_alone(name):
    environ = {name: "platform" if "ALLOC" in name else "0.5"}
    raise_fraction(environ)
    assert list(environ) == [name]


def test_processes_of_a_host_share_its_memory(monkeypatch):
    monkeypatch.setattr(gpu_limits, "host_memory", lambda: 1000 * GIB)
    environ = {}
    raise_pinned_limit(8, environ)
    assert environ == {LIMIT: "125"}


def test_state_that_may_not_be_pinned_is_refused_in_one_line():
    check_pinned(8 * GIB, [GPU] * 8, {})  # 64
    check_pinned(80 * GIB, [SimpleNamespace(platform="cpu")], {})
    check_pinned(80 * GIB, [GPU], {LIMIT: "80"})
    with pytest.raises(UserError, match=rf"{LIMIT} = 'not set, which is 64': at least 65 before .* keeps 64.1 GiB"):
        check_pinned(8 * GIB + GIB // 64, [GPU] * 8, {})
    with pytest.raises(UserError, match=rf"{LIMIT} = '80': at least 81 "):
        check_pinned(80 * GIB + 1, [GPU], {LIMIT: "80"})
    with pytest.raises(UserError, match=rf"{LIMIT} = '80GB': a whole number of GiB"):
        check_pinned(GIB, [GPU], {LIMIT: "80GB"})


def test_offload_asks_before_it_makes_the_state(monkeypatch):
    """On CPU devices nothing is refused, so what is asked for is looked at: 12 bytes a parameter of each device."""
    asked = []

    def refuse(each, devices):
        asked.append((each, len(devices)))
        raise UserError(LIMIT, "64", "more")

    monkeypatch.setattr(offload, "check_pinned", refuse)
    model = Transformer(grids.GPT, rngs=nnx.Rngs(0))
    grid = grids.lay(GridShape(x=2))
    with pytest.raises(UserError, match=LIMIT):
        make_trainer(model, optax.adam(1e-3), grid, precision="bf16", offload="optimizer")
    ((each, devices),) = asked
    assert devices == 2
    sharded = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(model, nnx.Param))) / 2
    assert 12 * sharded <= each <= 12 * 1.2 * sharded  # a few vectors are on both
