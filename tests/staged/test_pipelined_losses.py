"""`Trainer(loss=)` in a pipeline beside the same microbatches on one device: losses, state, numbers, checkpoints."""

import gc
import json
import subprocess
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import staged_models as models
from flax import nnx
from launched import MPIRUN, UNDER_MPIRUN, environment

import axonn_jax as ax
from axonn_jax.core.checkpoint.naming import CARRIED

STEPS, MICROBATCHES = 3, 4
NIGHTLY = pytest.mark.slow
MPI4JAX = pytest.mark.skipif(find_spec("mpi4jax") is None, reason="no mpi4jax")
ULPS = 64 * np.finfo(np.float32).eps
"""Difference of sums of a few thousand float32 products in another order, relative."""


def trainer(name, axes, *, microbatches=MICROBATCHES, **options):
    make, loss, batches, weight = models.MODELS[name]
    grid = ax.init(**axes)
    model = make
    if name == "linen" and grid.shape.pipe == 1:
        rows = models.ROWS // MICROBATCHES // grid.shape.data
        part = jax.tree.map(lambda leaf: leaf[:rows], batches(1)[0])
        loss, model = ax.parallelize_linen(loss, make(), grid, part)
    options = {"clip": 1.0, "seed": 3, "weight": weight} | options
    return ax.Trainer(model, optax.sgd(0.05), grid, loss=loss, microbatches=microbatches, **options)


def run(trained, batches):
    """Metrics of steps, and of an evaluation behind them."""
    numbers = []
    for batch in batches:
        metrics = trained.step(batch)
        numbers.append([float(metrics[name]) for name in ("loss", "grad_norm")])
        numbers[-1] += [float(value) for value in jax.tree.leaves(metrics.get("aux", {}))]
    return np.array(numbers), trained.evaluate(batches[:1])


def arrays(trained):
    """Parameters and state, by path."""
    with trained.engine.grid.entered():
        state = {name: value for name, value in trained.engine.state().items() if name.startswith(CARRIED)}
        return {name: np.asarray(value) for name, value in {**trained.engine.params, **state}.items()}


_found = {}


def plain(name, data=1):
    """The same microbatches without a pipeline."""
    if (name, data) not in _found:
        alone = trainer(name, {"data": data})
        _found[name, data] = (*run(alone, models.MODELS[name][2](STEPS)), arrays(alone))
    return _found[name, data]


