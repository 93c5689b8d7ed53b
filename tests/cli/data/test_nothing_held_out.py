"""`--holdout 0`: all is trained on, and a run does not evaluate, or says at its start that it cannot."""

import instruction_data
import pytest
from commands import answer, refusal
from instruction_data import all_documents

from axonn_jax import Loader, UserError
from axonn_jax.cli.main import main
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare
from axonn_jax.run.tracking.records import read_metrics

SEQ = 32
CONFIG = "[model]\nlayers = 1\nhidden = 32\nheads = 2\nseq_len = 32\n[train]\nsteps = 2\nglobal_batch = 8\n"


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Rows of which nothing is held out, the same with a file of held-out ones, and a configuration."""
    root = tmp_path_factory.mktemp("all")
    (root / "run.toml").write_text(CONFIG)
    folder = instruction_data.tokenizer(root / "tok")
    rows = [{"input_ids": [*range(5, 30), 30 + n]} for n in range(24)]
    source, valid = (instruction_data.write(root / f"{n}.jsonl", part) for n, part in enumerate((rows[:18], rows[18:])))
    for name, file in (("rows", None), ("both", valid)):
        options = InstructionOptions(SEQ, valid=file)
        prepare_instructions(source, root / name, options, tokenizer=folder, holdout=0)
    return root


def test_every_conversation_is_trained_on(place):
    manifest, both = Manifest.load(place / "rows"), Manifest.load(place / "both")
    assert [split.documents for split in manifest.splits.values()] == [18, 0]
    assert [split.documents for split in both.splits.values()] == [18, 6]
    assert manifest.unigram_entropy == 0 < both.unigram_entropy
    assert manifest.fingerprint("train") == both.fingerprint("train")
    manifest.verify()
    assert len(all_documents(both, SEQ)) == 24
    with pytest.raises(
        UserError, match=r"^data.path = .*rows': data with a valid split that is not empty; see `prepare --holdout`"
    ):
        Loader(place / "rows", split="valid", seq_len=SEQ, global_batch=1)


@pytest.mark.parametrize("texts", [["one two"] * 3, ["x"], ["a long text\n" * 99, "b"]])
def test_every_text_is_trained_on(place, tmp_path, texts, capsys):
    """Also one that is alone, or all alike, or longer than all others together."""
    (tmp_path / "text").mkdir()
    for number, text in enumerate(texts):
        (tmp_path / "text" / f"{number}.txt").write_text(text)
    argv = ["prepare", *map(str, (tmp_path / "text", tmp_path / "out", "--holdout", 0, "--tokenizer", place / "tok"))]
    assert main(argv) == 0
    assert "\nnothing is held out: runs do not evaluate\n" in capsys.readouterr().out
    assert answer(capsys, *argv, "--force")["unigram_entropy"] is None
    manifest = Manifest.load(tmp_path / "out")
    assert [split.documents for split in manifest.splits.values()] == [len(texts), 0]
    assert manifest.splits["train"].bytes == sum(map(len, texts))


def test_what_is_no_share_and_what_has_no_row(place, tmp_path):
    (tmp_path / "text").write_text("x")
    for share in (-0.1, 1, float("nan")):
        with pytest.raises(UserError, match=r"--holdout = .*below 1; 0 holds nothing out"):
            prepare(tmp_path / "text", tmp_path / "out", tokenizer=place / "tok", holdout=share)
    (tmp_path / "none.jsonl").touch()
    for valid in (None, place / "1.jsonl"):
        options = InstructionOptions(SEQ, valid=valid)
        with pytest.raises(UserError, match=r"^SOURCE = .*none.jsonl': at least one row$"):
            prepare_instructions(tmp_path / "none.jsonl", tmp_path / "out", options, tokenizer=place / "tok", holdout=0)


def words(place, run, data, *more):
    return [*map(str, ("train", place / "run.toml", "--data.path", place / data, "--log.dir", run, *more))]


def test_a_run_evaluates_only_with_held_out_rows_and_goes_on_without(place, tmp_path, capsys):
    asked = ("--train.eval_every", 1, "--train.schedule", "constant")
    line = refusal(capsys, *words(place, tmp_path / "run", "rows", *asked))
    assert line.startswith("error: train.eval_every = 1: 0, or data with a valid split; that of ")
    assert not (tmp_path / "run").exists()
    assert main(words(place, tmp_path / "run", "both", *asked)) == 0
    assert main(words(place, tmp_path / "run", "rows", "--train.steps", 4, *asked[2:])) == 0
    assert "nothing of the data is held out: the run does not evaluate" in capsys.readouterr().err
    records = read_metrics(tmp_path / "run")
    assert [record["step"] for record in records if "eval_loss" in record] == [1, 2]
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert (tmp_path / "run" / "loss.png").exists()
    assert "error: --data = " in refusal(capsys, "loki", tmp_path / "run", "--data", place / "rows")
