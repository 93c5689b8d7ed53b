"""Documents of one file: a text, or the records of JSON Lines or Parquet, compressed or not."""

import contextlib
import gzip
import hashlib
import io
import json
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TextIO

from axonn_jax.core.errors import UserError

_TABLE = ".parquet"
_RECORDS = (".jsonl", ".ndjson", _TABLE)
_COMPRESSED = (".gz", ".zst")
_PART = 1 << 20
_ROWS = 1024  # rows of a table that are read at once
LONGEST = 1 << 28  # bytes of a line


class BinaryFile(Exception):
    """A file with a NUL byte, so not text."""


UNREADABLE = (BinaryFile, OSError, EOFError, zlib.error, ValueError)
"""Exceptions from reading a damaged file, one out of reach, or one other than text."""


@dataclass(frozen=True)
class Document:
    """One text of a source."""

    digest: bytes
    """SHA-256 of the text in UTF-8."""
    characters: int
    parts: Callable[[], Iterator[str]]
    """Read the text again, in the parts of `parts_of`."""

    def place(self, seed: bytes) -> int:
        """Return a 64-bit hash of seed and text."""
        return int.from_bytes(hashlib.sha256(seed + self.digest).digest()[:8], "big")

    @classmethod
    def of(cls, text: str) -> "Document":
        """Return the document of a text in memory."""
        digest = hashlib.sha256(text.encode()).digest()
        return cls(digest, len(text), lambda: parts_of(io.StringIO(text, newline="")))


def plain(path: Path) -> Path:
    """Return a path without the ending of a compressed file."""
    return path.with_suffix("") if path.suffix in _COMPRESSED else path


def holds_records(path: Path) -> bool:
    """Return True if a file's documents are records, by its ending: JSON Lines and Parquet."""
    return plain(path).suffix in _RECORDS


def text_parts(path: Path) -> Iterator[str]:
    """Yield the text of a file in parts, exactly: line ends and a byte-order mark stay.

    Raises one of ``UNREADABLE``: ``UnicodeDecodeError`` where the file is not UTF-8.
    """
    with _decompressed(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", newline="") as file:
        # A NUL byte is valid UTF-8, so decoding alone does not recognize binary files.
        for part in parts_of(file):
            if "\0" in part:
                raise BinaryFile(path)
            yield part


def parts_of(file: TextIO) -> Iterator[str]:
    """Yield a text in parts of about a million characters, cut after a line end if there is one."""
    tail, text = "", file.read(_PART)
    while text:
        following = file.read(_PART)
        text = tail + text
        end = (text.rfind("\n") + 1 if following else 0) or len(text)
        yield text[:end]
        tail, text = text[end:], following


def records(path: Path, field: str) -> Iterator[tuple[str, str]]:
    """Yield (text, "") for each usable record and ("", reason) for each other one.

    A damaged file, or one out of reach, ends with an "unreadable" record.
    """
    try:
        for row in _column(path, field) if is_table(path) else _lines(path):
            yield _text(row, field)
    except UserError:
        raise
    except UNREADABLE:
        yield "", "unreadable"


def _text(row: object, field: str) -> tuple[str, str]:
    if row is None:
        return "", "not_json"
    if not isinstance(row, dict) or field not in row:
        return "", "no_field"
    text = row[field]
    if not isinstance(text, str):
        return "", "no_text"
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which JSON can escape
        return "", "not_utf8"
    return text, "" if text else "empty"


def _lines(path: Path) -> Iterator[object]:
    """Yield the values of JSON Lines, None for a line of other text; blank lines are skipped."""
    with open_binary(path) as file:
        for line in file:
            if line.strip():
                try:
                    yield json.loads(line)
                except (ValueError, RecursionError):
                    yield None


def _column(path: Path, column: str) -> Iterator[object]:
    """Yield the rows of Parquet with one column, or one empty row where the table has no such column."""
    with _arrow(path).parquet.ParquetFile(path) as file:
        present = column in file.schema_arrow.names
    yield from rows_of(path, [column]) if present else [{}]


def rows_of(path: Path, columns: Sequence[str] | None = None) -> Iterator[dict[str, object]]:
    """Yield the rows of Parquet, with all columns or some."""
    with _arrow(path).parquet.ParquetFile(path) as file:
        for batch in file.iter_batches(_ROWS, columns=columns):
            yield from batch.to_pylist()


def is_table(path: Path) -> bool:
    """True if a file is Parquet, by its ending."""
    return plain(path).suffix == _TABLE


@contextlib.contextmanager
def open_binary(path: Path) -> Iterator[Iterator[bytes]]:
    """Open a file to read its lines, decompressed; ``UserError`` where a package is missing, or for too long a line."""
    with _decompressed(path) as file:
        yield _bounded(file, path)


def _bounded(file: io.BufferedReader | gzip.GzipFile, path: Path) -> Iterator[bytes]:
    # Bounded reads: a file without line ends, or a decompression bomb, must not fill the memory.
    for number, line in enumerate(iter(lambda: file.readline(LONGEST + 1), b""), 1):
        if len(line) > LONGEST:
            raise UserError("SOURCE", f"{path}, line {number}", f"lines of at most {LONGEST:,} bytes")
        yield line


def _decompressed(path: Path) -> io.BufferedReader | gzip.GzipFile:
    if path.suffix == ".gz":
        return gzip.GzipFile(path)
    if path.suffix == ".zst":
        raw = _arrow(path).input_stream(str(path), compression="zstd")
        return io.BufferedReader(raw)
    return io.BufferedReader(io.FileIO(path))


def _arrow(path: Path) -> ModuleType:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        accepted = "a file readable without pyarrow; pip install 'axonn_jax[data]', or --exclude the file"
        raise UserError("SOURCE", str(path), accepted) from None
    return pyarrow
