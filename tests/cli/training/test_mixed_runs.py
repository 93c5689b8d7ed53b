"""Runs on corpora mixed by weight: the same rows on any grid and resumed, the run of a path, losses by name."""

import os
import signal
from pathlib import Path

import instruction_data
import mixed
import numpy as np
import pytest
from commands import refusal
from launched import UNDER_MPIRUN, Launched, command, complete, flags

from axonn_jax.cli.main import main
from axonn_jax.files.data.corpora import Corpora
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.run.tracking.records import read_metrics

STEPS, BATCH, SEQ = 4, 8, 16
CONFIG = """
[model]
layers = 1
hidden = 32
heads = 4
seq_len = 16
[data]
mix = {code = 0.7, text = 0.3}
held_out = {sums = "math"}
[train]
steps = 4
global_batch = 8
microbatches = 4
lr = 1e-2
schedule = "constant"
eval_batches = 9
"""
ALONE = {"data_mix": "", "data_held_out": ""}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Three corpora of one tokenizer, and a configuration; relative paths are below it."""
    root = tmp_path_factory.mktemp("mixed")
    (root / "run.toml").write_text(CONFIG)
    mixed.write(root, "code", vocab=280)
    for name in ("text", "math"):
        mixed.write(root, name, tokenizer="code")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield root


def run(log, **options):
    assert main(["train", "run.toml", *flags({"log_dir": log, **options})]) == 0
    return read_metrics(Path(log))


def curve(records):
    """Losses of all steps, and what the last evaluation wrote down."""
    (held,) = [r for r in records if r["step"] == STEPS and "eval_loss" in r]
    return [r["loss"] for r in records if "loss" in r], {key: own for key, own in held.items() if key != "step"}


def same(records, others):
    (losses, held), (want, want_held) = curve(records), curve(others)
    np.testing.assert_allclose(losses, want, rtol=1e-5)
    assert held == pytest.approx(want_held, rel=1e-5)


@pytest.fixture(scope="module")
def whole(root):
    """A run on one device, from its first step to its last."""
    return run("whole")


def test_a_run_resumed_on_another_grid_reads_the_same_rows(whole, tmp_path, capfd):
    run(tmp_path, train_steps=2, grid_data=2, memory_zero=1)
    records = run(tmp_path, data_mix="text=3,code=7", grid_pipe=2)
    same(records, whole)
    epochs = Corpora.load("", {"code": 0.7, "text": 0.3}, {}).epochs(STEPS * BATCH, SEQ)
    last = [record for record in records if "loss" in record][-1]
    assert {name: last[f"epochs/{name}"] for name in ("code", "text")} == epochs
    said = capfd.readouterr().err
    assert f", {epochs['code']:.3g} epochs of code, {epochs['text']:.3g} epochs of text; " in said
    words = ["train", "run.toml", *flags({"log_dir": tmp_path, "data_mix": "code=7,text=4"})]
    assert "data.mix = {'code': 7.0, 'text': 4.0}: the data and the mix that " in refusal(capfd, *words, alone=False)


def test_losses_by_name_are_those_of_the_directories_alone(whole, tmp_path, capfd):
    """Those of a run of each that begins with the weights; which also continue a prompt."""
    held = curve(whole)[1]
    names = {"code": "code", "text": "text", "sums": "math"}
    assert [*held] == ["eval_loss", "unigram_entropy", *(f"eval_loss/{name}" for name in names)]
    assert held["eval_loss"] == pytest.approx(0.7 * held["eval_loss/code"] + 0.3 * held["eval_loss/text"])
    for name in ("text", "sums"):
        records = run(tmp_path / name, **ALONE, data_path=names[name], train_steps=1, checkpoint_weights="whole")
        assert [*records[0]] == ["step", "eval_loss", "unigram_entropy"]
        assert records[0]["eval_loss"] == pytest.approx(held[f"eval_loss/{name}"], rel=1e-6)
    capfd.readouterr()
    assert main(["generate", "whole", "--prompt", "def ", "--tokens", "4"]) == 0


def test_one_corpus_is_the_run_of_its_path(root, tmp_path):
    """Also of a checkpoint that was saved by the path."""
    timed = ("tokens_per_s", "step_s")
    options = {"data_held_out": "", "train_epochs": 0.5}
    plain = run(tmp_path / "path", **options, data_mix="", data_path="text")
    alone = run(tmp_path / "mix", **options, data_mix="text=3")
    assert [{k: v for k, v in r.items() if k not in timed} for r in plain] == [
        {k: v for k, v in r.items() if k not in timed} for r in alone
    ]
    assert len(run(tmp_path / "path", **options | {"train_epochs": 0.7}, data_mix="text=1")) > len(plain)


def test_without_a_held_out_split_a_corpus_is_not_evaluated_and_a_set_is_refused(root, tmp_path, capfd):
    every = mixed.write(tmp_path, "code", tokenizer=root / "code", holdout=0)
    line = refusal(capfd, "train", "run.toml", *flags({"data_held_out": f"x={every}"}))
    assert f"data.held_out = '{every}': data with a valid split that is not empty" in line
    (held,) = [r for r in run(tmp_path / "run", data_mix=f"{every}=1", train_steps=1) if "eval_loss" in r]
    assert held["eval_loss"] == held["eval_loss/sums"]
    line = refusal(capfd, "train", "run.toml", *flags({**ALONE, "data_mix": f"{every}=1", "train_eval_every": 1}))
    assert f"train.eval_every = 1: 0, or data with a valid split; that of '{every}' is empty" in line


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"grid_data": 2, "grid_x": 2}, {"grid_pipe": 2, "grid_data": 2}], ids=str)
def test_packed_rows_are_mixed_on_any_grid(root, tmp_path, axes):
    instruction_data.tokenizer(tmp_path / "tok")
    for at, name in enumerate(("rows", "chat")):
        source = instruction_data.write(tmp_path / f"{name}.jsonl", instruction_data.rows(120)[at::2])
        prepare_instructions(source, tmp_path / name, InstructionOptions(48), tokenizer=tmp_path / "tok", holdout=0.2)
    options = {**ALONE, "data_mix": f"{tmp_path / 'rows'}=2,{tmp_path / 'chat'}=1", "model_seq_len": 48}
    options |= {"model_positions": "rope", "goldfish_k": 4, "goldfish_h": 2}
    same(run(tmp_path / "grid", **options, **axes), run(tmp_path / "plain", **options))


@pytest.mark.slow
@pytest.mark.mpi
@UNDER_MPIRUN[1]
def test_a_killed_run_of_two_processes_goes_on_in_one(whole, tmp_path):
    words = {"train_steps": 400, "checkpoint_every": 2, "checkpoint_keep_every": 2, "grid_data": 2}
    with Launched(command("run.toml", tmp_path / "run", 2, **words), tmp_path) as launched:
        launched.until(lambda: complete(tmp_path / "run") >= 2, "a checkpoint")
        os.kill(launched.ranks()[1], signal.SIGKILL)
        launched.wait_until_gone(60)
    same(run(tmp_path / "run", checkpoint_resume=tmp_path / "run" / "checkpoints" / "step_00000002"), whole)
