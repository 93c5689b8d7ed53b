"""The examples of docs/extend.md: each is used as the page says, and compared with the package's own."""

import re
import sys
from pathlib import Path
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from axonn_jax.cli import main as command_line
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.ops import costs
from axonn_jax.core.ops.layers import Place
from axonn_jax.core.tensor.attention import causal_attention
from axonn_jax.files.huggingface import families
from axonn_jax.pipe.schedule import policies
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.planning.simulate.simulator import simulate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "extend.md"
SIZES = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128}


@pytest.fixture
def page(monkeypatch):
    """A module with all blocks of the page; families and policies are the package's own again afterwards."""
    monkeypatch.setattr(families, "FAMILIES", dict(families.FAMILIES))
    monkeypatch.setattr(policies, "FIXED", dict(policies.FIXED))
    module = ModuleType("axonn_jax.cli.hello")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    code = "\n".join(re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S))
    exec(compile(code, str(PAGE), "exec"), module.__dict__)
    return module


def test_the_family_reads_a_config_as_llama_does(page):
    config = SIZES | {"vocab_size": 512, "max_position_embeddings": 64, "num_key_value_heads": 4}
    llama, mine = (families.shape_from_config(config | {"model_type": name}) for name in ("llama", "mine"))
    assert mine == llama


def test_the_layer_counts_its_parameters_and_collectives(page):
    layer = page.low_rank(Place(1, 2, 2, 2, 16, 4), hidden=64, rank=8)
    assert costs.parameters(layer) == 2 * 64 * 8
    with jax.set_mesh(build_grid(GridShape(x=2), jax.devices()[:2]).mesh):
        module = page.LowRank(64, 8, jax.random.key(0))
    sizes = {f"low.{name}.kernel": getattr(module, name).kernel[...].shape for name in ("down", "up")}
    assert {param.name: param.shape for param in layer.params} == sizes
    assert {axes for _, _, _, axes, _, _ in costs.collectives([layer], costs.StepPolicy())} >= {("z",), ("y",), ("x",)}


def test_the_optimizer_lowers_a_loss(page):
    weights = jnp.ones(4)
    state = page.optimizer.init(weights)
    for _ in range(10):
        updates, state = page.optimizer.update(2 * weights, state, weights)
        weights = optax.apply_updates(weights, updates)
    assert float(jnp.sum(weights**2)) < 4


def test_the_kernel_equals_the_packages(page):
    q, k, v = jax.random.normal(jax.random.key(0), (3, 2, 16, 4, 8))
    k, v = k[:, :, :2], v[:, :, :2]
    np.testing.assert_allclose(page.attention(q, k, v), causal_attention(q, k, v, "xla"), atol=1e-5)


def test_the_order_runs_every_task(page):
    policy = policies.policy_of("one-by-one")
    run = simulate(PipelineShape(2, 3), policy, task_time=lambda task: 1.0, message_time=lambda message: 0.0)
    assert (run.tasks, run.makespan, run.peak_live) == (2 * 2 * 3, 2 * 2 * 3, [1, 1])


def test_the_command_reads_its_flag(page, monkeypatch, capsys):
    monkeypatch.setitem(command_line.COMMANDS, "hello", "greet")
    assert command_line.main(["hello", "--name", "Ada"]) == 0
    assert capsys.readouterr().out == "hello Ada\n"
