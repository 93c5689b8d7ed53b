"""Runs that go on: with the masks of their checkpoint, as their settings ask for them, or with a search begun anew."""

from contextlib import closing, contextmanager
from pathlib import Path

import grids
import numpy as np
import optax
import pytest
from commands import said
from flax import nnx

from axonn_jax import GridShape, PruneConfig, Trainer, UserError
from axonn_jax.core.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.core.engines import base
from axonn_jax.core.pruned.masks import keep_count
from axonn_jax.models import ModelShape, Transformer

FROM = "masks of the checkpoint that the run goes on from"
ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    *("--model.layers", "2", "--model.hidden", "16", "--model.heads", "2", "--model.seq_len", "16"),
    *("--train.global_batch", "4", "--train.warmup", "1", "--train.eval_batches", "1", "--checkpoint.every", "0"),
]


@pytest.fixture(scope="module")
def train(prepared, tmp_path_factory):
    """What trains a small model with some flags; it returns what is printed."""
    folder = tmp_path_factory.mktemp("runs")
    (folder / "run.toml").write_text("[model]\n")

    def run(name, *flags, status=0):
        where = ("--data.path", prepared, "--log.dir", folder / name)
        return "".join(said("train", folder / "run.toml", *SMALL, *where, *flags, status=status))

    return run


def test_a_search_that_is_interrupted_says_so_and_a_run_that_was_never_pruned(train):
    search = ["--prune.method", "early_bird", "--prune.density", "0.05", "--prune.every", "1"]
    first = train("search", *search, "--train.steps", "3")
    assert "begins anew" not in first
    assert "warning: this run was never pruned, and all its weights are dense: 5 masks in a row" in first
    again = train("search", *search, "--train.steps", "6", "--prune.threshold", "1")
    assert "step 3: the search for a mask begins anew" in again
    assert "warning: this run was never pruned" in again
    assert "warning: this run was never pruned" in train("search", *search, "--train.steps", "6")  # nothing is left
    last = train("search", *search, "--train.steps", "10", "--prune.threshold", "1")
    assert "step 10: pruned 8 kernels to 0.05" in last
    assert "never pruned" not in last
    assert [text.count("memory of a device") for text in (first, again, last)] == [1, 0, 0]  # no look brings it again


def test_a_pipeline_says_what_is_pruned_and_refuses_another_density(train):
    pipe = ["--prune.density", "0.2", "--grid.pipe", "2", "--train.microbatches", "2"]
    keep_count = "pruned: 1,230 of 6,144 entries of 8 kernels are trained, in 1,230 slots"
    train("dense", "--train.steps", "1")
    assert keep_count in train("dense", *pipe, "--train.steps", "2")
    refused = train("dense", *pipe, "--train.steps", "3", "--prune.density", "0.02", status=2)
    assert f"error: prune.density = 0.02: 0.2002, as the {FROM} keep 1,230 of 6,144 entries" in refused
    assert keep_count in train("dense", *pipe, "--train.steps", "3")


def test_a_run_says_what_is_pruned_behind_a_later_step(train):
    lines = train("late", "--prune.density", "0.2", "--prune.at_step", "1", "--train.steps", "2").splitlines()
    (at,) = (number for number, line in enumerate(lines) if "step 1: pruned 8 kernels to 0.2" in line)
    assert "pruned: 1,230 of 6,144 entries of 8 kernels are trained" in lines[at + 1]


@pytest.fixture
def unreadable(monkeypatch):
    """Steps whose checkpoints pass every check and cannot be read all the same; a test adds to them."""
    steps, real = set(), base.load

    def load(checkpoint, *rest):
        if checkpoint.manifest.step in steps:
            raise CorruptCheckpoint("a disk's fault")
        return real(checkpoint, *rest)

    monkeypatch.setattr(base, "load", load)
    return steps


def test_checkpoints_that_cannot_be_read_give_way_to_the_one_before_or_end_the_run(train, unreadable):
    often = ("--checkpoint.every", "1")
    train("unread", *often, "--train.steps", "2")
    unreadable.add(2)
    again = train("unread", *often, "--train.steps", "3")
    assert "step_00000002 cannot be read: a disk's fault; using the checkpoint before" in again
    assert "resumed at step 1" in again
    unreadable.update((1, 2, 3))
    line = train("unread", "--train.steps", "4", status=2).splitlines()[-1]
    assert line.startswith("error: checkpoint.resume = 'auto': a valid checkpoint, or never to start anew; ")


def test_an_unreadable_checkpoint_of_a_run_that_is_pruned_later_ends_it(train, unreadable):
    prune = ("--prune.density", "0.5", "--prune.at_step", "1", "--checkpoint.every", "1")
    train("unread_later", *prune, "--train.steps", "2")
    unreadable.add(2)
    line = train("unread_later", *prune, "--train.steps", "3", status=2).splitlines()[-1]
    assert line.endswith("step_00000002 cannot be read: a disk's fault")


