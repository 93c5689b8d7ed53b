"""Manifest and shards of a prepared directory, and checks of both."""

import hashlib
import re
import stat
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.documents import read_json
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import typed

FORMAT = "axonn_jax tokens"
VERSIONS = {1: "tokens", 2: "rows"}
"""Kinds of data by version: a stream of tokens, or the packed rows of `models.packed`."""
MANIFEST = "manifest.json"
TOKENIZER = "tokenizer.json"
SPLITS = ("train", "valid")
RERUN = "run `axonn-jax prepare` again"
MAX_VOCAB = 1 << 20  # the trainer of tokenizers allocates a table of this many entries before it starts
MAX_SHARDS = 40_000  # of a split
MAX_MANIFEST = 16 << 20  # bytes, which so many shards do not need
MAX_TOKENIZER = 256 << 20  # bytes: MAX_VOCAB entries and their merges
_DTYPES = ("uint16", "uint32")
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Shard:
    """One file of tokens: little-endian integers of the manifest's dtype and nothing else."""

    name: str
    tokens: int
    documents: int
    """Number of documents that end in this shard."""
    sha256: str


@dataclass(frozen=True)
class Split:
    """Counts of a split's text, and its shards, which form the token stream in order."""

    bytes: int
    tokens: int
    shards: tuple[Shard, ...]
    counted: int | None = None
    """Targets that count; None in a stream, where all do."""
    padding: int | None = None
    """Tokens behind the last documents of rows; None in a stream."""
    largest: int | None = None
    """Largest id in the shards; None in a directory of an early version."""

    @property
    def fill(self) -> float:
        """Share of the tokens that are not padding."""
        return 1 - (self.padding or 0) / max(self.tokens, 1)

    @property
    def documents(self) -> int:
        """The number of documents in the shards."""
        return sum(shard.documents for shard in self.shards)


