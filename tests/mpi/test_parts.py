"""What the processes of a run write and read of a checkpoint."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from launched import AXONN, UNDER_MPIRUN, command, mpirun, succeeded
from saved import check_files

from axonn_jax.checkpoint.orbax import stored_array
from axonn_jax.cli.main import main

pytestmark = UNDER_MPIRUN


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory in which the ranks of save_worker.py leave their checkpoints, and what they read."""
    folder = tmp_path_factory.mktemp("saved")
    worker = Path(__file__).with_name("save_worker.py")
    succeeded(mpirun(2, sys.executable, worker, folder))
    return folder


def test_another_saver_of_the_same_processes_waits_for_all_of_them(saved):
    part = saved / "checkpoints" / "step_00000002" / "part_000"
    assert (stored_array(part, "params.w", 0).read().result() == np.arange(60_000)).all()


def test_what_a_process_saved_it_alone_reads_again(saved):
    """To describe the checkpoint: each file once."""
    manifest = check_files(saved / "checkpoints" / "step_00000001")
    read = [json.loads((saved / str(rank)).read_text()) for rank in range(2)]
    own = [sum(size for path, size in files if f"/ocdbt.process_{rank}/" in path) for rank, files in enumerate(read)]
    assert min(own) > 100_000  # each process's half of 240,000 bytes
    assert own[1] == sum(size for _, size in read[1])
    assert own[0] + own[1] > 0.9 * manifest.bytes
    assert sum(size for files in read for _, size in files) == manifest.bytes
    assert sum(map(len, read)) == len(manifest.files)


@pytest.mark.slow
def test_a_new_run_sets_aside_what_a_first_one_left(config, tmp_path):
    folder = tmp_path / "run" / "checkpoints"
    new = {"train_steps": 1, "train_warmup": 0, "checkpoint_resume": "never"}
    for ranks in (1, 2, 1):  # the same step each time
        (folder / "unfinished_step_00000001" / "part_003").mkdir(parents=True)  # of more stages
        words = command(config, tmp_path / "run", ranks, grid_pipe=2, **new)
        if ranks == 1:
            assert main(words[len(AXONN) :]) == 0
        else:
            succeeded(words)
        parts = {path.name for path in (folder / "step_00000001").iterdir()}
        assert parts == {"manifest.json", *(f"part_{stage:03d}" for stage in range(ranks))}
        (folder / "step_00000001" / "part_003").mkdir()
    assert {path.name for path in folder.iterdir()} == {
        "step_00000001", "aside_step_00000001", "aside_step_00000001.2",
    }  # fmt: skip
