"""From a pretrained directory to a trained run and back: on pipelines and grids, with its own tokenizer and files."""

import json
import shutil
from pathlib import Path

import numpy as np
import pretrained
import pytest
import safetensors.numpy
import tokenizers
from commands import answer, refusal
from hub_server import files_of

from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.huggingface.families import shape_from_config

CONFIG = pretrained.CONFIGS["llama"]
NORM = "model.norm.weight"
SHORT = ["--train.global_batch", "4", "--train.microbatches", "2", "--train.eval_batches", "1", "--model.seq_len", "16"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A pretrained model, data prepared with its tokenizer, and a run of two steps on a pipeline that began from it."""
    root = pretrained.converted(tmp_path_factory.mktemp("pretrained"), pretrained.BF16, files=2)
    data = str(root / "data")
    argv = ["train", str(root / "base" / "config.toml"), "--data.path", data, "--log.dir", str(root / "run"), *SHORT]
    assert main([*argv, "--grid.pipe", "2", "--grid.y", "2", "--train.steps", "2", "--train.lr", "1e-9"]) == 0
    return root


def test_data_has_the_tokens_of_the_tokenizer_given(trained):
    manifest = json.loads((trained / "data" / "manifest.json").read_text())
    tokenizer = tokenizers.Tokenizer.from_file(str(trained / "hf" / "tokenizer.json"))
    assert (trained / "data" / "tokenizer.json").read_bytes() == (trained / "hf" / "tokenizer.json").read_bytes()
    assert manifest["eot_id"] == tokenizer.token_to_id("<|endoftext|>") == 1
    assert manifest["vocab"] == tokenizer.get_vocab_size()
    ids = np.fromfile(trained / "data" / "train-00000.bin", manifest["dtype"])
    assert tokenizer.decode(ids[: list(ids).index(1)].tolist()).startswith("the token of the mesh and the shard\n")


def test_a_run_keeps_the_small_files(trained):
    kept, of_model = files_of(trained / "run" / "pretrained"), files_of(trained / "hf")
    assert kept == {name: of_model[name] for name in kept}
    assert {"config.json", "tokenizer.json", *pretrained.SMALL} == kept.keys()


def test_a_run_begins_from_the_weights_and_goes_back(trained, capsys):
    """With a learning rate of nearly nothing it ends where it began, but for the last bits of float32."""
    told = answer(capsys, "convert", str(trained / "run"), str(trained / "out"))
    assert (told["to"], told["dtype"]) == ("huggingface", "float32")
    got, want = pretrained.read_model(trained / "out"), pretrained.weights(CONFIG, pretrained.BF16)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == np.float32
        # AdamW moves an entry by at most about lr a step, 1e-9, and rounding by half an ulp of at most 2.
        np.testing.assert_allclose(got[name], value.astype(np.float32), rtol=0, atol=2e-9 + 2.0**-23, err_msg=name)
    for name, raw in pretrained.SMALL.items():
        assert (trained / "out" / name).read_bytes() == raw
    assert json.loads((trained / "out" / "config.json").read_text()) == CONFIG  # which says float32


def test_a_run_tells_the_loss_it_began_with(trained):
    lines = [json.loads(line) for line in (trained / "run" / "metrics.jsonl").read_text().splitlines()]
    losses = {line["step"]: line["eval_loss"] for line in lines if "eval_loss" in line}
    assert list(losses) == [0, 2]
    assert losses[0] == pytest.approx(losses[2], rel=1e-6)  # the learning rate is nearly nothing


def test_a_run_goes_on_without_what_it_began_from(trained, tmp_path, capsys):
    run = shutil.copytree(trained / "run", tmp_path / "run")
    gone = (trained / "base").rename(trained / "gone")
    try:
        argv = ["train", str(run / "config.toml"), "--log.dir", str(run)]
        assert main(argv) == 0
        assert "step 2 of 2 is done already" in capsys.readouterr().err
        (run / "checkpoints" / "step_00000002" / "manifest.json").unlink()
        assert f"checkpoint.weights = '{trained / 'base'}'" in refusal(capsys, *argv, alone=False)
        assert (run / "checkpoints" / "step_00000002").is_dir()
    finally:
        gone.rename(trained / "base")


def test_an_export_is_the_checkpoint(trained, capsys):
    """Of a step_N in bf16: what the checkpoint has of each parameter, rounded."""
    step = trained / "run" / "checkpoints" / "step_00000002"
    assert main(["convert", str(step), str(trained / "step"), "--dtype", "bf16", "--shard-size", "0.00005"]) == 0
    from axonn_jax.core.checkpoint.restore import Checkpoint
    from axonn_jax.files.huggingface.from_checkpoint import StoredParameters

    shape = shape_from_config(CONFIG)
    stored = StoredParameters(Checkpoint(step, read(step)), shape, "SOURCE")
    whole = {name: np.concatenate(list(stored.pieces(name))) for name, _, _ in stored.tensors}
    got = pretrained.read_model(trained / "step")
    assert got.keys() == whole.keys()
    for name, value in whole.items():
        assert got[name].tobytes() == value.astype(pretrained.BF16).tobytes(), name
    assert json.loads((trained / "step" / "config.json").read_text()) == CONFIG | {"torch_dtype": "bfloat16"}


def test_generate_reads_any_of_the_directories(trained, capsys):
    words = ("--prompt", "the ", "--tokens", "4", "--temperature", "0")
    texts = [answer(capsys, "generate", trained / name, *words)["text"] for name in ("hf", "base", "run")]
    assert texts[0] == texts[1] == texts[2] != ""


def test_a_model_of_other_sizes_is_one_line(trained, capsys):
    argv = ["train", str(trained / "base" / "config.toml"), "--data.path", str(trained / "data"), *SHORT]
    for flags, says in (
        (["--model.layers", "3", "--model.rope_theta", "5"], "model.layers = 3 (2 there), model.rope_theta = 5.0 (1"),
        (["--model.seq_len", "128"], "a model as [model] says; model.seq_len = 128 (64 there)"),
    ):
        line = refusal(capsys, *argv, "--log.dir", trained / "no", *flags)
        assert line.startswith("error: checkpoint.weights = ")
        assert says in line
    assert not (trained / "no").exists()


@pytest.mark.parametrize("source", ["base", "run"])
def test_a_damaged_tokenizer_is_one_line_before_anything_starts(trained, tmp_path, capsys, source):
    weights = shutil.copytree(trained / source, tmp_path / source)
    folder = weights / "pretrained" if source == "run" else weights
    (folder / "tokenizer.json").write_text('{"model": [[], [[], []]]}')
    argv = ["train", str(trained / "base" / "config.toml"), "--data.path", str(trained / "data"), *SHORT]
    line = refusal(capsys, *argv, "--log.dir", tmp_path / "no", "--checkpoint.weights", weights)
    assert line.startswith(f"error: checkpoint.weights = '{folder / 'tokenizer.json'}': the tokenizer.json of a ")
    assert "this one is damaged" in line
    assert not (tmp_path / "no").exists()


def test_a_weight_that_is_no_number_is_named_when_it_is_read(trained, tmp_path, capsys):
    weights = shutil.copytree(trained / "base", tmp_path / "base")
    (file,) = (path for path in weights.glob("*.safetensors") if NORM in safetensors.numpy.load_file(path))
    tensors = safetensors.numpy.load_file(file)
    tensors[NORM][5] = np.nan
    safetensors.numpy.save_file(tensors, file)
    argv = ["train", str(weights / "config.toml"), "--data.path", str(trained / "data"), *SHORT]
    line = refusal(capsys, *argv, "--log.dir", tmp_path / "no", "--train.steps", "1", alone=False)
    assert (
        line
        == f"error: checkpoint.weights: tensor {NORM} = 'infinite or NaN': finite numbers, which {file.name} has not"
    )
    assert not (tmp_path / "no" / "metrics.jsonl").exists()
    refusal(capsys, "generate", weights, "--prompt", "the ", "--tokens", "1", alone=False)


def test_a_run_does_not_overwrite_its_base(trained, tmp_path, capsys):
    shutil.copytree(trained / "run", tmp_path / "run")
    steps = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    argv = ["train", str(trained / "base" / "config.toml"), "--data.path", str(trained / "data"), *SHORT]
    base, run = str(trained / "base"), str(tmp_path / "run")
    for flags, says in (
        (["--log.dir", base], f"log.dir = '{base}': a directory of its own; a model is in this one"),
        (["--log.dir", run, "--checkpoint.weights", run], f"another directory than checkpoint.weights = {run}"),
        (["--log.dir", run, "--checkpoint.weights", f"{run}/checkpoints/{steps[0]}"], "another directory than"),
    ):
        for more in ([], ["--checkpoint.resume", "never"], ["--lora.rank", "2"]):
            line = refusal(capsys, *argv, *flags, *more)
            assert line.startswith("error: log.dir = ")
            assert says in line
    assert not (trained / "base" / "checkpoints").exists()
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir()) == steps


def test_tokenizers_of_no_use_are_one_line(trained, tmp_path, capsys):
    prepare = ["prepare", str(trained / "text"), str(tmp_path / "data"), "--tokenizer"]
    (tmp_path / "sp").mkdir()
    (tmp_path / "sp" / "tokenizer.model").touch()
    (tmp_path / "bad.json").write_text('{"model": {"type": "nothing"}, "added_tokens": []}')
    (tmp_path / "no_end.json").write_text(
        (trained / "hf" / "tokenizer.json").read_text().replace("<|endoftext|>", "<nothing>")
    )
    for argv, says in (
        ([*prepare, "nowhere"], "--tokenizer = 'nowhere'"),
        ([*prepare, str(trained / "hf"), "--vocab", "300"], "--vocab = 300: not given with --tokenizer"),
        ([*prepare, str(tmp_path / "sp")], "the form of sentencepiece is not read"),
        ([*prepare, str(tmp_path / "bad.json")], "this one is damaged ("),
        ([*prepare, str(tmp_path / "no_end.json")], "an eos_token named in a tokenizer_config.json"),
        (prepare[:-1], "--vocab = (not given): the size of the vocabulary to train; or --tokenizer"),
    ):
        line = refusal(capsys, *argv)
        assert line.startswith("error: --")
        assert says in line
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_of_prepare_that_transformers_saved_again_is_taken(trained, tmp_path):
    """transformers adds a template that adds nothing; one that adds a token, or a space, is another tokenizer."""
    prepare = ["prepare", str(trained / "text"), str(tmp_path / "own"), "--holdout", "0.3"]
    assert main([*prepare, "--vocab", "260"]) == 0
    raw = json.loads((tmp_path / "own" / "tokenizer.json").read_text())
    single = [{"Sequence": {"id": "A", "type_id": 0}}]
    raw["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": single, "special_tokens": {}}
    (tmp_path / "saved.json").write_text(json.dumps(raw))
    prepare[2] = str(tmp_path / "again")
    assert main([*prepare, "--tokenizer", str(tmp_path / "saved.json")]) == 0
    shards = [(tmp_path / name / "train-00000.bin").read_bytes() for name in ("own", "again")]
    assert shards[0] == shards[1]
    raw["pre_tokenizer"]["add_prefix_space"] = True
    (tmp_path / "saved.json").write_text(json.dumps(raw))
    prepare[2] = str(tmp_path / "third")
    assert main([*prepare, "--tokenizer", str(tmp_path / "saved.json")]) == 0
    assert (tmp_path / "third" / "train-00000.bin").read_bytes() != shards[0]


def test_data_of_another_tokenizer_is_told(trained, tmp_path, capsys):
    other = str(tmp_path / "data")
    assert main(["prepare", str(trained / "text"), other, "--vocab", "260", "--holdout", "0.3"]) == 0
    argv = ["train", str(trained / "base" / "config.toml"), "--data.path", other, "--log.dir", str(tmp_path / "run")]
    assert main([*argv, *SHORT, "--train.steps", "1"]) == 0
    assert f"prepared with another tokenizer than that of {trained / 'base'}" in capsys.readouterr().err


def test_a_tokenizer_longer_than_the_table_serves_where_no_text_has_the_rest(trained, tmp_path, capsys):
    """A padding token behind the table's last row, of a model as of its mirror."""
    shutil.copytree(trained / "base", tmp_path / "base")
    longer, table = tokenizers.Tokenizer.from_file(str(tmp_path / "base" / "tokenizer.json")), CONFIG["vocab_size"]
    names = [f"[{number}]" for number in range(table - longer.get_vocab_size())]
    longer.add_special_tokens([*names, "[PAD]"])
    longer.save(str(tmp_path / "base" / "tokenizer.json"))
    prepare = ["prepare", str(trained / "text"), str(tmp_path / "data"), "--holdout", "0.3", "--tokenizer"]
    assert main([*prepare, str(tmp_path / "base")]) == 0
    manifest = Manifest.load(tmp_path / "data")
    used = {int(id) for name in ("train", "valid") for id in np.fromfile(manifest.path / f"{name}-00000.bin", "uint16")}
    assert (manifest.vocab, manifest.used) == (table + 1, max(used) + 1)
    argv = ["train", str(tmp_path / "base" / "config.toml"), "--data.path", str(tmp_path / "data"), *SHORT]
    argv += ["--log.dir", str(tmp_path / "run"), "--train.steps", "1"]
    assert main(argv) == 0
    assert "another tokenizer" not in capsys.readouterr().err
    generate = ["generate", str(tmp_path / "run"), "--tokens", "2", "--prompt"]
    assert main([*generate, "the "]) == 0
    says = f"error: --prompt = '[PAD]': a prompt of tokens below model.vocab = {table}; this one has {table}"
    assert refusal(capsys, *generate, "the [PAD]", alone=False) == says
    says = f"error: model.vocab = {max(used)}: at least {max(used) + 1}, or data without token {max(used)}"
    assert refusal(capsys, *argv, "--model.vocab", max(used), alone=False) == says


def test_a_model_from_scratch_gets_config_and_tokenizer(trained, tmp_path, capsys):
    data, run = str(tmp_path / "data"), str(tmp_path / "run")
    assert main(["prepare", str(trained / "text"), data, "--vocab", "260", "--holdout", "0.3"]) == 0
    (tmp_path / "new.toml").write_text("[model]\nlayers = 1\nhidden = 32\nheads = 2\nseq_len = 16\n")
    flags = ["--data.path", data, "--log.dir", run, "--train.steps", "1", "--train.global_batch", "4"]
    assert main(["train", str(tmp_path / "new.toml"), *flags]) == 0
    assert main(["convert", run, str(tmp_path / "out")]) == 0
    made = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (made["model_type"], made["vocab_size"], made["eos_token_id"]) == ("gpt2", 260, 0)
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (Path(data) / "tokenizer.json").read_bytes()
    settings = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert settings["eos_token"] == "<|endoftext|>"
    state = pretrained.read_model(tmp_path / "out")
    assert sum(value.size for value in state.values()) == shape_from_config(made).params()
    other = str(tmp_path / "other")
    assert main(["prepare", str(trained / "text"), other, "--vocab", "259", "--holdout", "0.3"]) == 0
    flags[1::2] = [other, str(tmp_path / "tuned"), *flags[5::2]]
    base = ["--checkpoint.weights", run, "--model.vocab", "260"]
    assert main(["train", str(tmp_path / "new.toml"), *flags, *base]) == 0
    says = f"{other} was prepared with another tokenizer than that of {run}; `axonn-jax prepare --tokenizer"
    assert says in capsys.readouterr().err
