"""Preparation of text or code for training: tokenizer, shards of tokens, manifest."""

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

from axonn_jax.core.documents import flush
from axonn_jax.core.errors import UNSET, UserError
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.encode import encode
from axonn_jax.files.data.holdout import Holdout
from axonn_jax.files.data.manifest import (
    MANIFEST,
    MAX_SHARDS,
    SPLITS,
    TOKENIZER,
    Manifest,
    Shard,
    Split,
    checksum,
    shard_name,
)
from axonn_jax.files.data.output import OutputKind, appearing
from axonn_jax.files.data.read import UNREADABLE
from axonn_jax.files.data.source import Source, scan
from axonn_jax.files.huggingface.pretrained import OF_TOKENIZER
from axonn_jax.files.huggingface.splits import files_of
from axonn_jax.version import __version__

SHARD_TOKENS = 16 << 20
_FILES = re.compile(rf"manifest\.json|{OF_TOKENIZER.pattern}|(train|valid)-\d{{5,}}\.bin")
PREPARED = OutputKind("prepare", "prepared", "SOURCE", "OUT_DIR", _FILES, MANIFEST)

T = TypeVar("T")
Report = Callable[[str, int, int], None]
"""Called with a phase's name, the bytes done and the bytes in all."""


def silent(phase: str, done: int, total: int) -> None:
    """Report nothing."""


def prepare(
    source: Path,
    out: Path,
    *,
    vocab: int | None = None,
    tokenizer: Path | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    field: str = "text",
    split: str | None = None,
    bos: bool = False,
    holdout: float = 0.05,
    seed: int = 0,
    force: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Report = silent,
) -> tuple[Manifest, Source]:
    """Write the prepared directory ``out`` from the documents of ``source``, atomically.

    A tokenizer of ``vocab`` entries is trained, or an existing one is used (`tokenize.load_existing`). `source.scan`
    describes which files are read.

    Raises:
        UserError: an argument is out of range, nothing usable matches, the text gives no vocabulary of this size,
            ``out`` holds something else or cannot be written, or another prepare writes there.
    """
    tokenizer_parts = None
    if tokenizer is not None:
        if vocab is not None:
            raise UserError("--vocab", vocab, "not given with --tokenizer, which has a vocabulary")
        tokenizer_parts = tokenize.load_existing(tokenizer, "--tokenizer")
    else:
        if vocab is None:
            raise UserError("--vocab", UNSET, "the size of the vocabulary to train; or --tokenizer")
        tokenize.check_vocab(vocab)
    if bos and not (tokenizer_parts and tokenize.begin_of(tokenizer_parts[0])):
        raise UserError(
            "--bos", bos, "not given, or with a --tokenizer whose post-processor adds a token before a text"
        )
    check_numbers(holdout, seed, shard_tokens)
    out = out.resolve()
    with appearing(source.resolve(), out, PREPARED, force=force) as partial:
        selection, splitter = files_of(source, split, include, report), Holdout(holdout, seed)
        patterns = {"include": selection.include, "exclude": exclude}
        texts = scan(selection.source, out, **patterns, text_field=field, see=splitter.see, report=report)
        if selection.facts:
            texts.not_included.clear()  # other files of the data set's cache, which the user did not name
        if tokenizer_parts is None:
            assert vocab is not None
            trained = tokenize.train(_training(texts, splitter, report), vocab)
            trained_files = {TOKENIZER: trained.to_str(pretty=True).encode()}
            tokenizer_parts = trained, tokenize.naming_end(trained_files, trained, tokenize.EOT_ID), tokenize.EOT_ID
        encoder, files, end = tokenizer_parts
        if vocab is None:
            # Not the vocabulary's length: published tokenizers may skip numbers.
            vocab = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
        dtype = np.dtype("uint16" if vocab <= 65535 else "uint32")
        with ExitStack() as stack:
            writers = {
                name: stack.enter_context(ShardWriter(partial, name, dtype, vocab, end, shard_tokens))
                for name in SPLITS
            }
            begin = tokenize.begin_of(encoder) if bos else []
            splits = _encode(encoder, begin, end, texts, splitter, writers, report)
        options = {**selection.facts, "include": [*include], "exclude": [*exclude]}
        manifest = described(
            partial,
            files,
            path=out,
            vocab=vocab,
            dtype=dtype.name,
            eot_id=end,
            splits=splits,
            unigram_entropy=unigram_entropy(writers["valid"].counts),
            skipped=texts.skipped + Counter({"not_included": texts.not_included.total()}),
            options=options | {"field": field, "bos": bos, "holdout": holdout, "seed": seed},
        )
    return manifest, texts


def check_numbers(holdout: float, seed: int, shard_tokens: int) -> None:
    """Raise ``UserError`` for a number out of range."""
    if not 0 <= holdout < 1:
        raise UserError("--holdout", holdout, "a share of the documents below 1; 0 holds nothing out")
    if seed < 0:
        raise UserError("--seed", seed, "a whole number from 0")
    if shard_tokens < 1:
        raise UserError("--shard-tokens", shard_tokens, "a whole number from 1")


