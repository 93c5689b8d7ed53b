"""What the processes of a run write and read of a checkpoint; the data's position across numbers of processes."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
from launched import AXONN, UNDER_MPIRUN, command, curves, mpirun, succeeded
from saved import check_files

from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.orbax import stored_array

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


@pytest.mark.slow
def test_other_numbers_of_processes_go_on_with_the_same_samples(config, tmp_path):
    """1, 2 and 4 processes in turn, other grids each: the curve is the uninterrupted one's."""
    run, steps = tmp_path / "run", 0
    schedule = {"train_schedule": "constant"}
    for ranks, options in [
        (1, {}), (4, {"grid_pipe": 4}), (2, {"grid_z": 2}), (4, {"grid_pipe": 2, "grid_data": 2}),
        (1, {"grid_pipe": 2, "grid_x": 2}), (2, {"grid_y": 2}), (4, {"grid_data": 2, "grid_x": 2}),
        (2, {"grid_pipe": 2}),
    ]:  # fmt: skip
        steps += 4
        succeeded(command(config, run, ranks, train_steps=steps, **schedule, **options))
    succeeded(command(config, tmp_path / "whole", train_steps=steps, **schedule))
    losses, whole = curves(run)[0], curves(tmp_path / "whole")[0]
    assert len(losses) == steps
    np.testing.assert_allclose(losses, whole, rtol=2e-6)
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [r["tokens"] for r in records if "loss" in r] == [16 * 32 * step for step in range(1, steps + 1)]


def drawn(ranks, config, run, folder, **options):
    """The samples that all processes of a run together drew, batch by batch."""
    folder.mkdir()
    recording = [sys.executable, str(Path(__file__).with_name("recording_train.py")), str(folder)]
    words = command(config, run, ranks, **options)
    at = words.index(AXONN[0])
    words[at : at + len(AXONN) + 1] = recording
    succeeded(words)
    each = [[json.loads(line) for line in path.read_text().splitlines()] for path in folder.iterdir()]
    assert len(each) == ranks
    return [sorted({number for batch in batches for number in batch}) for batches in zip(*each, strict=True)]


@pytest.mark.parametrize(
    "turns",
    [
        pytest.param([(1, 4, 16, {"grid_data": 2}), (2, 6, 8, {"grid_z": 2})], marks=pytest.mark.slow),
        pytest.param(
            [
                (1, 4, 16, {}), (2, 8, 8, {"grid_z": 2}), (4, 10, 32, {"grid_pipe": 2, "grid_data": 2}),
                (4, 13, 16, {"grid_data": 2, "grid_z": 2}), (2, 15, 32, {"grid_pipe": 2}),
                (4, 17, 8, {"grid_data": 2, "grid_x": 2}),
            ],
            marks=pytest.mark.slow,
        ),
    ],
    ids=["two grids", "six grids"],
)  # fmt: skip
def test_the_samples_are_those_of_one_uninterrupted_sequence(turns, config, tmp_path):
    """Across grids, numbers of processes and batch sizes: every sample number once, in order."""
    seen = []
    for number, (ranks, steps, batch, options) in enumerate(turns):
        batches = drawn(ranks, config, tmp_path / "run", tmp_path / f"samples{number}", train_steps=steps,
                        train_global_batch=batch, train_schedule="constant", **options)  # fmt: skip
        assert [len(samples) for samples in batches] == [batch] * len(batches)
        seen += [sample for samples in batches for sample in samples]
    assert seen == list(range(len(seen)))
    assert len(seen) == sum(
        batch * (steps - before)
        for (_, steps, batch, _), before in zip(turns, [0, *(turn[1] for turn in turns)], strict=False)
    )
