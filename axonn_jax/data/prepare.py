"""Preparation of a directory of text or code: tokenizer, shards of tokens, manifest."""

import hashlib
import json
import os
import platform
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import tokenizers
from numpy.typing import NDArray

from axonn_jax.data import tokenize
from axonn_jax.data.manifest import MANIFEST, TOKENIZER, Manifest, ShardWriter, Split, checksum
from axonn_jax.data.output import OutputKind, appearing, is_partial
from axonn_jax.errors import NOT_GIVEN, UserError
from axonn_jax.models.huggingface.pretrained import OF_TOKENIZER
from axonn_jax.version import __version__

SHARD_TOKENS = 16 << 20
_FILES = re.compile(rf"manifest\.json|{OF_TOKENIZER.pattern}|(train|valid)-\d{{5,}}\.bin")
_PREPARED = OutputKind("prepare", "prepared", "SOURCE_DIR", "OUT_DIR", _FILES, MANIFEST)

T = TypeVar("T")
Report = Callable[[str, int, int], None]
"""Called with a phase's name, the bytes done and the bytes in all."""


@dataclass(frozen=True)
class Source:
    """The usable files of a directory, relative to it and sorted, with their sizes."""

    root: Path
    sizes: dict[str, int]
    skipped: Counter[str]
    examples: dict[str, str]
    """One skipped file for each reason."""


def _silent(phase: str, done: int, total: int) -> None:
    """Reports nothing."""


def prepare(
    source: Path,
    out: Path,
    *,
    vocab: int | None = None,
    tokenizer: Path | None = None,
    include: Sequence[str],
    exclude: Sequence[str] = (),
    holdout: float = 0.05,
    seed: int = 0,
    force: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Report = _silent,
) -> tuple[Manifest, Source]:
    """Writes the prepared directory ``out`` from the files below ``source``, at once whole or not at all.

    A tokenizer of ``vocab`` entries is trained, or one that exists is taken (`tokenize.load_given`).

    Raises:
        UserError: an argument is out of range, nothing usable matches, the text gives no vocabulary of that size,
            ``out`` holds something else or cannot be written, or another prepare writes it.
    """
    given = None
    if tokenizer is not None:
        if vocab is not None:
            raise UserError("--vocab", vocab, "left out beside --tokenizer, which has its own")
        given = tokenize.load_given(tokenizer, "--tokenizer")
    else:
        if vocab is None:
            raise UserError("--vocab", NOT_GIVEN, "the size of the vocabulary to train; or --tokenizer")
        tokenize.check_vocab(vocab)
    if not 0 < holdout < 1:
        raise UserError("--holdout", holdout, "a share of the files above 0 and below 1")
    if seed < 0:
        raise UserError("--seed", seed, "a whole number from 0")
    if shard_tokens < 1:
        raise UserError("--shard-tokens", shard_tokens, "a whole number from 1")
    if not source.is_dir():
        raise UserError("SOURCE_DIR", str(source), "an existing directory of text or code")
    source, out = source.resolve(), out.resolve()
    with appearing(source, out, _PREPARED, force=force) as partial:
        texts = scan(source, include, exclude, out, report)
        names = split(texts, holdout, seed)
        if given is None:
            assert vocab is not None
            trained = tokenize.train(_texts(texts, names["train"], report), vocab)
            own = {TOKENIZER: trained.to_str(pretty=True).encode()}
            given = trained, tokenize.naming_end(own, trained, tokenize.EOT_ID), tokenize.EOT_ID
        encoder, files, end = given
        for name, raw in files.items():
            _write(partial / name, raw)
        if vocab is None:
            vocab = max(encoder.get_vocab(with_added_tokens=True).values()) + 1
        dtype = np.dtype("uint16" if vocab <= 65535 else "uint32")
        splits: dict[str, Split] = {}
        counts: dict[str, NDArray[np.int64]] = {}
        for name, members in names.items():
            with ShardWriter(partial, name, dtype, vocab, end, shard_tokens) as sink:
                splits[name] = _encode(encoder, end, texts, members, sink, report)
            counts[name] = sink.counts
        manifest = Manifest(
            path=out,
            vocab=vocab,
            dtype=dtype.name,
            eot_id=end,
            splits=splits,
            unigram_entropy=unigram_entropy(counts["valid"]),
            skipped=dict(sorted(texts.skipped.items())),
            options={"include": [*include], "exclude": [*exclude], "holdout": holdout, "seed": seed},
            tools={
                "axonn_jax": __version__,
                "tokenizers": tokenizers.__version__,
                "numpy": np.__version__,
                "python": platform.python_version(),
            },
            tokenizer_sha256=checksum(partial / TOKENIZER),
        )
        _write(partial / MANIFEST, (json.dumps(manifest.as_json(), indent=1) + "\n").encode())
    return manifest, texts