def described(folder: Path, files: Mapping[str, bytes], *, skipped: Mapping[str, int], **facts: Any) -> Manifest:
    """Write the tokenizer's files, and the manifest with `facts` and the versions of the libraries."""
    tools = {"axonn_jax": __version__, "tokenizers": tokenizers.__version__, "numpy": np.__version__}
    tools["python"] = platform.python_version()
    for name, raw in files.items():
        _put(folder / name, raw)
    digest = checksum(folder / TOKENIZER)
    manifest = Manifest(**facts, skipped=dict(sorted(skipped.items())), tools=tools, tokenizer_sha256=digest)
    # The manifest is written last: a directory without it is not a prepared one.
    _put(folder / MANIFEST, (json.dumps(manifest.as_json(), indent=1) + "\n").encode())
    return manifest


class ShardWriter:
    """Writer of a split's tokens to shards of at most ``limit`` tokens; counts the targets by id."""

    def __init__(self, folder: Path, split: str, dtype: np.dtype[np.generic], vocab: int, eot_id: int, limit: int):
        self.split = split
        self.counts = np.zeros(vocab, np.int64)
        self.largest = 0
        self._folder, self._dtype, self._eot, self._limit = folder, dtype.newbyteorder("<"), eot_id, limit
        self._done: list[Shard] = []
        self._file: BinaryIO | None = None

    def __enter__(self) -> "ShardWriter":
        return self

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            self._file.close()

    def add(
        self, ids: NDArray[np.uint32], targets: NDArray[np.uint32] | None = None, documents: int | None = None
    ) -> None:
        """Append tokens, starting a new shard when one is full; words of a row need `targets` and `documents`."""
        self.counts += np.bincount(ids if targets is None else targets, minlength=len(self.counts))
        while len(ids):
            if self._file is None:
                if len(self._done) == MAX_SHARDS:
                    raise UserError("--shard-tokens", self._limit, f"more tokens: at most {MAX_SHARDS} shards a split")
                self._name = shard_name(self.split, len(self._done))
                self._file = (self._folder / self._name).open("wb")
                self._digest, self._tokens, self._documents = hashlib.sha256(), 0, 0
            part, ids = np.split(ids, [self._limit - self._tokens])
            self.largest = max(self.largest, int((part if targets is None else _ids_of_words(part)).max()))
            raw = part.astype(self._dtype).tobytes()
            self._file.write(raw)
            self._digest.update(raw)
            self._tokens += len(part)
            self._documents += int((part == self._eot).sum()) if documents is None else documents
            if self._tokens == self._limit:
                self._finish(self._file)

    def close(self) -> tuple[Shard, ...]:
        """Finish the last shard and return all shards."""
        if self._file is not None:
            self._finish(self._file)
        return tuple(self._done)

    def _finish(self, file: BinaryIO) -> None:
        # The rename of the directory must not reach the disk before the data does.
        file.flush()
        os.fsync(file.fileno())
        file.close()
        self._file = None
        self._done.append(Shard(self._name, self._tokens, self._documents, self._digest.hexdigest()))


def _ids_of_words(words: NDArray[np.uint32]) -> NDArray[np.uint32]:
    from axonn_jax.core.models.packed import token_ids  # imports jax, which a stream's writers do not need

    ids: NDArray[np.uint32] = token_ids(words)
    return ids


def _put(path: Path, raw: bytes) -> None:
    """Write a file, creating its folder, and wait until it is on disk."""
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(raw)
    flush(path)


def unigram_entropy(counts: NDArray[np.integer]) -> float:
    """Return ``-sum p ln p`` in nats, with ``p`` the share of each entry of ``counts``; 0 for no counts."""
    seen = counts[counts > 0].astype(np.float64)
    share = seen / max(seen.sum(), 1.0)
    return float(max(0.0, -(share * np.log(share)).sum()))


def _steady(stream: Iterator[T], source: Source) -> Iterator[T]:
    """Convert a failure to read a file that was readable before into a ``UserError``."""
    try:
        yield from stream
    except UserError:
        raise
    except UNREADABLE as error:
        raise _changed(source, str(error)) from None


def _changed(source: Source, why: str) -> UserError:
    return UserError("SOURCE", str(source.root), f"files that stay unchanged while they are read; one changed: {why}")


def _training(source: Source, splitter: Holdout, report: Report) -> Iterator[str]:
    """Yield the training split's text, from which the vocabulary is learned."""
    done, total = 0, source.size
    documents = (document for split, document in splitter.divided(source) if split == "train")
    for text in _steady((part for document in documents for part in document.parts()), source):
        yield text
        done += len(text.encode())
        report("counting words", done, total)
    report("learning merges", 0, 0)


def _encode(
    tokenizer: tokenizers.Tokenizer,
    begin: Sequence[int],
    end: int,
    source: Source,
    splitter: Holdout,
    writers: Mapping[str, ShardWriter],
    report: Report,
) -> dict[str, Split]:
    """Write the tokens of all documents."""
    sizes, total = Counter[str](), source.size
    for split, size, ids in _steady(encode(tokenizer, splitter.divided(source), begin, end), source):
        writers[split].add(ids)
        sizes[split] += size
        report("encoding", sizes.total(), total)
    # The source was scanned before, so another size means that a file has changed in between.
    if sizes.total() != total:
        raise _changed(source, f"{total:,} bytes of text before, {sizes.total():,} now")
    shards = {name: writer.close() for name, writer in writers.items()}
    return {
        name: Split(sizes[name], sum(shard.tokens for shard in of_split), of_split, largest=writers[name].largest)
        for name, of_split in shards.items()
    }