def made(axes, **prune):
    shape = ModelShape(vocab=64, layers=2, hidden=64, heads=4, kv_heads=4, ffn=64, seq_len=8)
    model = Transformer(shape, rngs=nnx.Rngs(0))
    return Trainer(model, optax.adam(1e-3), grids.lay(axes), microbatches=2, prune=PruneConfig(**prune))


@contextmanager
def saved(axes, folder, **prune):
    """Another such trainer's settings, and the checkpoint of one with these."""
    with closing(made(axes, **prune)) as trainer:
        kernels = {name: np.asarray(value) for name, value in trainer.engine.params.items() if "kernel" in name}
        yield trainer.save(folder, 0), {name: value != 0 for name, value in kernels.items() if "blocks" in name}


PIPELINE = GridShape(pipe=2, y=2)
ONE = pytest.mark.parametrize("axes", [GridShape(), pytest.param(PIPELINE, marks=pytest.mark.slow)], ids=grids.name)


@ONE
def test_masks_keep_what_the_density_asks_for_to_an_entry_and_that_of_the_error_is_accepted(axes, tmp_path):
    assert [keep_count(4096, share) for share in (0.001, 0.0001, 0.0011)] == [4, 1, 5]
    with saved(axes, tmp_path, density=0.001) as (path, _):
        for density in (0.0001, 0.0011):
            line = rf"prune\.density = {density}: 0\.00098, as the {FROM} keep 48 of 49,152 "
            with closing(made(axes, density=density)) as trainer, pytest.raises(UserError, match=line):
                trainer.load(path)
        with closing(made(axes, density=0.00098)) as trainer:
            trainer.load(path)


@pytest.mark.parametrize("axes", [pytest.param(GridShape(), marks=pytest.mark.slow), PIPELINE], ids=grids.name)
def test_masks_of_all_kernels_together_go_on_anywhere(axes, tmp_path):
    with saved(GridShape(), tmp_path, density=0.3, scope="global") as (path, masks):
        assert len({mask.mean() for mask in masks.values()}) > 1
        with closing(made(axes, density=0.3)) as trainer:
            trainer.load(path)
            assert np.isfinite(float(trainer.step(np.zeros((4, 9), np.int32))["loss"]))


@ONE
@pytest.mark.parametrize("file", ["the same", "another", "none", "damaged"])
def test_masks_of_a_file(axes, file, tmp_path):
    with saved(axes, tmp_path, density=0.3) as (path, masks):
        given = str(tmp_path / "masks.npz")
        first = min(masks)
        if file == "another":  # as many entries
            masks[first] = masks[first][::-1]
        if file != "none":
            np.savez(given, **masks)
        with closing(made(axes, method="file", mask_file=given)) as trainer:
            if file == "damaged":
                Path(given).write_bytes(b"no archive")
            if file in ("another", "damaged"):
                reason = f"{FROM}; 1 are not the same, such as that of {first}" if file == "another" else "an .npz file"
                with pytest.raises(UserError, match=r"prune\.mask_file") as refused:
                    trainer.load(path)
                assert reason in str(refused.value)
                return
            if file == "none":
                for use in (lambda: trainer.step(np.zeros((4, 9), np.int32)), lambda: trainer.save(tmp_path, 1)):
                    with pytest.raises(UserError, match=r"prune\.mask_file = .*unless a checkpoint that is loaded has"):
                        use()
            trainer.load(path)
            lines = trainer.pruning.lines()
            assert ("is not there: the masks of the checkpoint go on" in lines[-1]) == (file == "none")
            assert np.isfinite(float(trainer.step(np.zeros((4, 9), np.int32))["loss"]))
            for name, mask in masks.items():
                assert not np.asarray(trainer.engine.params[name])[~mask].any()


@ONE
def test_a_file_that_is_not_there_and_a_checkpoint_without_masks(axes, tmp_path):
    trainer = made(axes, method="file", mask_file=str(tmp_path / "gone.npz"))
    refused = pytest.raises(UserError, match="unless a checkpoint that is loaded has masks")
    with saved(axes, tmp_path) as (path, _), closing(trainer), refused:
        trainer.load(path)


def test_a_run_whose_file_of_masks_is_gone(train, tmp_path):
    words = ["--prune.method", "file", "--prune.mask_file", tmp_path / "gone.npz"]
    refused = train("gone", *words, status=2)
    assert "prune.mask_file = " in refused
    train("goes on", "--prune.density", "0.2", "--train.steps", "1")
    lines = train("goes on", *words, "--train.steps", "2")
    assert "is not there: the masks of the checkpoint go on" in lines
    train("begun", "--train.steps", "1")
    refused = train("begun", *words, "--train.steps", "2", status=2)
    assert "unless a checkpoint that is loaded has masks" in refused
    assert "Traceback" not in refused