def _write(path: Path, raw: bytes) -> None:
    with path.open("wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def unigram_entropy(counts: NDArray[np.integer[Any]]) -> float:
    """Returns ``-sum p ln p`` in nats, with ``p`` the share of each entry of ``counts``; 0 for no counts."""
    seen = counts[counts > 0].astype(np.float64)
    share = seen / max(seen.sum(), 1.0)
    return float(max(0.0, -(share * np.log(share)).sum()))


def scan(root: Path, include: Sequence[str], exclude: Sequence[str], out: Path, report: Report) -> Source:
    """Finds the files below ``root`` that match, and reads each once to see that it is text.

    A pattern without a slash is compared with a file's name (``exclude``: with a directory's too), one with a
    slash with the path below ``root``. Symbolic links are never followed, and ``out`` is never read.

    Raises:
        UserError: fewer than two usable files.
    """
    texts = Source(root, {}, Counter(), {})
    done = 0

    def skip(reason: str, name: str) -> None:
        texts.skipped[reason] += 1
        texts.examples.setdefault(reason, name)

    def unreadable(error: OSError) -> None:
        skip("unreadable", os.path.relpath(error.filename or root, root))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        here = Path(folder)
        prefix = "" if here == root else here.relative_to(root).as_posix() + "/"
        folders[:] = sorted(
            name
            for name in folders
            if not (_match(prefix + name, exclude) or here / name == out or is_partial(out, here, name))
        )
        for name in [name for name in folders if (here / name).is_symlink()]:
            skip("symlink", prefix + name)
        for name in sorted(files):
            path = prefix + name
            if not _match(path, include) or _match(path, exclude) or is_partial(out, here, name):
                continue
            reason, size = _classify(here / name)
            if reason:
                skip(reason, path)
            else:
                texts.sizes[path] = size
            done += size
            report("reading", done, 0)
    if not texts.sizes and not texts.skipped:
        raise UserError("--include", " ".join(include), f"patterns that match at least two files below {root}")
    if len(texts.sizes) < 2:
        why = ", ".join(f"{count} {reason}" for reason, count in sorted(texts.skipped.items())) or "none"
        raise UserError(
            "SOURCE_DIR",
            str(root),
            f"at least two text files, one to hold out; usable: {len(texts.sizes)}, skipped: {why}",
        )
    return texts


def _match(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


def _classify(path: Path) -> tuple[str, int]:
    """Returns why a file cannot be used (an empty string if it can) and its size."""
    if path.is_symlink():
        return "symlink", 0
    if not path.is_file():  # a pipe would block, a device never end
        return "unreadable", 0
    size = 0
    try:
        for text in tokenize.pieces(path):
            size += len(text.encode())
    except tokenize.BinaryFile:
        return "binary", size
    except UnicodeDecodeError:
        return "not_utf8", size
    except OSError:
        return "unreadable", size
    return ("" if size else "empty"), size


def split(texts: Source, holdout: float, seed: int) -> dict[str, list[str]]:
    """Divides the files by a hash of seed and path, so that a file's side does not depend on the other files.

    Both sides get at least one file: the one whose hash is nearest to that side.
    """

    def place(name: str) -> float:
        digest = hashlib.sha256(f"{seed}\0".encode() + os.fsencode(name)).digest()
        return int.from_bytes(digest[:8], "big") / 2**64

    ranked = sorted((place(name), name) for name in texts.sizes)
    count = min(max(sum(at < holdout for at, _ in ranked), 1), len(ranked) - 1)
    held = {name for _, name in ranked[:count]}
    names = sorted(texts.sizes)
    return {
        "train": [name for name in names if name not in held],
        "valid": [name for name in names if name in held],
    }


def _steady(stream: Iterator[T], root: Path) -> Iterator[T]:
    """Makes a ``UserError`` of a failure to read a file that could be read before."""
    try:
        yield from stream
    except (tokenize.BinaryFile, UnicodeDecodeError, OSError) as error:
        raise UserError(
            "SOURCE_DIR", str(root), f"files that stay as they are meanwhile; one has changed: {error}"
        ) from None


def _texts(texts: Source, names: Sequence[str], report: Report) -> Iterator[str]:
    total, done = sum(texts.sizes[name] for name in names), 0
    for text in _steady((text for name in names for text in tokenize.pieces(texts.root / name)), texts.root):
        yield text
        done += len(text.encode())
        report("counting words", done, total)
    report("learning merges", 0, 0)


def _encode(tokenizer: Any, end: int, texts: Source, names: Sequence[str], sink: ShardWriter, report: Report) -> Split:
    total, files, size = sum(texts.sizes[name] for name in names), 0, 0
    batches = tokenize.encode_files(tokenizer, (texts.root / name for name in names), end)
    for ended, read, ids in _steady(batches, texts.root):
        sink.add(ids)
        files, size = files + ended, size + read
        report(f"encoding {sink.split}", size, total)
    shards = sink.close()
    return Split(files, size, sum(shard.tokens for shard in shards), shards)
