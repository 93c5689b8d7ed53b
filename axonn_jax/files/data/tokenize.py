"""Tokenizers: training of byte-level BPE, loading of existing ones, and begin and end tokens of a text."""

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from axonn_jax.core.documents import parse_json, read_bytes, read_json
from axonn_jax.core.errors import UserError
from axonn_jax.files.data.manifest import FORMAT, MANIFEST, MAX_MANIFEST, MAX_TOKENIZER, MAX_VOCAB, TOKENIZER, Manifest
from axonn_jax.files.huggingface.pretrained import (
    ADDED,
    FOLDER,
    OF_TOKENIZER,
    SAVE_TOKENIZER,
    SETTINGS,
    SPECIAL_TOKEN_KEYS,
    UNSPLIT,
    end_tokens,
    root_of,
    small_files,
    tokenizer_settings,
)

EOT = "<|endoftext|>"
EOT_ID = 0  # the trainer numbers special tokens first
MIN_VOCAB = 257  # the 256 bytes and EOT
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")
_INSPECTED = ("added_tokens", "decoder", "pre_tokenizer")
"""Keys of a file that are inspected here; the others, most of its memory, are freed before the library parses it."""
_EXPECTED = "the tokenizer.json of a directory from `axonn-jax prepare`, or a model's"


