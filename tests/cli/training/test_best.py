"""The checkpoint of the lowest held-out loss is kept, and a run whose loss does not fall any more ends early."""

import itertools
import math
import re
import signal

import pytest
from commands import trained
from launched import flags, write_config

from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.manifest import all_steps, step_of
from axonn_jax.core.distributed.host_sync import LocalSync
from axonn_jax.run.metrics import Best, recorded_eval_losses
from axonn_jax.run.tracking.records import JsonLines, read_metrics
from axonn_jax.run.tracking.tracker import RunFacts


def test_the_lowest_is_counted():
    best = Best([(2, 3.0), (4, 2.0)])
    assert (best.step, best.loss, best.since) == (4, 2.0, 0)
    assert [best.seen(*one) for one in ((6, 2.0), (8, math.nan), (10, 1.5), (12, 1.6))] == [False, False, True, False]
    assert (best.step, best.since) == (10, 1)
    never = Best([(1, math.nan)])
    assert (never.step, never.since) == (0, 1)


def test_an_evaluation_that_was_not_finite_counts_when_a_run_goes_on(tmp_path):
    log = JsonLines()
    log.start(RunFacts(tmp_path, ""))
    for step, loss in ((2, 3.0), (4, math.nan), (6, math.inf)):
        log.log(step, {"loss": 1.0})
        log.log(step, {"eval_loss": loss})
    log.finish()
    best = Best((step, loss) for step, loss, _ in recorded_eval_losses(tmp_path, LocalSync()))
    assert (best.step, best.loss, best.since) == (2, 3.0, 2)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, prepared):
    """A run on data 2 whose rate is far too high, with patience 2, and the same gone on on y 2 pipe 2 for 6 steps."""
    place = tmp_path_factory.mktemp("best")
    config = write_config(place / "c.toml", prepared, 1, "[checkpoint]\nkeep = 1\nbest = true")
    given = {"train_lr": 1.0, "train_clip": 0, "train_warmup": 20, "train_eval_every": 2, "train_schedule": "constant"}
    early = {"grid_data": 2, "train_steps": 60, "train_patience": 2, **given}
    said = trained(config, place / "run", **early)
    ended = read_metrics(place / "run")
    assert f"ended early at step {ended[-1]['step']}: nothing left to train" in trained(config, place / "run", **early)
    assert read_metrics(place / "run") == ended
    trained(config, place / "run", grid_y=2, grid_pipe=2, train_steps=ended[-1]["step"] + 6, **given)
    return place / "run", said, ended


def test_a_run_whose_held_out_loss_does_not_fall_ends_early_and_keeps_the_best(runs):
    run, said, ended = runs
    losses = [(record["step"], record["eval_loss"]) for record in ended if "eval_loss" in record]
    step, loss = min(losses, key=lambda one: one[1])
    assert [one for one, _ in losses[-3:]] == [step, step + 2, step + 4], "it ends behind two evaluations"
    assert ended[-1]["step"] == step + 4 < 60
    assert f"ended early: no held-out loss was below that of step {step}, {loss:.4f}\n" in said
    assert f"trained {step + 4} of 60 steps in " in said
    assert f"the lowest held-out loss, {loss:.4f}, is of step {step}; checkpoint " in said
    best = min(((r["step"], r["eval_loss"]) for r in read_metrics(run) if "eval_loss" in r), key=lambda one: one[1])
    assert [step_of(path) for path in all_steps(run / "checkpoints")] == sorted({best[0], step + 10}, reverse=True)


@pytest.mark.parametrize(("rate", "best"), [(1e6, ""), (1.0, r"; the best one, \d+\.\d{4}, is .*/step_00000002")])
def test_initial_weights_that_no_checkpoint_of_the_run_equals_are_named(rate, best, runs, prepared, tmp_path, capsys):
    config = write_config(tmp_path / "c.toml", prepared, 1, "[checkpoint]\nbest = true")
    given = {"train_lr": rate, "train_steps": 2, "checkpoint_weights": runs[0], "log_dir": tmp_path / "run"}
    assert main(["train", str(config), *flags(given)]) == 0
    assert re.search(rf", is of step 0; checkpoint \(none\){best}\n", capsys.readouterr().err)


def test_a_run_stopped_before_the_evaluation_that_ends_it_ends_when_it_goes_on(prepared, tmp_path, monkeypatch):
    def stops(self, fault):
        self._number = signal.SIGTERM if next(steps) == ended else 0
        return self._number > 0

    config = write_config(tmp_path / "c.toml", prepared)
    given = {"train_lr": 1.0, "train_clip": 0, "train_schedule": "constant", "train_eval_every": 2, "train_patience": 1}
    assert main(["train", str(config), *flags({"log_dir": tmp_path / "whole", **given})]) == 0
    ended, words = read_metrics(tmp_path / "whole")[-1]["step"], flags({"log_dir": tmp_path / "parts", **given})
    assert ended < 20
    with monkeypatch.context() as patched:
        steps = itertools.count(1)
        patched.setattr("axonn_jax.run.signals.StopSignals.requested", stops)
        assert main(["train", str(config), *words]) == 143
        (tmp_path / "parts" / "loss.png").unlink()  # drawn of what there is so far
    assert main(["train", str(config), *words]) == 0
    losses = [[r for r in read_metrics(tmp_path / name) if "eval_loss" in r] for name in ("whole", "parts")]
    assert losses[0] == losses[1]
    assert (tmp_path / "parts" / "loss.png").is_file()


def test_a_warm_up_longer_than_the_run_is_the_runs(prepared, tmp_path):
    config = write_config(tmp_path / "c.toml", prepared)
    said = trained(config, tmp_path / "run", train_steps=2, train_warmup=20, train_eval_every=0)
    assert "train.warmup = 20 is longer than the run: the rate rises in all 2 steps" in said
    assert [r["lr"] for r in read_metrics(tmp_path / "run") if "lr" in r] == pytest.approx([1.5e-3, 3e-3])