@pytest.mark.parametrize(
    ("name", "axes"),
    [
        ("vision", {"pipe": 3}),
        ("mixture", {"pipe": 2, "data": 2}),
        ("language", {"pipe": 2, "z": 2, "y": 2}),
        pytest.param("language", {"pipe": 2}, marks=NIGHTLY),
        pytest.param("unet", {"pipe": 3}, marks=NIGHTLY),
        pytest.param("translation", {"pipe": 3}, marks=NIGHTLY),
        pytest.param("linen", {"pipe": 2}, marks=NIGHTLY),
        pytest.param("language", {"pipe": 3, "data": 2}, marks=NIGHTLY),
        pytest.param("mixture", {"pipe": 2, "x": 2}, marks=NIGHTLY),
        pytest.param("vision", {"pipe": 2, "data": 2}, marks=NIGHTLY),
        pytest.param("vision", {"pipe": 2, "z": 2}, marks=NIGHTLY),
        pytest.param("unet", {"pipe": 2, "data": 2, "y": 2}, marks=NIGHTLY),
        pytest.param("translation", {"pipe": 2, "z": 2, "x": 2}, marks=NIGHTLY),
        pytest.param("linen", {"pipe": 3, "data": 2}, marks=NIGHTLY),
        pytest.param("linen", {"pipe": 2, "z": 2, "y": 2}, marks=NIGHTLY),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(f"{axis} {size}" for axis, size in value.items()),
)
def test_a_pipeline_is_the_same_microbatches_on_one_device(name, axes):
    pipelined, (numbers, mean, state) = trainer(name, axes), plain(name, axes.get("data", 1))
    got, got_mean = run(pipelined, models.MODELS[name][2](STEPS))
    np.testing.assert_allclose(got, numbers, rtol=ULPS)
    np.testing.assert_allclose(got_mean, mean, rtol=ULPS)
    found = arrays(pipelined)
    pipelined.close()
    assert found.keys() == state.keys()
    # Rounding of a gradient that is zero but for it, as a key's bias, is relative to the largest gradients.
    for path, value in state.items():
        np.testing.assert_allclose(found[path], value, rtol=0, atol=ULPS * max(1.0, np.abs(value).max()), err_msg=path)


POLICIES = {
    "1f1b": ax.PipelineConfig(policy="1f1b"),
    "gpipe": ax.PipelineConfig(policy="gpipe"),
    "zero-bubble": ax.PipelineConfig(policy="zero-bubble"),
    "interleaved": ax.PipelineConfig(policy="interleaved", virtual_stages=2),
    "split": ax.PipelineConfig(split="3,6"),
}


@NIGHTLY
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_has_the_losses_of_one_device(policy):
    pipelined = trainer("language", {"pipe": 2}, pipeline=POLICIES[policy])
    got, _ = run(pipelined, models.texts(STEPS))
    pipelined.close()
    np.testing.assert_allclose(got, plain("language")[0], rtol=ULPS)


@NIGHTLY
@pytest.mark.parametrize(
    ("axes", "memory", "rtol"),
    [
        ({"pipe": 2, "data": 2}, {"zero": 1}, ULPS),
        ({"pipe": 2}, {"offload": "optimizer"}, ULPS),
        ({"pipe": 2}, {"activations": "full"}, ULPS),
        ({"pipe": 2, "y": 2}, {"activations": "dots"}, ULPS),
        ({"pipe": 2}, {"precision": "fp16"}, 2e-2),
        ({"pipe": 2, "data": 2}, {"precision": "bf16", "zero": 1, "offload": "optimizer"}, 5e-2),
    ],
    ids=lambda value: " ".join(f"{key} {each}" for key, each in value.items()) if isinstance(value, dict) else "",
)
def test_memory_settings_keep_the_losses(axes, memory, rtol):
    pipelined = trainer("mixture", axes, memory=ax.MemoryConfig(**memory))
    with jax.numpy_dtype_promotion("standard"):  # half precision asks for it where a norm is float32
        got, _ = run(pipelined, models.texts(STEPS))
    pipelined.close()
    np.testing.assert_allclose(got, plain("mixture", axes.get("data", 1))[0], rtol=rtol)


@pytest.mark.parametrize(
    "axes",
    [{"pipe": 3}, pytest.param({}, marks=NIGHTLY), pytest.param({"pipe": 2, "z": 2}, marks=NIGHTLY)],
    ids=lambda axes: " ".join(f"{axis} {size}" for axis, size in axes.items()) or "one device",
)
def test_a_run_goes_on_at_another_pipe(axes, tmp_path):
    batches = models.pictures(STEPS)
    first = trainer("vision", {"pipe": 2})
    run(first, batches[:2])
    first.save(tmp_path, 2)
    first.close()
    then = trainer("vision", axes)
    assert then.resume(tmp_path) == 2
    got, mean = run(then, batches[2:])
    then.close()
    np.testing.assert_allclose(got, plain("vision")[0][2:], rtol=ULPS)
    assert mean > 0


@NIGHTLY
def test_a_pipeline_goes_on_from_one_device(tmp_path):
    batches = models.pictures(STEPS)
    alone = trainer("vision", {})
    run(alone, batches[:2])
    alone.save(tmp_path, 2)
    then = trainer("vision", {"pipe": 2})
    then.load(tmp_path)
    got, _ = run(then, batches[2:])
    found = arrays(then)
    then.close()
    np.testing.assert_allclose(got, plain("vision")[0][2:], rtol=ULPS)
    assert found.keys() == plain("vision")[2].keys()


def test_the_model_is_the_trained_one():
    pipelined = trainer("vision", {"pipe": 2})
    run(pipelined, models.pictures(STEPS))
    model = pipelined.model
    pipelined.close()
    want = plain("vision")[2]
    statistics = np.asarray(model.features[1].mean[...])
    np.testing.assert_allclose(statistics, want[CARRIED + "features.1.mean"], atol=ULPS)


@NIGHTLY
def test_rows_of_other_lengths_run_in_the_stages_of_the_first():
    long, short = models.texts(2)
    batches = [long, jax.tree.map(lambda leaf: leaf[:, :3], short), long]
    pipelined, alone = trainer("mixture", {"pipe": 3}), trainer("mixture", {})
    got, want = (run(each, batches)[0] for each in (pipelined, alone))
    pipelined.close()
    np.testing.assert_allclose(got, want, rtol=ULPS)


class Scaled(nnx.Module):
    """A scale that all blocks read, and a layer that none does."""

    def __init__(self, rngs):
        self.blocks = nnx.List([nnx.Linear(8, 8, rngs=rngs) for _ in range(4)])
        self.unread, self.scale = nnx.Linear(8, 8, rngs=rngs), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        for block in self.blocks:
            x = x + nnx.relu(block(x)) * self.scale
        return x


def test_a_parameter_of_all_stages_and_one_of_none():
    """The first is one, with summed gradients; the second decays. A module that was handed in is let go of."""
    rng = np.random.default_rng(0)
    batches = [{"x": rng.normal(size=(16, 8)).astype(np.float32)} for _ in range(STEPS)]
    found = []
    for axes in ({}, {"pipe": 4}):
        model = Scaled(nnx.Rngs(0))
        kernel = weakref.ref(model.blocks[0].kernel.get_raw_value())
        trained = ax.Trainer(
            model,
            optax.adamw(1e-2, weight_decay=0.1),
            ax.init(**axes),
            loss=lambda model, batch: jnp.mean((model(batch["x"]) - 1) ** 2),
            microbatches=4,
        )
        losses = [float(trained.step(batch)["loss"]) for batch in batches]
        del model
        gc.collect()
        assert axes == {} or kernel() is None
        found.append((losses, arrays(trained)))
        trained.close()
    (want, params), (got, pipelined) = found
    np.testing.assert_allclose(got, want, rtol=ULPS)
    assert params.keys() == pipelined.keys()
    for path, value in params.items():
        np.testing.assert_allclose(pipelined[path], value, atol=ULPS, err_msg=path)


@NIGHTLY
@UNDER_MPIRUN[0]
@UNDER_MPIRUN[1]
@pytest.mark.parametrize("channel", ["mpi4py", pytest.param("mpi4jax", marks=MPI4JAX)])
@pytest.mark.parametrize(
    ("name", "axes", "processes"),
    [("mixture", {"pipe": 2}, 2), ("vision", {"pipe": 3}, 3), ("language", {"pipe": 2, "z": 2}, 4)],
    ids=["mixture", "vision", "language over z 2"],
)
def test_processes_send_what_one_process_computes(name, axes, processes, channel, tmp_path):
    words = [sys.executable, str(Path(__file__).with_name("staged_worker.py")), name, channel, str(tmp_path)]
    launch = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", str(processes), *words, json.dumps(axes)]
    environ = environment() | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(Path(__file__).parent)}
    ran = subprocess.run(launch, capture_output=True, text=True, timeout=300, env=environ, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = json.loads(ran.stdout.splitlines()[-1])
    numbers, mean, _ = plain(name)
    np.testing.assert_allclose(found["numbers"], numbers, rtol=ULPS)
    np.testing.assert_allclose(found["mean"], mean, rtol=ULPS)
    alone = trainer(name, {})
    assert alone.load(tmp_path) == 3
    np.testing.assert_allclose(alone.evaluate(models.MODELS[name][2](STEPS)[:1]), mean, rtol=ULPS)
