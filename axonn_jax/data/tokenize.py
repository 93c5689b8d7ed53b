"""Tokens: training of byte-level BPE, and token ids of files in bounded memory."""

import codecs
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from axonn_jax.data.manifest import MAX_TOKENIZER, MAX_VOCAB
from axonn_jax.documents import read_json, typed
from axonn_jax.errors import UserError

EOT = "<|endoftext|>"
EOT_ID = 0  # the trainer numbers special tokens first
MIN_VOCAB = 257  # the 256 bytes and EOT
_EXPECTED = "the tokenizer.json of a directory from `axonn-jax prepare`"
_PIECE = 1 << 20
_BATCH = 4 << 20
_BATCH_ENTRIES = 1024


class BinaryFile(Exception):
    """A file that holds a NUL byte, so it is not text."""


def pieces(path: Path) -> Iterator[str]:
    """Yields a file's text; one of over 1 MiB comes in pieces, cut after a line end where there is one.

    The pieces joined are the file exactly: line ends and a byte-order mark stay as they are.

    Raises:
        BinaryFile: the file holds a NUL byte.
        UnicodeDecodeError: the file is not UTF-8.
        OSError: the file cannot be read.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    rest = ""
    with path.open("rb") as file:
        chunk = file.read(_PIECE)
        while chunk:
            following = file.read(_PIECE)
            if b"\0" in chunk:
                raise BinaryFile(path)
            text = rest + decoder.decode(chunk, final=not following)
            cut = len(text) if not following else (text.rfind("\n") + 1 or len(text))
            if cut:
                yield text[:cut]
            rest = text[cut:]
            chunk = following


def train(texts: Iterable[str], vocab: int) -> Any:
    """Trains a byte-level BPE of exactly ``vocab`` entries, of which entry 0 is the end-of-text token.

    Only merges that occur at least twice are learned: one seen once says nothing about other text.

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
    """Raises a UserError unless a byte-level BPE can have ``vocab`` entries."""
    if not MIN_VOCAB <= vocab <= MAX_VOCAB:
        raise UserError("--vocab", vocab, f"a whole number from {MIN_VOCAB} (the bytes and {EOT}) to {MAX_VOCAB}")


@dataclass(frozen=True)
class _Model:
    type: str
    vocab: Mapping[str, int]
    merges: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class _File:
    model: _Model


def load(file: str | Path, field: str = "data.path") -> Any:
    """Reads a ``tokenizer.json`` that ``train`` made: its vocabulary and merges, and nothing else that it may hold.

    Raises:
        UserError: the file is missing or is no such tokenizer; ``field`` is what the line names.
    """
    try:
        model = typed(_File, read_json(Path(file), MAX_TOKENIZER, inside=Path(file).parent)).model
        if model.type != "BPE" or model.vocab.get(EOT) != EOT_ID:
            raise ValueError(f"no BPE with {EOT} as token {EOT_ID}")
        if sorted(model.vocab.values()) != [*range(len(model.vocab))]:
            raise ValueError("its tokens are not numbered from 0 without a gap")
        if not all(len(merge) == 2 and {*merge, "".join(merge)} <= model.vocab.keys() for merge in model.merges):
            raise ValueError("a merge is not of two tokens to a third")
        if not model.vocab.keys() >= {*pre_tokenizers.ByteLevel.alphabet()}:
            raise ValueError("a byte is missing")
    except OSError as error:
        raise UserError(field, str(file), f"{_EXPECTED}; {error.strerror}") from None
    except ValueError as error:
        raise UserError(field, str(file), f"{_EXPECTED}; this one is damaged ({error})") from None
    tokenizer = _byte_level(models.BPE(dict(model.vocab), [(left, right) for left, right in model.merges]))
    tokenizer.add_special_tokens([EOT])
    return tokenizer


def prompt_ids(tokenizer: Any, prompt: str) -> list[int]:
    """Returns a prompt's tokens; raises ``UserError`` where it has none or is no text."""
    try:
        prompt.encode()
    except UnicodeEncodeError:  # Python's stand-ins for bytes of a command line that are not UTF-8
        raise UserError("--prompt", prompt, "a text in UTF-8") from None
    ids: list[int] = tokenizer.encode(prompt).ids
    if not ids:
        raise UserError("--prompt", prompt, "a text of at least one token")
    return ids


def _byte_level(model: Any) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    # A file that happens to contain the characters <|endoftext|> must not end its document there.
    tokenizer.encode_special_tokens = True
    return tokenizer


def encode_files(tokenizer: Any, paths: Iterable[Path]) -> Iterator[tuple[int, int, NDArray[np.uint32]]]:
    """Yields ``(files ended, bytes, token ids)`` batch by batch; the end-of-text token ends each file's ids.

    Raises:
        BinaryFile, UnicodeDecodeError, OSError: as ``pieces`` does.
    """
    eot = [EOT_ID]
    for batch in _batches(paths):
        texts = [text for text in batch if text is not None]
        # The "fast" form leaves out character offsets, which nobody here needs.
        encoded = iter(tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids = [np.asarray(eot if text is None else next(encoded).ids, np.uint32) for text in batch]
        yield batch.count(None), sum(len(text.encode()) for text in texts), np.concatenate(ids)


def _batches(paths: Iterable[Path]) -> Iterator[list[str | None]]:
    """Groups the pieces of many files, with None where a file ends, into batches of bounded size."""
    batch: list[str | None] = []
    characters = 0
    for path in paths:
        for text in itertools.chain(pieces(path), (None,)):
            batch.append(text)
            characters += len(text or "")
            if characters >= _BATCH or len(batch) >= _BATCH_ENTRIES:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
