"""The token that ends a document, from a tokenizer that exists to prepared data, a run, its texts and its export."""

import json
import shutil
from pathlib import Path

import pretrained
import pytest
import tokenizers

from axonn_jax.cli.main import main
from axonn_jax.data import tokenize
from axonn_jax.data.manifest import Manifest
from axonn_jax.data.tokenize import ends_of

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
KINDS = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|endoftext|>"),
    "llama": (["<unk>", "<s>", "</s>"], {"content": "</s>", "special": True}, "<unk>"),
}
"""Special tokens behind the others, the one that ends a document as its file spells it, and the one that pads."""
SMALL = {"special_tokens_map.json": b"{}", "chat_template.jinja": b"{{ messages }}"}


def write_tokenizer(folder, kind):
    folder.mkdir()
    special, end, pad = KINDS[kind]
    made = pretrained.bpe(280)
    made.add_special_tokens(special)
    if kind == "llama":
        begin = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=begin)
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(SETTINGS | {"eos_token": end, "pad_token": pad}))
    for name, raw in SMALL.items():
        (folder / name).write_bytes(raw)
    return made.token_to_id("<|im_end|>" if kind == "qwen" else "</s>")


@pytest.fixture(scope="module", params=KINDS)
def prepared(request, tmp_path_factory):
    """Text, a tokenizer's directory, data prepared with it, and its end."""
    root = tmp_path_factory.mktemp(request.param)
    (root / "text").mkdir()
    for number in range(4):
        (root / "text" / f"{number}.txt").write_text("the token of the mesh and the shard\n" * (20 + number))
    end = write_tokenizer(root / "given", request.param)
    argv = ["prepare", str(root / "text"), str(root / "data"), "--tokenizer", str(root / "given"), "--holdout", "0.3"]
    assert main([*argv, *["--bos"] * (request.param == "llama")]) == 0
    return root, end


def files(folder):
    return {name: (folder / name).read_bytes() for name in ("tokenizer.json", "tokenizer_config.json", *SMALL)}


def again(root, source, name, *more):
    argv = ["prepare", str(root / "text"), str(root / name), "--holdout", "0.3", *more]
    assert main([*argv, "--tokenizer", str(source)]) == 0
    return Manifest.load(root / name).eot_id


def test_prepared_data_has_all_small_files_and_passes_them_on(prepared):
    root, end = prepared
    assert Manifest.load(root / "data").eot_id == end
    assert again(root, root / "data", "second") == end
    assert files(root / "given") == files(root / "data") == files(root / "second")
    assert again(root, root / "data", "second", "--force") == end


def test_data_of_an_earlier_version_has_its_end(prepared, tmp_path):
    root, end = prepared
    shutil.copytree(root / "data", tmp_path / "data")
    for name in ("tokenizer_config.json", *SMALL):
        (tmp_path / "data" / name).unlink()
    shutil.copytree(root / "text", tmp_path / "text")
    assert again(tmp_path, tmp_path / "data", "second") == end
    named = json.loads((tmp_path / "second" / "tokenizer_config.json").read_text())["eos_token"]
    assert tokenize.load(tmp_path / "second" / "tokenizer.json").token_to_id(named) == end
    assert tokenize.files_of(tmp_path / "data").keys() == {"tokenizer.json", "tokenizer_config.json"}


def test_a_run_of_a_tuned_model_ends_texts_as_that_does(prepared, tmp_path):
    """Also one of an earlier version, with the files of the model alone."""
    root, end = prepared
    shutil.copytree(root / "given", tmp_path / "run" / "pretrained")
    tokenizer = tokenize.load(root / "given" / "tokenizer.json")
    assert ends_of(tmp_path / "run", tokenizer, "RUN_DIR") == (end,)
    (tmp_path / "run" / "pretrained" / "tokenizer_config.json").unlink()
    (tmp_path / "run" / "pretrained" / "config.json").write_text(json.dumps({"eos_token_id": [end, 0]}))
    (tmp_path / "run" / "pretrained" / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, end]}))
    assert ends_of(tmp_path / "run", tokenizer, "RUN_DIR") == (end, 0, 5)
    assert tokenize.end_of(tmp_path / "run", tokenizer, "RUN_DIR") == end
    assert ends_of(tmp_path / "run", None, "RUN_DIR") == (end, 0, 5)


def test_a_run_and_its_export_end_texts_as_its_data_does(prepared, tmp_path):
    root, end = prepared
    (tmp_path / "c.toml").write_text("[model]\nlayers = 1\nhidden = 32\nheads = 2\nseq_len = 16\n")
    run = tmp_path / "run"
    flags = ["--data.path", str(root / "data"), "--log.dir", str(run), "--train.global_batch", "4"]
    run.mkdir()
    (run / "merges.txt").write_text("of other data")
    assert main(["train", str(tmp_path / "c.toml"), *flags, "--train.steps", "1"]) == 0
    assert files(run) == files(root / "given")
    assert (run / "aside_merges.txt").read_text() == "of other data"
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    begin = tokenize.load(root / "given" / "tokenizer.json").token_to_id("<s>")
    assert (config["eos_token_id"], config["bos_token_id"]) == (end, end if begin is None else begin)
    wanted = json.loads((root / "given" / "tokenizer_config.json").read_text())
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == wanted
    for folder in (run, tmp_path / "out"):
        assert ends_of(Path(folder), tokenize.load(folder / "tokenizer.json"), "RUN_DIR") == (end,)
