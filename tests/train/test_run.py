"""A run of `axonn-jax train` in one process: what it leaves behind, and when."""

import sys

import pytest
from launched import AXONN, CONFIG, command, finished

from axonn_jax.data.loader import Loader, TokenSamples
from axonn_jax.train.loop import held_out
from axonn_jax.train.metrics import read_metrics

LOGGED_BEFORE_SAVING = """
import sys
from axonn_jax.cli.main import main
from axonn_jax.checkpoint.save import Saver
from axonn_jax.train.metrics import read_metrics

save = Saver.save

def saving(self, step, *state):
    print(step, read_metrics(self.directory.parent)[-1]["step"])
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
        counted += [tuple(row) for batch in held_out(loader, most, 32) for row in batch.tolist() if max(row[1:]) >= 0]
    every = TokenSamples(prepared, "valid", 32)
    assert 64 < len(every) < 99 * 32
    assert len(every) % 32
    samples = min(len(every), most * 32)
    assert sorted(counted) == sorted(tuple(every[i].tolist()) for i in range(samples))


def test_a_step_is_written_down_before_it_is_saved(tmp_path, prepared):
    """A run killed right after a save goes on after that step, and would never write it down.

    An offloaded step has ended when it returns: none, saved and last ones included, is said to have taken no time.
    """
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(data=prepared, layers=2) + "\n[checkpoint]\nevery = 2\n")
    words = command(config, tmp_path / "run", train_steps=5, memory_offload="optimizer")
    done = finished([sys.executable, "-c", LOGGED_BEFORE_SAVING, *words[len(AXONN) + 1 :]])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["2 2", "4 4", "5 5"]
    seconds = [record["step_s"] for record in read_metrics(tmp_path / "run") if "step_s" in record]
    assert len(seconds) == 5
    least, second, *_ = sorted(seconds)
    assert least > second / 10
