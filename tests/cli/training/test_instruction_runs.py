"""Runs on packed rows of instructions: a torch loop's losses on any grid, and the same rows when resumed on another."""

import shutil
from dataclasses import replace

import instruction_data
import jax
import numpy as np
import optax
import pretrained
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax import GridShape, Loader
from axonn_jax.cli.main import main
from axonn_jax.core.grid import build_grid
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.files.data.instructions.chat import ChatTemplate
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import Alpaca
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.run.tracking.records import read_metrics

SEQ, BATCH, STEPS, RATE = 48, 8, 3, 0.1
CONFIG = pretrained.CONFIGS["llama"] | {"vocab_size": 512}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A pretrained model, and rows of instructions made with its tokenizer."""
    root = tmp_path_factory.mktemp("instructions")
    pretrained.write_model(root / "hf", CONFIG, pretrained.weights(CONFIG))
    instruction_data.tokenizer(root / "hf")
    (root / "hf" / "chat_template.jinja").unlink()
    shutil.rmtree(root / "hf" / "additional_chat_templates")
    source = instruction_data.write(root / "data.jsonl", instruction_data.rows(150))
    options = InstructionOptions(SEQ, "chat")
    prepare_instructions(source, root / "rows", options, tokenizer=root / "hf", holdout=0.2)
    return root


def batches(root):
    """Three batches of a run, whose microbatches have uneven counts, and those of its evaluation."""
    loader = Loader(root / "rows", seq_len=SEQ, global_batch=BATCH, seed=1)
    train = [next(loader) for _ in range(STEPS)]
    loader.close()
    counts = [[int((row >> 30 & 1 & (row >= 0)).sum()) for row in batch] for batch in train]
    assert all(len({sum(pair) for pair in zip(batch[::2], batch[1::2], strict=True)}) > 1 for batch in counts)
    valid = Loader(root / "rows", split="valid", seq_len=SEQ, global_batch=BATCH, shuffle=False)
    return train, valid.first(9)


def padded(torch, batch):
    """The documents of packed rows apart, padded to the longest; labels are -100 where no target counts."""
    found = []
    for row in batch.tolist():
        for word in row:
            if word < 0:
                found.append([])
            found[-1].append(word)
    found = [words for words in found if any(word >> 30 & 1 for word in words[1:]) and min(words) != -1]
    ids, mask, labels = (torch.full((len(found), max(map(len, found))), fill) for fill in (0, 0, -100))
    for at, words in enumerate(found):
        ids[at, : len(words)] = torch.tensor([word & 0xFFFFFF for word in words])
        labels[at, : len(words)] = torch.tensor([word & 0xFFFFFF if word >> 30 & 1 else -100 for word in words])
        mask[at, : len(words)] = 1
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


@pytest.fixture(scope="module")
def losses(place):
    """The loop that everybody writes, of transformers in torch: losses of three steps and the mean held-out loss."""
    torch, transformers = (pytest.importorskip(name) for name in ("torch", "transformers"))
    model = transformers.AutoModelForCausalLM.from_pretrained(place / "hf", attn_implementation="eager")
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    train, held = batches(place)
    found = []
    for batch in train:
        optimizer.zero_grad()
        loss = model(**padded(torch, batch)).loss
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    total = count = 0.0
    with torch.no_grad():
        for given in (padded(torch, batch) for batch in held):
            number = int((given["labels"][:, 1:] >= 0).sum())
            total, count = total + model(**given).loss.item() * number, count + number
    return found, total / count


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param({"data": 2}, marks=pytest.mark.slow),
        {"pipe": 2, "data": 2},
        pytest.param({"pipe": 2, "y": 2}, marks=pytest.mark.slow),
        pytest.param({"z": 2, "x": 2}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_losses_are_those_of_torch_with_labels_of_minus_100(place, losses, axes):
    want, want_held_out = losses
    shape = GridShape(**axes)
    grid = build_grid(shape, jax.devices()[: shape.devices])
    trainer = ax.Trainer(
        lambda: Transformer(ax.models.shape_of(place / "hf"), rngs=nnx.Rngs(0), packed=True),
        optax.sgd(RATE),
        grid,
        microbatches=4,
        memory=ax.MemoryConfig(precision="fp32"),
    )
    trainer.load(place / "hf", weights_only=True)
    train, held = batches(place)
    got = [float(trainer.step(batch)["loss"]) for batch in train]
    got_held_out = trainer.evaluate(held)
    trainer.close()
    # Sums over some hundred targets in another order, after steps of which each is rounded.
    np.testing.assert_allclose(got, want, rtol=3e-6)
    assert got_held_out == pytest.approx(want_held_out, rel=3e-6)


def run(root, log, steps, *flags):
    argv = ["train", str(root / "run.toml"), "--log.dir", str(log), "--train.steps", str(steps), *flags]
    return main(argv)


def read(log):
    records = read_metrics(log)
    trained = {r["step"]: r["loss"] for r in records if "loss" in r}
    (held,) = [r["eval_loss"] for r in records if r["step"] == 4 and "eval_loss" in r]
    return [trained[step] for step in range(1, 5)], held


def test_a_run_resumed_on_another_grid_reads_the_same_rows(place, tmp_path, capfd):
    lines = [f"[model]\nseq_len = {SEQ}\nvocab = 512\nlayers = 1\nhidden = 32\nheads = 4\npositions = 'rope'"]
    lines += [f"[data]\npath = '{place / 'rows'}'\n[train]\nglobal_batch = 8\nmicrobatches = 4\nlr = 1e-2"]
    lines += ["schedule = 'constant'\neval_batches = 9\n[goldfish]\nk = 8\nh = 2"]
    (place / "run.toml").write_text("\n".join(lines))
    assert run(place, tmp_path / "whole", 4) == 0
    assert "packed rows: " in capfd.readouterr().err
    assert run(place, tmp_path / "parts", 2, "--grid.data", "2", "--memory.zero", "1") == 0
    assert run(place, tmp_path / "parts", 4, "--grid.pipe", "2", "--memory.offload", "optimizer") == 0
    (want, want_held_out), (got, got_held_out) = read(tmp_path / "whole"), read(tmp_path / "parts")
    np.testing.assert_allclose(got, want, rtol=1e-5)
    assert got_held_out == pytest.approx(want_held_out, rel=1e-5)
    entropy = Manifest.load(place / "rows").unigram_entropy
    assert {r["unigram_entropy"] for r in read_metrics(tmp_path / "whole") if "eval_loss" in r} == {entropy}


@pytest.mark.parametrize("adapters", [(), ("--lora.rank", "2")], ids=["whole", "adapters"])
def test_an_exported_run_is_asked_by_the_template_of_its_training(place, tmp_path, adapters):
    """Not by its base's own, of which one is for tools."""
    assert main(["convert", str(place / "hf"), str(tmp_path / "base")]) == 0
    (tmp_path / "base" / "additional_chat_templates").mkdir()
    for name in ("chat_template.jinja", "additional_chat_templates/tool_use.jinja"):
        (tmp_path / "base" / name).write_text(instruction_data.CHATML)
    prepare_instructions(
        place / "data.jsonl",
        tmp_path / "rows",
        InstructionOptions(SEQ, "alpaca", too_long="cut"),
        tokenizer=tmp_path / "base",
    )
    words = ["--data.path", str(tmp_path / "rows"), "--model.seq_len", str(SEQ), "--train.steps", "1", *adapters]
    config = str(tmp_path / "base" / "config.toml")
    assert main(["train", config, "--log.dir", str(tmp_path / "run"), "--train.global_batch", "2", *words]) == 0
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), *["--merge"][: len(adapters)]]) == 0
    talk = [{"role": "user", "content": "the grid"}]
    asked, own = (ChatTemplate.of(tmp_path / name, "--chat", True).text(talk) for name in ("out", "base"))
    assert asked == Alpaca().passages(Conversation([*talk, {"role": "assistant", "content": ""}]), ())[0].text != own
    asked, own = (ChatTemplate.of(tmp_path / name, "--chat", True).text(talk, []) for name in ("out", "base"))
    assert asked == ChatTemplate.of(tmp_path / "out", "--chat", True).text(talk) != own


def test_rows_are_other_data_than_a_stream_of_the_same_words(place):
    rows = Manifest.load(place / "rows")
    stream = replace(rows, version=1, kind="tokens", row=0)
    assert len({rows.fingerprint("train"), stream.fingerprint("train"), rows.fingerprint("valid")}) == 3
