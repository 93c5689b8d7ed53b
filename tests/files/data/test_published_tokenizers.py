"""Tokenizers in the shapes of ten published models, shrunk: their tokens are transformers', whatever file names one."""

import json
import os
import re
from functools import cache

import instruction_data
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from axonn_jax.core.errors import UserError
from axonn_jax.files.data import tokenize

TEXT = "the token of the mesh: it's 12345 caf\u00e9s, and the shard of the token\n\n    return  x;\n"
TURN, TOOL = "<|turn|>", "[tool]"  # added by the further files: the first is special, the second a text as any

LLAMA3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
LLAMA3 += r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
QWEN = LLAMA3.replace("{1,3}", "")
DEEPSEEK = (r"\p{N}{1,3}", r"[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", r" ?\p{L}+| ?[^\s\p{L}\p{N}]+[\r\n]*|\s+")


def splits(*patterns):
    """A split by each pattern, and bytes."""
    parts = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    return pre_tokenizers.Sequence([*parts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@cache
def trained(kind):
    """The vocabulary and merges of a BPE over bytes, or over characters with the bytes as tokens."""
    made = Tokenizer(models.BPE())
    if kind == "bytes":
        made.pre_tokenizer, alphabet = (
            pre_tokenizers.ByteLevel(add_prefix_space=False),
            pre_tokenizers.ByteLevel.alphabet(),
        )
    else:
        made.pre_tokenizer, alphabet = pre_tokenizers.Metaspace(), []
    trainer = trainers.BpeTrainer(vocab_size=330, initial_alphabet=sorted(alphabet), show_progress=False)
    made.train_from_iterator([TEXT.replace("\u00e9", "e") if kind == "pieces" else TEXT] * 9, trainer)
    raw = json.loads(made.to_str())["model"]
    return sorted(raw["vocab"], key=raw["vocab"].get), [tuple(pair) for pair in raw["merges"]]


def bytes_bpe(special, before, normalizer=None, **model):
    """A byte-level BPE with special tokens behind its vocabulary."""
    words, merges = trained("bytes")
    made = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, merges, **model))
    made.pre_tokenizer, made.decoder = before, decoders.ByteLevel()
    if normalizer:
        made.normalizer = normalizer
    made.add_special_tokens([AddedToken(text, special=True) for text in special])
    return made


def pieces_bpe(special, before=None, normalizer=None):
    """A BPE as SentencePiece makes them, with special tokens and bytes in front."""
    words, merges = trained("pieces")
    words = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {word: number for number, word in enumerate(words)}
    made = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    if before:
        made.pre_tokenizer = before
    if normalizer:
        made.normalizer = normalizer
    made.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in special])
    return made


def beginning(made, text):
    """A tokenizer that puts a token before each text."""
    made.post_processor = processors.TemplateProcessing(f"{text} $A", special_tokens=[(text, made.token_to_id(text))])
    return made


def prepend():
    return normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])


def first():
    return pre_tokenizers.Metaspace(prepend_scheme="first", split=False)


