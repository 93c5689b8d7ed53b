"""Runs of `axonn-jax train`: what they leave behind, and when; runs whose weights are broken end, and say so."""

import shutil
import sys

import pytest
from launched import AXONN, UNDER_MPIRUN, command, errors, finished, write_config

from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.engines.optimizer import learning_rate
from axonn_jax.files.data.loader import Loader, TokenSamples
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.run import config_file
from axonn_jax.run.loop import MOST_SKIPPED
from axonn_jax.run.tracking.records import read_metrics

WATCHED_SAVES = """
import sys
from pathlib import Path
from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.run.tracking.records import read_metrics

save = Saver.save

def saving(self, step, *state, **options):
    print(step, read_metrics(self.directory.parent)[-1]["step"])
    data = self.directory.parent.parent / "data"
    if data.exists():
        data.rename(data.with_name("elsewhere"))
    save(self, step, *state, **options)

Saver.save = saving
sys.exit(main(["train", *sys.argv[1:]]))
"""


@pytest.mark.parametrize("most", [2, 99])
def test_held_out_samples_are_read_once(prepared, most):
    """Two processes, with every second row each, of the whole split or of the first 64 samples."""
    rows, counted = [range(0, 32, 2), range(1, 32, 2)], []
    for own in rows:
        loader = Loader(prepared, split="valid", seq_len=32, global_batch=32, rows=own, shuffle=False)
        counted += [tuple(row) for batch in loader.first(most) for row in batch.tolist() if max(row[1:]) >= 0]
    every = TokenSamples(prepared, "valid", 32)
    assert 64 < len(every) < 99 * 32
    assert len(every) % 32
    samples = min(len(every), most * 32)
    assert sorted(counted) == sorted(tuple(every[i].tolist()) for i in range(samples))


@pytest.fixture(scope="module")
def watched(tmp_path_factory, prepared):
    """A run of five steps and three saves, whose data is renamed at the first save: its directory, and the process."""
    place = tmp_path_factory.mktemp("watched")
    shutil.copytree(prepared, place / "data")
    config = write_config(place / "c.toml", place / "data", 2, "[checkpoint]\nevery = 2")
    words = command(config, place / "run", train_steps=5, memory_offload="optimizer")
    return place, finished([sys.executable, "-c", WATCHED_SAVES, *words[len(AXONN) + 1 :]])


def test_a_step_is_written_down_before_it_is_saved(watched):
    """A run killed right after a save goes on after that step, and would never write it down.

    An offloaded step has ended when it returns: none, saved and last ones included, is said to have taken no time.
    """
    place, done = watched
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["2 2", "4 4", "5 5"]
    seconds = [record["step_s"] for record in read_metrics(place / "run") if "step_s" in record]
    assert len(seconds) == 5
    assert min(seconds) > 1e-3, "one that was only dispatched is said to have taken some microseconds"


def test_a_save_reads_nothing_of_the_data(watched):
    place, done = watched
    assert "was not saved" not in done.stderr
    facts = read(place / "run" / "checkpoints" / "step_00000005").run
    assert facts["data"] == Manifest.load(place / "elsewhere").fingerprint("train")


BROKEN = """
import os
import sys
import jax
import jax.numpy as jnp
from axonn_jax.cli.main import main
from axonn_jax.core.engines.spmd import SpmdEngine

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
    rate = learning_rate(config_file.read(tmp_path / "run" / "config.toml").train)
    # Updates before: two of step 3, and of step 6 on the four that were made, whatever was skipped meanwhile.
    assert rates == pytest.approx({step: float(rate(2 if step == 3 else 4)) for step in rates}, rel=1e-6)
    assert len(set(rates.values())) == 2
    last = 5 + MOST_SKIPPED
    named = {record["step"]: record["skipped"] for record in read_metrics(tmp_path / "run")}
    assert named == {3: 1} | {step: step - 4 for step in range(6, last + 1)}
