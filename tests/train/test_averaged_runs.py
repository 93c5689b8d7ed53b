"""Runs with `train.ema`: evaluations, samples, `generate` and `convert` take the average, on any grid and resumed."""

import numpy as np
import pytest
from launched import AXONN, command, finished, succeeded, write_config
from safetensors.numpy import load_file

from axonn_jax.checkpoint.manifest import read
from axonn_jax.checkpoint.naming import AVERAGE, PARAMS
from axonn_jax.checkpoint.orbax import stored_array
from axonn_jax.tracking.files import read_metrics

DECAY, STEPS = 0.5, 4


def arrays(run, step, prefix):
    place = run / "checkpoints" / f"step_{step:08d}"
    stored = read(place).arrays
    return {
        name.removeprefix(prefix): np.asarray(stored_array(place / array.part, name, 1 << 20).read().result())
        for name, array in stored.items()
        if name.startswith(prefix)
    }


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared):
    """A run of four steps, the last two on another grid with offload, each saved; its directory, and the plain run."""
    place = tmp_path_factory.mktemp("averaged")
    config = write_config(place / "c.toml", prepared, 1, "[checkpoint]\nevery = 1\nkeep = 9")
    given = {"train_eval_every": 2, "train_schedule": "constant"}
    succeeded(command(config, place / "plain", train_steps=STEPS, **given))
    given["train_ema"] = DECAY
    succeeded(command(config, place / "run", train_steps=2, **given))
    succeeded(
        command(config, place / "run", grid_z=2, grid_y=2, train_steps=STEPS, memory_offload="optimizer", **given)
    )
    return place / "run", place / "plain"


def test_the_average_is_that_of_the_weights_of_all_steps(run):
    weights, averages = ([arrays(run[0], step, kind) for step in range(1, STEPS + 1)] for kind in (PARAMS, AVERAGE))
    for name, value in averages[-1].items():
        want = averages[0][name]
        for later in weights[1:]:
            want = DECAY * want + (1 - DECAY) * later[name]
        np.testing.assert_allclose(value, want, rtol=0, atol=1e-6 * np.abs(want).max(), err_msg=name)
    assert any(np.abs(averages[-1][name] - value).max() > 1e-3 for name, value in weights[-1].items())


def test_evaluations_are_the_averages_and_training_losses_the_weights(run):
    averaged, plain = (read_metrics(one) for one in run)
    losses = [[record["loss"] for record in one if "loss" in record] for one in (averaged, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    held_out = [[record["eval_loss"] for record in one if "eval_loss" in record] for one in (averaged, plain)]
    assert all(abs(ours - theirs) > 1e-3 for ours, theirs in zip(*held_out, strict=True))


def test_convert_and_generate_take_the_average(run, tmp_path):
    averaged, _ = run
    succeeded([*AXONN, "convert", str(averaged), str(tmp_path / "hf")])
    own = {value.shape: value for value in arrays(averaged, STEPS, AVERAGE).values()}
    (table,) = (value for name, value in load_file(tmp_path / "hf/model.safetensors").items() if "wte" in name)
    np.testing.assert_array_equal(table, own[table.shape])
    texts = []
    for place in (averaged, tmp_path / "hf"):
        words = [*AXONN, "generate", str(place), "--prompt", "the", "--tokens", "8", "--temperature", "0"]
        texts.append(succeeded(words).stdout)
    assert texts[0] == texts[1]


def test_a_pipeline_has_no_average_and_says_so(prepared, tmp_path):
    done = finished(command(write_config(tmp_path / "c.toml", prepared), tmp_path / "run", grid_pipe=2, train_ema=0.9))
    assert done.returncode == 2
    assert "error: train.ema = 0.9: 0 where grid.pipe is above 1" in done.stderr
