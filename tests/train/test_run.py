"""A run of `axonn-jax train` in one process: what it leaves behind, and when."""

import sys

from launched import AXONN, CONFIG, command, finished

LOGGED_BEFORE_SAVING = """
import sys
from axonn_jax.cli.main import main
from axonn_jax.state.saver import Saver
from axonn_jax.train.metrics import read_metrics

save = Saver.save

def saving(self, step, *state):
    print(step, read_metrics(self.directory.parent)[-1]["step"])
    save(self, step, *state)

Saver.save = saving
sys.exit(main(["train", *sys.argv[1:]]))
"""


def test_a_step_is_written_down_before_it_is_saved(tmp_path, prepared):
    """A run killed right after a save goes on after that step, and would never write it down."""
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(data=prepared, layers=2) + "\n[checkpoint]\nevery = 2\n")
    words = command(config, tmp_path / "run", train_steps=5)
    done = finished([sys.executable, "-c", LOGGED_BEFORE_SAVING, *words[len(AXONN) + 1 :]])
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines() == ["2 2", "4 4", "5 5"]
