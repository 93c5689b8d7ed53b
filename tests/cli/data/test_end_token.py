"""Tokenizers that are given: their tokens are those of the library, their end is that of data, runs and exports."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pretrained
import pytest
import tokenizers
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from axonn_jax.cli.main import main
from axonn_jax.core.errors import UserError
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.tokenize import ends_of

SETTINGS = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 8192}
KINDS = {
    "qwen": (["<|endoftext|>", "<|im_start|>", "<|im_end|>"], "<|im_end|>", "<|endoftext|>"),
    "llama": (["<unk>", "<s>", "</s>"], {"content": "</s>", "special": True}, "<unk>"),
}
"""Special tokens behind the others, the one that ends a document as its file spells it, and the one that pads."""
SMALL = {"special_tokens_map.json": b"{}", "chat_template.jinja": b"{{ messages }}"}
SMALL |= {"additional_chat_templates/tool_use.jinja": b"{{ tools }}"}


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
    (folder / "additional_chat_templates").mkdir()
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
    (run / "additional_chat_templates").mkdir(parents=True)
    for name in ("merges.txt", "additional_chat_templates/tool_use.jinja", "additional_chat_templates/rag.jinja"):
        (run / name).write_text("of other data")
    assert main(["train", str(tmp_path / "c.toml"), *flags, "--train.steps", "1"]) == 0
    assert files(run) == files(root / "given")
    for name in ("merges.txt", "additional_chat_templates_rag.jinja"):
        assert (run / f"aside_{name}").read_text() == "of other data"
    assert os.listdir(run / "additional_chat_templates") == ["tool_use.jinja"]
    assert main(["convert", str(run), str(tmp_path / "out")]) == 0
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    begin = tokenize.load(root / "given" / "tokenizer.json").token_to_id("<s>")
    assert (config["eos_token_id"], config["bos_token_id"]) == (end, end if begin is None else begin)
    wanted = json.loads((root / "given" / "tokenizer_config.json").read_text())
    assert json.loads((tmp_path / "out" / "tokenizer_config.json").read_text()) == wanted
    for folder in (run, tmp_path / "out"):
        assert ends_of(Path(folder), tokenize.load(folder / "tokenizer.json"), "RUN_DIR") == (end,)


TEXT = (
    "for n in range(12345):\n    print(n)  # caf\u0065\u0301\n\nthe token of the mesh and the shard of the token\n" * 20
)
SPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
GPT4 = pre_tokenizers.Split(Regex(r"\p{N}{1,3}|\p{L}+|\s+|[^\s\p{L}\p{N}]+"), "isolated")


def write(folder, before=None, normalizer=None, end="<|endoftext|>", **model):
    """A tokenizer with one special token, number 0, as the library's tutorial makes them."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = before or pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    if normalizer is not None:
        made.normalizer = normalizer
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        [TEXT],
        trainers.BpeTrainer(vocab_size=330, special_tokens=[end], initial_alphabet=alphabet, show_progress=False),
    )
    raw = json.loads(made.to_str())
    raw["model"] |= model
    if "ignore_merges" in model:
        raw["model"]["vocab"]["\u0120shard"] = len(raw["model"]["vocab"])
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(raw))
    return folder


OF_ONE_SETTING = {
    "ours": {},
    "use_regex": {"before": SPLIT},
    "digits": {"before": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), SPLIT])},
    "gpt-4": {"before": pre_tokenizers.Sequence([GPT4, SPLIT])},
    "nfc": {"normalizer": normalizers.NFC()},
    "prefix space": {"before": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "ignore_merges": {"ignore_merges": True},
    "end_of_word_suffix": {"end_of_word_suffix": "</w>"},
}


@pytest.mark.parametrize("kind", OF_ONE_SETTING)
def test_every_setting_counts(kind, tmp_path):
    folder = write(tmp_path / "given", **OF_ONE_SETTING[kind])
    tokenizer, _, end = tokenize.load_existing(folder, "--tokenizer")
    wanted = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.encode(TEXT).ids == wanted.encode(TEXT).ids
    assert end == 0
    # Only in prompts to a tokenizer of ours is its end's name a text.
    prompt = tokenize.load(folder / "tokenizer.json").encode("<|endoftext|>").ids
    assert (prompt == [0]) == (kind != "ours")


def test_one_that_draws_keeps_doing_so(tmp_path):
    folder = write(tmp_path / "given", dropout=0.5)
    assert tokenize.load(folder / "tokenizer.json").model.dropout == 0.5


def test_data_has_the_tokens_of_the_setting(tmp_path, capsys):
    folder = write(tmp_path / "given", before=SPLIT)
    (tmp_path / "text").mkdir()
    for name in range(5):
        (tmp_path / "text" / f"{name}.txt").write_text(TEXT if name < 4 else "held out")
    argv = ["prepare", str(tmp_path / "text"), str(tmp_path / "data"), "--tokenizer", str(folder), "--holdout", "0.1"]
    assert main(argv) == 0
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    assert np.fromfile(tmp_path / "data" / "train-00000.bin", "uint16").tolist() == [*ids, 0] * 4


def test_another_end_alone_needs_its_name(tmp_path):
    folder = write(tmp_path / "given", end="</s>")
    with pytest.raises(UserError, match=r"an eos_token named in a tokenizer_config\.json"):
        tokenize.load_existing(folder, "--tokenizer")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer, _, end = tokenize.load_existing(folder, "--tokenizer")
    assert (tokenizer.id_to_token(end), end) == ("</s>", 0)