@dataclass(frozen=True)
class Manifest:
    """The content of a prepared directory."""

    vocab: int
    dtype: str
    eot_id: int
    splits: Mapping[str, Split]
    unigram_entropy: float
    """``-sum p_t ln p_t``, nats a token, with ``p_t`` the share of token ``t`` in the held-out split, end-of-text
    included: the loss there of the best predictor that ignores all context. Of rows, of the targets that count."""
    skipped: Mapping[str, int]
    """Numbers of files and records left out or cut, by kind."""
    options: Mapping[str, object]
    """The options given, such as field, bos, holdout and seed."""
    tools: Mapping[str, str]
    """Versions of the libraries that wrote the directory."""
    tokenizer_sha256: str | None = None
    """SHA-256 of the tokenizer; None in a directory of an early version, which accepts any tokenizer."""
    version: int = 1
    kind: str = "tokens"
    """Kind of the data, by its version."""
    row: int = 0
    """Words of a row: tokens of a sequence and one; 0 in a stream."""
    path: Path = Path()
    """Path of the directory; not part of the file."""
    marks: Mapping[str, tuple[int, int]] = field(default_factory=dict, compare=False)
    """Bytes and time of change (ns) of each shard's file when the manifest was read; not part of the file either."""

    @property
    def storage(self) -> np.dtype[np.generic]:
        """The numpy dtype of the shards."""
        return np.dtype(self.dtype).newbyteorder("<")

    @property
    def packed(self) -> bool:
        """True if the data is rows of `models.packed`."""
        return self.kind == "rows"

    @property
    def used(self) -> int:
        """Rows of the smallest embedding table for the data's ids, or for the tokenizer's if those are unknown."""
        return max(self.vocab if split.largest is None else split.largest + 1 for split in self.splits.values())

    def rows(self, split: str, seq_len: int) -> int:
        """Return the number of rows of `seq_len` + 1 tokens in an epoch of a split."""
        tokens = self.splits[split].tokens
        return tokens // self.row if self.packed else (tokens - 1) // seq_len

    def fingerprint(self, split: str) -> str:
        """Return the SHA-256 of a split's shards, and of the kind of rows."""
        shards = "".join(shard.sha256 for shard in self.splits[split].shards)
        return hashlib.sha256((f"rows {self.row} {shards}" if self.packed else shards).encode()).hexdigest()

    def as_json(self) -> dict[str, Any]:
        """Return the object in ``manifest.json``."""
        return {
            "format": FORMAT,
            "version": self.version,
            "vocab": self.vocab,
            "dtype": self.dtype,
            "byte_order": "little",
            "eot_id": self.eot_id,
            "tokenizer_sha256": self.tokenizer_sha256,
            "unigram_entropy": self.unigram_entropy,
            **({"kind": self.kind, "row": self.row} if self.packed else {}),
            "splits": {
                name: {key: value for key, value in asdict(split).items() if value is not None}
                for name, split in self.splits.items()
            },
            "skipped": dict(self.skipped),
            "options": dict(self.options),
            "tools": dict(self.tools),
        }

    @classmethod
    def load(cls, path: str | Path) -> "Manifest":
        """Read the manifest of a prepared directory and check every shard's size.

        Nothing outside of it is read. Raises ``UserError`` if the directory, the manifest, the tokenizer or a shard
        is missing, damaged or of another size.
        """
        path = Path(path)
        try:
            raw = read_json(path / MANIFEST, MAX_MANIFEST, inside=path)
        except (FileNotFoundError, NotADirectoryError):
            missing = f"no {MANIFEST} in it" if path.is_dir() else "no such directory"
            raise _bad(path, f"{missing}; give a directory written by `axonn-jax prepare`") from None
        except OSError as error:
            raise _bad(path, f"{MANIFEST} is not readable: {error.strerror}") from None
        except ValueError as error:
            raise _bad(path, f"{MANIFEST} is not valid JSON ({error}); {RERUN}") from None
        manifest = cls._parse(path, raw)
        return replace(manifest, marks=manifest._check_files())

    @classmethod
    def _parse(cls, path: Path, raw: object) -> "Manifest":
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise _bad(path, f"{MANIFEST} was not written by `axonn-jax prepare` (its format should be {FORMAT!r})")
        if type(version := raw.get("version")) is not int or version not in VERSIONS:
            shown = version if type(version) is int and abs(version) < 2**63 else "unknown"
            supported = " and ".join(map(str, VERSIONS))
            raise _bad(path, f"{MANIFEST} has version {shown}; this axonn_jax reads {supported}; {RERUN}")
        try:
            manifest = replace(typed(cls, {key: value for key, value in raw.items() if key != "path"}), path=path)
            manifest._check_fields()
        except ValueError as error:
            raise _bad(path, f"{MANIFEST} is damaged ({error}); {RERUN}") from None
        return manifest

    def _check_fields(self) -> None:
        """Raise ``ValueError`` for values that `prepare` never writes."""
        if not 1 <= self.vocab <= MAX_VOCAB:
            raise ValueError(f"vocab = {self.vocab}, not 1 to {MAX_VOCAB}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype = {self.dtype[:40]!r}, not one of {', '.join(_DTYPES)}")
        if not 0 <= self.eot_id < self.vocab:
            raise ValueError(f"eot_id = {self.eot_id}, not in the vocabulary")
        if not (self.tokenizer_sha256 is None or _SHA256.fullmatch(self.tokenizer_sha256)):
            raise ValueError("tokenizer_sha256 is no SHA-256")
        for name in SPLITS:
            if name not in self.splits:
                raise ValueError(f"splits.{name} is missing")
            _check_split(name, self.splits[name])
        if not 1 <= self.used <= self.vocab:
            raise ValueError(f"largest = {self.used - 1}, not in the vocabulary")
        if self.kind != VERSIONS[self.version] or self.packed != (self.row >= 2):
            raise ValueError(f"kind = {self.kind[:40]!r} with row = {self.row} in version {self.version}")
        if self.packed and (self.dtype != "uint32" or any(split.tokens % self.row for split in self.splits.values())):
            raise ValueError(f"no whole rows of {self.row} words in uint32")

    def _check_files(self) -> dict[str, tuple[int, int]]:
        marks = {}
        for shard in self._shards(SPLITS):
            expected = shard.tokens * self.storage.itemsize
            marks[shard.name] = size, _ = self._status(f"shard {shard.name}", shard.name)
            if size != expected:
                raise _bad(self.path, f"shard {shard.name} has {size} bytes, expected {expected}; {RERUN}")
        if (size := self._status(TOKENIZER, TOKENIZER)[0]) > MAX_TOKENIZER:
            raise _bad(self.path, f"{TOKENIZER} has {size} bytes, expected at most {MAX_TOKENIZER}; {RERUN}")
        return marks

    def _status(self, label: str, name: str) -> tuple[int, int]:
        try:
            status = (self.path / name).lstat()
        except OSError as error:
            raise _bad(self.path, f"{label} is missing ({error.strerror}); {RERUN}") from None
        # An untrusted manifest must not make us read other files, nor wait for a pipe.
        if not stat.S_ISREG(status.st_mode):
            raise _bad(self.path, f"{label} is not a regular file; a copy would be; {RERUN}")
        return status.st_size, status.st_mtime_ns

    def verify(self, splits: Iterable[str] = SPLITS, *, share: tuple[int, int] = (0, 1)) -> None:
        """Read the tokenizer and every shard of the given splits and compare their SHA-256 with the manifest's.

        `share` = (rank, size) reads only this process's share of the files.

        Raises:
            UserError: a file is corrupt or not readable, or has a token outside of the vocabulary.
        """
        rank, size = share
        if rank == size - 1:  # the last rank, which may have one shard less
            self.check_tokenizer()
        for shard in self._shards(splits)[rank::size]:
            self._check(f"shard {shard.name}", shard.name, shard.sha256)
            self.check_ids(np.memmap(self.path / shard.name, dtype=self.storage, mode="r"), shard)

    def check_tokenizer(self) -> None:
        """Read the tokenizer, a few MB; raise ``UserError`` for a corrupt or unreadable one."""
        self._check(TOKENIZER, TOKENIZER, self.tokenizer_sha256)
        if self.tokenizer_sha256 is None:
            try:
                read_json(self.path / TOKENIZER, MAX_TOKENIZER, inside=self.path)
            except ValueError as error:
                raise _bad(self.path, f"{TOKENIZER} is not valid JSON ({error}); {RERUN}") from None

    def check_seq_len(self, seq_len: int, splits: Iterable[str]) -> None:
        """Raise ``UserError`` if a split is shorter than `seq_len` + 1 tokens or has rows of another length."""
        if self.packed and seq_len != self.row - 1:
            accepted = f"{self.row - 1}, the length of the rows in {str(self.path)!r} (`prepare --seq-len`)"
            raise UserError("model.seq_len", seq_len, accepted)
        for name in splits:
            if not (tokens := self.splits[name].tokens):
                raise _bad(self.path, f"data with a {name} split that is not empty; see `prepare --holdout`")
            if tokens < seq_len + 1:
                has = f"the {name} split of {str(self.path)!r} has {tokens} tokens; or prepare more text"
                raise UserError("model.seq_len", seq_len, f"at most {max(tokens - 1, 0)}: {has}")

    def check_ids(self, ids: NDArray[np.generic], shard: Shard) -> None:
        """Raise ``UserError`` if ids, or words of rows, read from a shard are above those of the manifest."""
        if self.packed:
            from axonn_jax.core.models.packed import token_ids  # imports jax, which a stream's readers do not need

            ids = token_ids(ids)
        if len(ids) and (largest := int(ids.max())) >= self.used:
            raise _bad(self.path, f"shard {shard.name} has token {largest}, above {self.used - 1}; {RERUN}")

    def _check(self, label: str, name: str, expected: str | None) -> None:
        try:
            actual = checksum(self.path / name)
        except OSError as error:
            raise _bad(self.path, f"{label} is not readable: {error.strerror}") from None
        if expected is not None and actual != expected:
            raise _bad(self.path, f"{label} is corrupt: checksum {actual}, expected {expected}; {RERUN}")

    def _shards(self, splits: Iterable[str]) -> list[Shard]:
        return [shard for name in splits for shard in self.splits[name].shards]


def _bad(path: Path, accepted: str) -> UserError:
    return UserError("data.path", str(path), accepted)


def _check_split(name: str, split: Split) -> None:
    for number, shard in enumerate(split.shards):
        if shard.name != (expected := shard_name(name, number)):
            raise ValueError(f"a shard's name = {shard.name[:40]!r}, not {expected!r}")
        if shard.tokens < 1 or not _SHA256.fullmatch(shard.sha256):
            raise ValueError(f"shard {expected} without tokens or without a SHA-256")
    if split.tokens != sum(shard.tokens for shard in split.shards):
        raise ValueError(f"tokens of split {name!r}, not those of its shards")


def shard_name(split: str, number: int) -> str:
    """Return the name of a split's file."""
    return f"{split}-{number:05d}.bin"


def checksum(path: Path) -> str:
    """Return the SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
