"""A run of `axonn-jax train` in one process: what it leaves behind, and when."""

import shutil
import sys

import pytest
from launched import AXONN, command, finished, write_config

from axonn_jax.checkpoint.manifest import read
from axonn_jax.data.loader import Loader, TokenSamples
from axonn_jax.data.manifest import Manifest
from axonn_jax.train.metrics import read_metrics

WATCHED_SAVES = """
import sys
from pathlib import Path
from axonn_jax.cli.main import main
from axonn_jax.checkpoint.save import Saver
from axonn_jax.train.metrics import read_metrics

save = Saver.save

def saving(self, step, *state):
    print(step, read_metrics(self.directory.parent)[-1]["step"])
    data = self.directory.parent.parent / "data"
    if data.exists():
        data.rename(data.with_name("elsewhere"))
    save(self, step, *state)

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
    least, second, *_ = sorted(seconds)
    assert least > second / 10


def test_a_save_reads_nothing_of_the_data(watched):
    place, done = watched
    assert "was not saved" not in done.stderr
    facts = read(place / "run" / "checkpoints" / "step_00000005").run
    assert facts["data"] == Manifest.load(place / "elsewhere").fingerprint("train")
