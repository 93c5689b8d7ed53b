"""The commands of a pruned run: train densely, prune, go on on another grid, generate, convert."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import grids
import numpy as np
import pytest
from commands import said

import axonn_jax as ax
from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.grid import GridShape
from axonn_jax.run.tracking.records import read_metrics

ROOT = Path(__file__).resolve().parents[3]
SMALL = [
    *("--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.seq_len", "32"),
    *("--train.global_batch", "8", "--train.warmup", "2", "--checkpoint.every", "0"),
]


def command(*words, status=0):
    out, err = said(*words, status=status)
    return out or err


@pytest.fixture(scope="module")
def runs(prepared, tmp_path_factory):
    """A folder with a dense run of six steps, and what was pruned of it."""
    folder = tmp_path_factory.mktemp("runs")
    dense = ["--data.path", prepared, "--log.dir", folder / "dense", "--train.steps", "6"]
    (folder / "dense.toml").write_text("[model]\n")
    command("train", folder / "dense.toml", *SMALL, *dense)
    result = json.loads(command("prune", folder / "dense", folder / "pruned", "--density", "0.25", "--json"))
    assert result["step"] == 6
    assert result["kept"] == result["of"] // 4
    return folder


def test_goes_on_from_the_step_that_was_pruned(runs):
    said = command("train", runs / "pruned" / "config.toml", "--train.steps", "10", "--grid.data", "2", "--grid.y", "2")
    assert "resumed at step 6" in said
    assert "as train.steps was 6" in said
    assert "of 24,576 entries of 8 kernels are trained" in said
    losses = [record["loss"] for record in read_metrics(runs / "pruned") if "loss" in record]
    assert len(losses) == 4
    assert np.isfinite(losses).all()
    arrays = read(runs / "pruned" / "checkpoints" / "step_00000010").arrays
    assert sum(name.startswith("masks.") for name in arrays) == 8
    words = ["--train.steps", "12", "--prune.density", "0.3"]
    refused = command("train", runs / "pruned" / "config.toml", *words, status=2)
    assert "prune.density = 0.3: 0.25, as the masks of the checkpoint that the run goes on from" in refused
    assert command("generate", runs / "pruned", "--prompt", "def ", "--tokens", "3").startswith("def ")


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
def test_transformers_computes_the_same_with_an_export(runs, tmp_path):
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    command("convert", runs / "pruned", tmp_path / "export")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    kernel = theirs.transformer.h[1].mlp.c_fc.weight.detach().numpy()
    assert np.count_nonzero(kernel) < kernel.size // 2
    text = np.random.default_rng(0).integers(0, 300, (4, 32))
    got = ax.Generator(runs / "pruned", grids.lay(GridShape(y=2))).score(text.tolist())
    with torch.no_grad():
        want = theirs(torch.as_tensor(text)).logits.log_softmax(-1)[:, :-1]
    want = np.take_along_axis(want.numpy(), text[:, 1:, None], -1)[..., 0]
    np.testing.assert_allclose(np.stack(got), want, rtol=0, atol=2e-5)


def test_a_prune_that_fails_leaves_nothing_and_can_be_done_again(runs, tmp_path, monkeypatch):
    words = ["prune", runs / "dense", tmp_path / "new" / "out", "--density", "0.25", "--json"]
    (runs / "dense" / "additional_chat_templates").mkdir()
    (runs / "dense" / "additional_chat_templates" / "tool_use.jinja").write_text("{{ tools }}")
    with monkeypatch.context() as full:
        full.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
        error = command(*words, status=2).splitlines()[-1]
    out = tmp_path / "new" / "out"
    assert error.startswith(f"error: OUT_DIR = '{out}': a place that can be written; the checkpoint of step 6 was not")
    assert f" saved in {out / 'checkpoints'}: no space left on the device" in error
    assert os.listdir(tmp_path) == []
    assert json.loads(command(*words).splitlines()[-1])["step"] == 6
    assert os.listdir(out.parent) == ["out"]
    small = {"tokenizer.json", "tokenizer_config.json", "additional_chat_templates"}
    assert set(os.listdir(out)) == {"config.toml", "checkpoints", *small}
    assert os.listdir(out / "additional_chat_templates") == ["tool_use.jinja"]


def test_what_a_killed_prune_left_goes_and_what_others_put_into_its_place_stays(runs, tmp_path):
    remains = tmp_path / ".out.0123abcd.partial" / "checkpoints" / "unfinished_step_00000006"
    remains.mkdir(parents=True)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "notes.txt").write_text("mine")
    refused = command("prune", runs / "dense", tmp_path / "out", "--density", "0.25", status=2)
    assert "OUT_DIR = " in refused
    assert "'notes.txt' and stays unchanged" in refused
    (tmp_path / "out" / "notes.txt").unlink()
    command("prune", runs / "dense", tmp_path / "out", "--density", "0.25")
    assert os.listdir(tmp_path) == ["out"]


def test_nothing_is_written_that_train_would_refuse(runs, tmp_path):
    shutil.copytree(runs / "dense", tmp_path / "dense")
    config = tmp_path / "dense" / "config.toml"
    config.write_text(config.read_text().replace("pipe = 1", "pipe = 2"))
    refused = command("prune", tmp_path / "dense", tmp_path / "out", "--scope", "global", status=2)
    assert refused == "error: prune.scope = 'global': layer where grid.pipe is above 1: no stage has all weights\n"
    refused = command("prune", runs / "dense", tmp_path / "out", "--mask-file", tmp_path / "none.npz", status=2)
    assert refused.startswith(f"error: prune.mask_file = '{tmp_path}/none.npz': an .npz file of arrays")
    assert os.listdir(tmp_path) == ["dense"]


def test_what_is_pruned_is_not_pruned_again(runs):
    said = command("prune", runs / "pruned", runs / "again", "--density", "0.1", status=2)
    assert "a run that is not pruned yet" in said
    assert not (runs / "again").exists()
    assert "OUT_DIR" in command("prune", runs / "dense", runs / "pruned", status=2)


@pytest.mark.parametrize("fault", ["not a file of arrays", "damaged", "missing", "of another shape", "one more"])
def test_masks_of_a_file_that_do_not_fit(runs, tmp_path, fault):
    path = tmp_path / "masks.npz"
    arrays = read(next((runs / "dense" / "checkpoints").glob("step_*"))).arrays
    names = [name.removeprefix("params.") for name in arrays if name.startswith("params.blocks") and "kernel" in name]
    masks = {name: np.zeros(arrays[f"params.{name}"].shape, bool) for name in sorted(names)}
    first = sorted(names)[0]
    if fault == "missing":
        del masks[first]
    elif fault == "of another shape":
        masks[first] = masks[first][1:]
    elif fault == "one more":
        masks["embedding.table"] = np.zeros((1, 1), bool)
    np.savez(path, **masks)
    if fault == "not a file of arrays":
        path.write_bytes(b"no archive")
    elif fault == "damaged":
        np.savez_compressed(path, **masks)
        raw = bytearray(path.read_bytes())
        raw[80:120] = b"\xff" * 40
        path.write_bytes(raw)
    said = command("prune", runs / "dense", tmp_path / "out", "--mask-file", path, status=2)
    *progress, error = said.splitlines()
    assert error.startswith("error: prune.mask_file = ")
    assert all(line.startswith("reading, 0:") for line in progress)  # on a slow machine
    assert not (tmp_path / "out").exists()
