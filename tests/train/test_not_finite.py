"""Runs whose weights are broken: a bad step is skipped and named, a broken state is not saved, and the run ends."""

import sys

import pytest
from launched import AXONN, UNDER_MPIRUN, command, errors, finished, write_config

from axonn_jax.train.config_file import read
from axonn_jax.train.loop import MOST_SKIPPED
from axonn_jax.train.metrics import read_metrics
from axonn_jax.train.optimizer import learning_rate

BROKEN = """
import os
import sys
import jax
import jax.numpy as jnp
from axonn_jax.cli.main import main
from axonn_jax.train.engines.spmd import SpmdEngine

step = SpmdEngine.step

def broken(self, batch):
    number, name = self.steps_done + 1, "norm.scale"
    weights = self.train_state.model.weights
    if os.environ.get("OMPI_COMM_WORLD_RANK") == "1":  # has each loss as soon as its step is dispatched
        type(weights[name]).is_ready = lambda self: True
    good = jnp.copy(weights[name])
    if number in (3, 6):
        weights[name] = jax.device_put(good.at[0].set(jnp.inf), good.sharding)
    metrics = step(self, batch)
    if number == 3:
        self.train_state.model.weights[name] = good
    return metrics

SpmdEngine.step = broken
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=UNDER_MPIRUN)])
def test_a_bad_step_is_named_and_a_broken_run_ends_with_its_last_good_checkpoints(ranks, tmp_path, prepared):
    """Step 3 is bad and made good again; from step 6 on the weights stay broken."""
    config = write_config(tmp_path / "c.toml", prepared, more="[checkpoint]\nevery = 2\nkeep = 2")
    options = {"train_steps": 100, "train_eval_every": 0, "log_every": 50, "grid_data": ranks}
    words = command(config, tmp_path / "run", ranks, **options)
    start = words.index(AXONN[0])
    done = finished([*words[:start], sys.executable, "-c", BROKEN, *words[start + len(AXONN) + 1 :]])
    assert done.returncode == 1, done.stderr[-3000:]
    (line,) = errors(done.stderr)
    assert "ended after step 25" in line
    assert f"of the last {MOST_SKIPPED} steps were not finite" in line
    assert "weights are not finite either" in line
    assert "checkpoint is of step 4" in line
    assert "step 3 changed nothing" in done.stderr
    assert "step 6 was not saved" in done.stderr
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == [
        "step_00000002",
        "step_00000004",
    ]
    rates = {record["step"]: record["lr"] for record in read_metrics(tmp_path / "run")}
    rate = learning_rate(read(tmp_path / "run" / "config.toml").train)
    # Updates before: two of step 3, and of step 6 on the four that were made, whatever was skipped meanwhile.
    assert rates == pytest.approx({step: float(rate(2 if step == 3 else 4)) for step in rates}, rel=1e-6)
    assert len(set(rates.values())) == 2
    last = 5 + MOST_SKIPPED
    named = {record["step"]: record["skipped"] for record in read_metrics(tmp_path / "run")}
    assert named == {3: 1} | {step: step - 4 for step in range(6, last + 1)}