SPACES = pre_tokenizers.Split(" ", "merged_with_previous")
OLD = ["<unk>", "<s>", "</s>"]
FILL = ["\u2581<PRE>", "\u2581<MID>", "\u2581<SUF>", "\u2581<EOT>"]
GEMMA = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
OF_OLD = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
OF_QWEN = {"eos_token": "<|endoftext|>", "pad_token": "<|endoftext|>", "unk_token": None, "bos_token": None}
LLAMA3_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>"]
DEEPSEEK_SPECIAL = ["<\uff5cbegin\u2581of\u2581sentence\uff5c>", "<\uff5cend\u2581of\u2581sentence\uff5c>"]
SHAPES = {
    "llama-2": (
        "llama",
        lambda: beginning(pieces_bpe(OLD, normalizer=prepend()), "<s>"),
        OF_OLD | {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    ),
    "llama-3": (
        "llama",
        lambda: beginning(bytes_bpe(LLAMA3_SPECIAL, splits(LLAMA3), ignore_merges=True), LLAMA3_SPECIAL[0]),
        {"bos_token": LLAMA3_SPECIAL[0], "eos_token": LLAMA3_SPECIAL[1], "tokenizer_class": "PreTrainedTokenizerFast"},
    ),
    "mistral": (
        "mistral",
        lambda: beginning(pieces_bpe(OLD, first()), "<s>"),
        OF_OLD | {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    ),
    "qwen-2": (
        "qwen2",
        lambda: bytes_bpe(["<|endoftext|>"], splits(QWEN), normalizers.NFC()),
        OF_QWEN | {"tokenizer_class": "Qwen2Tokenizer"},
    ),
    "qwen-3": (
        "qwen3",
        lambda: bytes_bpe(["<|endoftext|>", "<think>"], splits(QWEN), normalizers.NFC()),
        OF_QWEN | {"tokenizer_class": "Qwen2Tokenizer", "split_special_tokens": False},
    ),
    "gemma": (
        "gemma",
        lambda: beginning(
            pieces_bpe(GEMMA, pre_tokenizers.Split(" ", "merged_with_previous"), normalizers.Replace(" ", "\u2581")),
            "<bos>",
        ),
        {f"{name[1:-1]}_token": name for name in GEMMA} | {"tokenizer_class": "GemmaTokenizer"},
    ),
    "phi-3": (
        "phi3",
        lambda: beginning(pieces_bpe(OLD, normalizer=prepend()), "<s>"),
        OF_OLD | {"tokenizer_class": "LlamaTokenizer", "legacy": False},
    ),
    "gpt-2": (
        "gpt2",
        lambda: bytes_bpe(["<|endoftext|>"], pre_tokenizers.ByteLevel(add_prefix_space=False)),
        {f"{name}_token": "<|endoftext|>" for name in ("bos", "eos", "unk")} | {"tokenizer_class": "GPT2Tokenizer"},
    ),
    "codellama": (
        "llama",
        lambda: beginning(pieces_bpe([*OLD, *FILL], normalizer=prepend()), "<s>"),
        OF_OLD
        | {"tokenizer_class": "CodeLlamaTokenizer", "fill_token": "<FILL_ME>", "additional_special_tokens": FILL},
    ),
    "deepseek": (
        "deepseek_v3",
        lambda: beginning(bytes_bpe(DEEPSEEK_SPECIAL, splits(*DEEPSEEK)), DEEPSEEK_SPECIAL[0]),
        {"bos_token": DEEPSEEK_SPECIAL[0], "eos_token": DEEPSEEK_SPECIAL[1], "tokenizer_class": "LlamaTokenizerFast"},
    ),
}


def entry(text):
    return {"content": text, "special": text == TURN} | dict.fromkeys(
        ("lstrip", "rstrip", "single_word", "normalized"), False
    )


def write(folder, shape, where):
    """A directory of a shape, whose last two tokens only the file `where` names."""
    model_type, make, settings = SHAPES[shape]
    made, settings = make(), dict(settings)
    size = made.get_vocab_size()
    own = made.get_added_tokens_decoder().items()
    if where == "tokenizer.json":
        made.add_tokens([AddedToken(text, special=text == TURN, normalized=False) for text in (TURN, TOOL)])
    folder.mkdir()
    if where == "tokenizer_config.json":
        settings["added_tokens_decoder"] = {number: entry(text.content) | {"special": True} for number, text in own}
        settings["added_tokens_decoder"] |= {size: entry(TURN), size + 1: entry(TOOL)}
    if where == "added_tokens.json":
        (folder / where).write_text(json.dumps({TOOL: size + 1, TURN: size}))
        (folder / "special_tokens_map.json").write_text(
            json.dumps({"turn_token": TURN, "eos_token": settings["eos_token"]})
        )
    (folder / "tokenizer.json").write_text(made.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return folder


@pytest.fixture(scope="module")
def oracle():
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained


FILES = ("tokenizer.json", "tokenizer_config.json", "added_tokens.json")
TEXTS = (TEXT, f"{TURN}user\n{TEXT}{TURN}", f"a{TOOL} b {TURN} c{TURN}{TOOL}{TEXT}", f"{TOOL}x")


TEMPLATE = "{% for m in messages %}<|turn|>{{ m.role }}\n{{ m.content }}[tool]{% endfor %}<|turn|>"
ROWS = [{"prompt": f"the mesh {number}", "completion": f"  its caf\u00e9 {number}"} for number in range(10)]


@pytest.mark.parametrize("where", FILES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_are_those_of_transformers(shape, where, oracle, tmp_path):
    """Of a prompt, of prepared rows, and of a prompt to a model trained on the rows."""
    folder = write(tmp_path / "given", shape, where)
    theirs, ours = oracle(folder), tokenize.load(folder / "tokenizer.json")
    wanted = [theirs(text)["input_ids"] for text in TEXTS]
    assert [ours.encode(text).ids for text in TEXTS] == wanted
    (tmp_path / "turns.jinja").write_text(TEMPLATE)
    manifest, _ = instruction_data.prepared(tmp_path, ROWS, folder, 120, template=str(tmp_path / "turns.jinja"))
    rows = {ids for ids, _ in instruction_data.all_documents(manifest, 120)}
    asked = (f"{TURN}user\n{row['prompt']}{TOOL}{TURN}assistant\n{row['completion']}{TOOL}{TURN}" for row in ROWS)
    assert rows == {tuple(theirs(text, add_special_tokens=False)["input_ids"]) for text in asked}
    again, _, _ = tokenize.load_existing(tmp_path / "out", "--tokenizer")
    again.encode_special_tokens = False
    assert [again.encode(text).ids for text in TEXTS] == wanted
    assert [tokenize.load(tmp_path / "out" / "tokenizer.json").encode(text).ids for text in TEXTS] == wanted


def test_files_that_contradict_each_other_are_one_line(tmp_path):
    size = SHAPES["qwen-2"][1]().get_vocab_size()
    end = "<|endoftext|>"
    cases = {
        f"token {size - 1} is {end!r}, but '[tool]' in added_tokens.json": {TOOL: size - 1},
        f"{end!r} is token {size - 1}, but {size} in added_tokens.json": {end: size},
        f"'[tool]' is token {size}, but {size + 5} in added_tokens.json": {TOOL: size + 5},
    }
    for number, (says, added) in enumerate(cases.items()):
        folder = write(tmp_path / str(number), "qwen-2", "added_tokens.json")
        (folder / "added_tokens.json").write_text(json.dumps(added))
        with pytest.raises(UserError, match=re.escape(says)):
            tokenize.load(folder / "tokenizer.json")
    (folder / "added_tokens.json").write_text('{"a": [1]}')
    with pytest.raises(UserError, match=r"added_tokens\.json': a whole number by each token; this one has \[1\]"):
        tokenize.load(folder / "tokenizer.json")
    folder = write(tmp_path / "both", "qwen-2", "tokenizer_config.json")
    (folder / "added_tokens.json").write_text(json.dumps({"<|other|>": size}))
    with pytest.raises(UserError, match=re.escape(f"token {size} is '<|turn|>', but '<|other|>' in added_tokens.json")):
        tokenize.load(folder / "tokenizer.json")