def train(texts: Iterable[str], vocab: int) -> Tokenizer:
    """Train a byte-level BPE of exactly ``vocab`` entries; entry 0 is the end-of-text token.

    Only merges that occur at least twice are learned, because one seen once says nothing about other text.

    Raises:
        UserError: ``vocab`` is out of range, or the text has too few repeated strings for that many entries.
    """
    check_vocab(vocab)
    tokenizer = _byte_level(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        min_frequency=2,
        special_tokens=[EOT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    got = tokenizer.get_vocab_size()
    if got != vocab:
        raise UserError("--vocab", vocab, f"at most {got}: this text gives no more; or prepare more text")
    return tokenizer


def check_vocab(vocab: int) -> None:
    """Raise a UserError unless a byte-level BPE can have ``vocab`` entries."""
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise UserError("--vocab", vocab, f"a whole number from {MIN_VOCAB} (the bytes and {EOT}) to {MAX_VOCAB}")


def load(file: str | Path, field: str = "data.path") -> Tokenizer:
    """Read a ``tokenizer.json`` with all of its settings except truncation and padding.

    Like transformers, it also reads added and special tokens from the neighbouring files.

    Raises:
        UserError: The file is missing or not a tokenizer, or the files contradict each other; the message names
            ``field``.
    """
    file = Path(file)
    try:
        raw = read_json(file, MAX_TOKENIZER, inside=root_of(file.parent))
        settings = tokenizer_settings(file.parent, field) if file.name == TOKENIZER else {}
        text, raw = json.dumps(raw), {key: raw.get(key) for key in _INSPECTED} if isinstance(raw, dict) else {}
        tokenizer = _sound(text, raw, settings)
    except OSError as error:
        raise UserError(field, str(file), f"{_EXPECTED}; {error.strerror}") from None
    except ValueError as error:
        raise UserError(field, str(file), f"{_EXPECTED}; this one is damaged ({error})") from None
    tokenizer.encode_special_tokens = has_our_settings(tokenizer)
    return tokenizer


def has_our_settings(tokenizer: Tokenizer) -> bool:
    """Return True if a tokenizer has the settings of ``train``; vocabulary and merges may differ."""
    if [*tokenizer.get_added_tokens_decoder()] != [EOT_ID]:
        return False
    plain = _byte_level(models.BPE())
    plain.add_special_tokens([EOT])
    settings, expected = json.loads(tokenizer.to_str()), json.loads(plain.to_str())
    expected["model"] |= {name: settings["model"].get(name) for name in ("vocab", "merges")}
    return bool(expected == settings)


def _sound(text: str, raw: Mapping[str, object], settings: Mapping[str, object]) -> Tokenizer:
    """Return the tokenizer of a file's text, its `_INSPECTED` keys and the settings in neighbouring files.

    Raises ``ValueError``.
    """
    try:
        tokenizer = Tokenizer.from_str(text)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        _split_as_class(tokenizer, raw, settings)
        _add_tokens(tokenizer, raw, settings)
        numbers = [*tokenizer.get_vocab(with_added_tokens=True).values()]
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(" ".join(str(error).split())[:200]) from None
    if not 0 <= (largest := max(numbers, default=-1)) < MAX_VOCAB:
        raise ValueError(f"its largest token is {largest}")
    if len({*numbers}) < len(numbers):
        raise ValueError("two of its tokens have one number")
    return tokenizer


def _split_as_class(tokenizer: Tokenizer, raw: Mapping[str, object], settings: Mapping[str, Any]) -> None:
    """Prepend spaces as transformers does for Llama's classes, which ignore tokenizer.json in this respect."""
    declared = json.dumps([raw.get("pre_tokenizer"), raw.get("decoder")])
    if _of_llama(settings) and isinstance(tokenizer.model, models.BPE) and '"ByteLevel"' not in declared:
        scheme = "first" if settings["tokenizer_class"].startswith("Code") or not settings.get("legacy") else "always"
        scheme = scheme if settings.get("add_prefix_space") in (None, True) else "never"
        tokenizer.normalizer, tokenizer.pre_tokenizer = None, pre_tokenizers.Metaspace("\u2581", scheme, split=False)


def _of_llama(settings: Mapping[str, object]) -> bool:
    return str(settings.get("tokenizer_class")).removesuffix("Fast") in ("LlamaTokenizer", "CodeLlamaTokenizer")


def _add_tokens(tokenizer: Tokenizer, raw: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    """Add the tokens of the settings in the order and with the flags of transformers.

    Raises ``ValueError`` for a token with two ids, or with an id that the library does not assign to it.
    """
    listed = {int(number): _token(entry) for number, entry in settings.get("added_tokens_decoder", {}).items()}
    numbered = [(entry["id"], entry["content"], TOKENIZER) for entry in raw.get("added_tokens") or []]
    numbered += [(number, text, ADDED) for text, number in settings.get(ADDED, {}).items()]
    numbered += [(number, token.content, SETTINGS) for number, token in listed.items()]
    _check_numbers(tokenizer, numbered)
    existing = tokenizer.get_added_tokens_decoder().values()
    contents, alike = {token.content for token in existing}, {repr(token) for token in existing}
    added = {token.content: token for _, token in sorted(listed.items()) if repr(token) not in alike}
    entries = [settings.get(key) for key in SPECIAL_TOKEN_KEYS]
    entries += [value for key, value in settings.items() if key.endswith("_token") and key not in SPECIAL_TOKEN_KEYS]
    extra = settings.get("extra_special_tokens", settings.get("additional_special_tokens")) or []
    entries += extra.values() if isinstance(extra, dict) else []
    special = [_token(entry) for entry in entries if isinstance(entry, str | dict)]
    for token in (*special, *map(_token, [] if isinstance(extra, dict) else extra)):
        if token.content not in contents:
            added.setdefault(token.content, token)
    for text in {token.content for token in special} & added.keys():
        added[text].special = True
    tokenizer.add_tokens([*added.values()])
    _check_numbers(tokenizer, numbered)


def _check_numbers(tokenizer: Tokenizer, numbered: list[tuple[int, str, str]]) -> None:
    added = tokenizer.get_added_tokens_decoder()  # its contents are the texts before normalization
    for number, text, name in numbered:
        current = added[number].content if number in added else tokenizer.id_to_token(number)
        if current not in (None, text):
            raise ValueError(f"token {number} is {current!r}, but {text!r} in {name}")
        if (actual := tokenizer.token_to_id(text)) not in (None, number):
            raise ValueError(f"{text!r} is token {actual}, but {number} in {name}")


def _token(entry: Any) -> AddedToken:
    """Return the added token of a file's entry; a string is a special token."""
    fields: dict[str, Any] = {"content": entry, "special": True} if isinstance(entry, str) else entry
    return AddedToken(fields["content"], **{key: fields[key] for key in _FLAGS if key in fields})


def load_existing(path: Path, field: str) -> tuple[Tokenizer, dict[str, bytes], int]:
    """Return an existing tokenizer, its files by name and a document's end id.

    ``path`` is the file, or a directory with ``tokenizer.json``, of `prepare` or of a pretrained model. Raises
    ``UserError`` as ``load`` does, and if no file names a document's end token.
    """
    file = path / TOKENIZER if path.is_dir() else path
    if not file.exists() and (file.parent / "tokenizer.model").exists():
        accepted = f"a {TOKENIZER}; the form of sentencepiece is not read: {SAVE_TOKENIZER}"
        raise UserError(field, str(file.parent / "tokenizer.model"), accepted)
    tokenizer = load(file, field)
    raw = read_bytes(file, MAX_TOKENIZER, inside=root_of(file.parent))
    if (end := end_of(file.parent, tokenizer, field)) is None:
        accepted = f"a tokenizer with an eos_token named in a {SETTINGS} beside the file"
        raise UserError(field, str(path), accepted)
    if end not in tokenizer.get_added_tokens_decoder():  # as the files will name it
        tokenizer.add_special_tokens([tokenizer.id_to_token(end)])
    tokenizer.encode_special_tokens = True  # as in `_byte_level`
    if file.name != TOKENIZER:
        return tokenizer, naming_end({TOKENIZER: raw}, tokenizer, end), end
    files = naming_end({**dict(small_files(file.parent, field, OF_TOKENIZER)), TOKENIZER: raw}, tokenizer, end)
    kind = tokenizer_settings(file.parent, field)["tokenizer_class"]
    if kind == UNSPLIT and _of_llama(settings := parse_json(files[SETTINGS])):  # without config.json, which says so
        files[SETTINGS] = json.dumps(settings | {"tokenizer_class": kind}, indent=2, ensure_ascii=False).encode()
    return tokenizer, files, end


def end_of(folder: Path, tokenizer: Tokenizer, field: str) -> int | None:
    """Return a document's end id, by the directory's files, or else EOT's."""
    return next(_ends(folder, tokenizer, field), None)


def ends_of(folder: Path, tokenizer: Tokenizer | None, field: str, vocab: int = MAX_VOCAB) -> tuple[int, ...]:
    """Return the end ids below `vocab` of a text in generation: all in a directory's files, `end_of`'s first.

    Without a tokenizer only ids given as numbers count.
    """
    return tuple(end for end in dict.fromkeys(_ends(folder, tokenizer, field)) if end < vocab)


def _ends(folder: Path, tokenizer: Tokenizer | None, field: str) -> Iterator[int]:
    vocab = {} if tokenizer is None else tokenizer.get_vocab(with_added_tokens=True)
    declared = False
    with contextlib.suppress(OSError, ValueError):
        raw = read_json(folder / MANIFEST, MAX_MANIFEST, inside=root_of(folder))
        prepared = isinstance(raw, dict) and raw.get("format") == FORMAT
        if prepared and type(end := raw.get("eot_id")) is int and end in vocab.values():
            declared = True
            yield end
    for place in (folder, folder / FOLDER):
        for end in end_tokens(place, vocab, field):
            declared = True
            yield end
    if not declared and EOT in vocab:
        yield vocab[EOT]


def check_files(folder: Path, field: str) -> None:
    """Raise ``UserError`` where the tokenizer of a model's directory, or a file that names its end, is damaged.

    The files are copied byte for byte, so without this check only generation, after the training, would find damage.
    """
    tokenizer = load(folder / TOKENIZER, field) if os.path.lexists(folder / TOKENIZER) else None
    ends_of(folder, tokenizer, field)


def begin_of(tokenizer: Tokenizer) -> list[int]:
    """Return the ids that a tokenizer's post-processor puts before a text, often one or none."""
    ids, text = tokenizer.encode("a").ids, tokenizer.encode("a", add_special_tokens=False).ids
    added = len(ids) - len(text)
    return next((ids[:at] for at in range(added + 1) if ids[at : at + len(text)] == text), [])


def naming_end(files: Mapping[str, bytes], tokenizer: Tokenizer, end: int) -> dict[str, bytes]:
    """Return a tokenizer's files by name, with a tokenizer_config.json that names the end token of documents."""
    token, settings = tokenizer.id_to_token(end), None
    with contextlib.suppress(ValueError):
        settings = parse_json(files.get(SETTINGS, b""))
    if not isinstance(settings, dict):
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        settings["bos_token"] = token
    eos = settings.get("eos_token")
    if token in (None, eos.get("content") if isinstance(eos, dict) else eos):
        return dict(files)
    raw = json.dumps(settings | {"eos_token": token}, indent=2, ensure_ascii=False) + "\n"
    return {**files, SETTINGS: raw.encode()}


def files_of(prepared: Path) -> dict[str, bytes]:
    """Return the tokenizer's files of a prepared directory, with the end token if possible.

    Raises ``UserError`` for an unreadable file.
    """
    files = dict(small_files(prepared, "data.path", OF_TOKENIZER))
    with contextlib.suppress(UserError):  # training needs none
        return naming_end(files, load(prepared / TOKENIZER), Manifest.load(prepared).eot_id)
    return files


def alike(base: Path, prepared: Path, field: str) -> bool:
    """Return True if data has the tokenizer of a model's directory, or the directory has none."""
    raw, ours = (dict(small_files(folder, field, OF_TOKENIZER)).get(TOKENIZER) for folder in (base, prepared))
    with contextlib.suppress(UserError):  # training needs none
        return raw is None or (raw == ours and _tokens(base) == _tokens(prepared))
    return raw == ours


def _tokens(folder: Path) -> dict[str, int]:
    return load(folder / TOKENIZER).get_vocab(with_added_tokens=True)


def _byte_level(model: models.Model) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # A file that happens to contain the characters <|endoftext|> must not end its document there.
    tokenizer.encode_special_tokens = True
    return tokenizer
