"""Tokenizers that differ from those of `prepare` in one setting: the tokens are those that the library gives."""

import json

import numpy as np
import pytest
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from axonn_jax.cli.main import main
from axonn_jax.data import tokenize
from axonn_jax.errors import UserError

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


KINDS = {
    "ours": {},
    "use_regex": {"before": SPLIT},
    "digits": {"before": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), SPLIT])},
    "gpt-4": {"before": pre_tokenizers.Sequence([GPT4, SPLIT])},
    "nfc": {"normalizer": normalizers.NFC()},
    "prefix space": {"before": pre_tokenizers.ByteLevel(add_prefix_space=True)},
    "ignore_merges": {"ignore_merges": True},
    "end_of_word_suffix": {"end_of_word_suffix": "</w>"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_setting_counts(kind, tmp_path):
    folder = write(tmp_path / "given", **KINDS[kind])
    tokenizer, _, end = tokenize.load_given(folder, "--tokenizer")
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
        tokenize.load_given(folder, "--tokenizer")
    (folder / "tokenizer_config.json").write_text('{"eos_token": "</s>"}')
    tokenizer, _, end = tokenize.load_given(folder, "--tokenizer")
    assert (tokenizer.id_to_token(end), end) == ("</s>", 0)
