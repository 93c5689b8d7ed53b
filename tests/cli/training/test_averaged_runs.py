"""Runs with `train.ema`: evaluations, samples, `generate` and `convert` take the average, on any grid and resumed."""

import numpy as np
import pytest
from commands import said, trained
from launched import write_config
from safetensors.numpy import load_file

from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.checkpoint.naming import AVERAGE, PARAMS
from axonn_jax.core.checkpoint.orbax import stored_array
from axonn_jax.run.tracking.records import read_metrics

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
    trained(config, place / "plain", train_steps=STEPS, **given)
    given["train_ema"] = DECAY
    trained(config, place / "run", train_steps=2, **given)
    trained(config, place / "run", grid_z=2, grid_y=2, train_steps=STEPS, memory_offload="optimizer", **given)
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
    said("convert", averaged, tmp_path / "hf")
    own = {value.shape: value for value in arrays(averaged, STEPS, AVERAGE).values()}
    (table,) = (value for name, value in load_file(tmp_path / "hf/model.safetensors").items() if "wte" in name)
    np.testing.assert_array_equal(table, own[table.shape])
    words = ["--prompt", "the", "--tokens", "8", "--temperature", "0"]
    texts = [said("generate", place, *words)[0] for place in (averaged, tmp_path / "hf")]
    assert texts[0] == texts[1] != ""


@pytest.mark.parametrize("more", [{}, {"memory_offload": "optimizer", "memory_precision": "fp16"}], ids=["", "offload"])
def test_the_average_of_a_run_that_begins_with_weights_begins_with_them(run, prepared, tmp_path, more):
    """At step 0 the held-out loss is the last one of the run that the weights are of."""
    averaged, _ = run
    config = write_config(tmp_path / "c.toml", prepared)
    given = {"train_ema": 0.9, "train_steps": 1, "checkpoint_weights": averaged, **more}
    trained(config, tmp_path / "run", **given)
    (want,) = (r["eval_loss"] for r in read_metrics(averaged) if "eval_loss" in r and r["step"] == STEPS)
    (got,) = (r["eval_loss"] for r in read_metrics(tmp_path / "run") if "eval_loss" in r and r["step"] == 0)
    assert got == pytest.approx(want, rel=2e-3 if more else 1e-6)


def test_a_pipeline_has_no_average_and_says_so(prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared)
    line = trained(config, tmp_path / "run", 2, grid_pipe=2, train_ema=0.9)
    assert "error: train.ema = 0.9: 0 where grid.pipe is above 1" in line


def test_routers_biases_that_move_by_counts_are_averaged_too(prepared, tmp_path):
    given = {"model_experts": 4, "model_experts_per_token": 1, "moe_balance_rate": 0.1, "train_eval_every": 0}
    config = write_config(tmp_path / "c.toml", prepared, 1, "[checkpoint]\nevery = 1\nkeep = 9")
    trained(config, tmp_path / "run", train_steps=2, train_ema=DECAY, **given)
    (name,) = (name for name in arrays(tmp_path / "run", 2, AVERAGE) if "router" in name and "bias" in name)
    first, last = (arrays(tmp_path / "run", step, PARAMS)[name] for step in (1, 2))
    average = (arrays(tmp_path / "run", step, AVERAGE)[name] for step in (1, 2))
    assert first.any()
    np.testing.assert_allclose(next(average), (1 - DECAY) * first, atol=1e-7)
    np.testing.assert_allclose(next(average), DECAY * (1 - DECAY) * first + (1 - DECAY) * last, atol=1e-7)


def test_adapters_beside_an_averaged_run_know_its_averages_again(run, prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared, 1, f'[checkpoint]\nweights = "{run[0]}"\n[lora]\nrank = 2')
    trained(config, tmp_path / "run", train_steps=2, train_eval_every=2, train_ema=DECAY)
    before, after = (record["eval_loss"] for record in read_metrics(tmp_path / "run") if "eval_loss" in record)
    assert before == [record["eval_loss"] for record in read_metrics(run[0]) if "eval_loss" in record][-1]
    said("convert", tmp_path / "run", tmp_path / "hf", "--merge")
    config = write_config(tmp_path / "d.toml", prepared, 1, f'[checkpoint]\nweights = "{tmp_path / "hf"}"')
    trained(config, tmp_path / "merged", train_steps=1)
    merged = next(record["eval_loss"] for record in read_metrics(tmp_path / "merged") if "eval_loss" in record)
    assert merged == pytest.approx(after, abs=1e-5)


def test_a_run_resumed_without_its_average_says_so(run, prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared)
    place = run[0] / "checkpoints" / f"step_{STEPS:08d}"
    line = trained(config, tmp_path / "run", 2, checkpoint_resume=place)
    assert f"error: checkpoint.resume = '{place}': a checkpoint of a run without train.ema, as this one" in line
    _, line = said("prune", run[0], tmp_path / "pruned", status=2)
    assert "error: train.ema = 0.5: 0 where weights are pruned" in line
