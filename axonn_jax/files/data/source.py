"""Source of text: a folder, one file or the files of a glob, and the documents in them."""

import glob
import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.output import is_partial
from axonn_jax.files.data.read import UNREADABLE, BinaryFile, Document, holds_records, plain, records, text_parts

# fmt: off
INCLUDE = (
    "*.txt", "*.md", "*.rst", "*.tex", "*.html", "*.css", "*.py", "*.pyi", "*.pyx", "*.c", "*.h", "*.cc",
    "*.cpp", "*.hpp", "*.cu", "*.cuh", "*.f", "*.f90", "*.F90", "*.jl", "*.rs", "*.go", "*.java", "*.kt",
    "*.scala", "*.js", "*.ts", "*.jsx", "*.tsx", "*.rb", "*.pl", "*.lua", "*.r", "*.R", "*.m", "*.hs",
    "*.ml", "*.sql", "*.sh", "*.cmake", "*.toml", "*.yaml", "*.yml", "*.jsonl", "*.ndjson", "*.parquet",
)
EXCLUDE = (
    ".git", ".hg", ".svn", "__pycache__", "site-packages", "node_modules", ".venv", ".tox", ".nox",
    ".eggs", "*.egg-info", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints",
    "*.min.js", "*.min.css",
)
# fmt: on


@dataclass(frozen=True)
class Contents:
    """Documents of one file, as the first reading counted them."""

    documents: int = 0
    size: int = 0
    """Bytes of the documents' text in UTF-8."""
    text: Document | None = None
    """The document of a file of text; None for records."""


@dataclass
class Source:
    """Usable files of a source, and the numbers of files and records left out."""

    root: Path
    text_field: str
    """The field of a record, or column of a table, that holds the text."""
    files: dict[str, Contents] = field(default_factory=dict)
    """Files to read, by path below ``root``, in reading order."""
    skipped: Counter[str] = field(default_factory=Counter)
    """Matching files and records of no use, by kind."""
    examples: dict[str, str] = field(default_factory=dict)
    """One skipped file or record of each kind."""
    not_included: Counter[str] = field(default_factory=Counter)
    """Files without a matching pattern, by ending of the name."""

    @property
    def size(self) -> int:
        """Bytes of text in UTF-8."""
        return sum(file.size for file in self.files.values())

    def documents(self) -> Iterator[Document]:
        """Yield all documents in order."""
        for name, contents in self.files.items():
            if contents.text:
                yield contents.text
            else:
                yield from (Document.of(text) for text, _ in records(self.root / name, self.text_field) if text)

    def skip(self, kind: str, name: str) -> None:
        """Count an unusable file or record."""
        self.skipped[kind] += 1
        self.examples.setdefault(kind, name)


def scan(
    path: Path,
    out: Path,
    *,
    include: Sequence[str],
    exclude: Sequence[str],
    text_field: str,
    see: Callable[[Document], None],
    report: Callable[[str, int, int], None],
) -> Source:
    """Find the files of a source; read each once, to check the text and count documents.

    Files of a folder match a pattern of ``include`` (of ``INCLUDE`` where there is none), compressed or not, and no
    pattern of ``exclude`` and ``EXCLUDE``. A pattern without a slash is compared with a file's name (to exclude: with
    a folder's too), one with a slash with the path below the folder. Symbolic links are skipped, but those of the
    Hugging Face cache, in which all files are links. ``out`` is never read.

    Args:
        path: A folder, a file, or a glob such as ``data/*.jsonl``.
        out: The directory to write, which may be below the source.
        include: Patterns of the files to read.
        exclude: Patterns of files and folders to leave out.
        text_field: The field of a record, or column of a table, that holds the text.
        see: Called with each document.
        report: Called with "reading", the bytes of text so far and 0.

    Raises:
        UserError: no text is there, or reading a file needs a missing package.
    """
    if path.is_dir():
        source = Source(path.resolve(), text_field)
        names = _included(source, _walk(source, (*EXCLUDE, *exclude), out), include or INCLUDE)
        names = _without_links(source, names)
    else:
        paths = [path] if path.is_file() else [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
        paths = [file.parent.resolve() / file.name for file in paths if file.is_file()]
        if not paths:
            raise UserError("SOURCE", str(path), "an existing folder or file, or a pattern that matches files")
        source = Source(Path(os.path.commonpath([file.parent for file in paths])), text_field)
        below = (file.relative_to(source.root).as_posix() for file in paths)
        names = _included(source, (name for name in below if not _matches(name, exclude)), include or ("*",))
    # Everything is read once before training a tokenizer, so that errors show early and the split is known.
    done = 0
    for name in names:
        contents = _read(source, name, see)
        if contents.documents:
            source.files[name] = contents
        done += contents.size
        report("reading", done, 0)
    if not source.files:
        raise _nothing(source, path, include)
    return source


def endings(counts: Counter[str]) -> str:
    """Return the most frequent endings of names with their counts, such as "12 .png, 3 .json"."""
    most = [f"{count:,} {ending or 'without an ending'}" for ending, count in counts.most_common(5)]
    return ", ".join(most) + (", others" if len(counts) > 5 else "")


def _nothing(source: Source, path: Path, include: Sequence[str]) -> UserError:
    """Return the refusal of a source without a usable text."""
    if not source.skipped:
        unmatched = f"; there: {endings(source.not_included)}" if source.not_included else ""
        if include:
            return UserError("--include", " ".join(include), f"patterns that match files below {path}{unmatched}")
        return UserError(
            "SOURCE", str(path), f"text, code, JSON Lines or Parquet; --include names other files{unmatched}"
        )
    why = ", ".join(f"{count} {kind}, such as {source.examples[kind]!r}" for kind, count in source.skipped.items())
    if {"no_field", "no_text"} & {*source.skipped}:
        return UserError("--field", source.text_field, f"a field that holds a record's text; skipped: {why}")
    return UserError("SOURCE", str(path), f"at least one text; skipped: {why}")


def _walk(source: Source, exclude: Sequence[str], out: Path) -> Iterator[str]:
    """Yield the paths of the files below a folder, sorted, and count its links to folders."""
    root = source.root

    def unreadable(error: OSError) -> None:
        source.skip("unreadable", os.path.relpath(error.filename or root, root))

    for folder, folders, files in os.walk(root, onerror=unreadable):
        directory = Path(folder)
        prefix = "" if directory == root else directory.relative_to(root).as_posix() + "/"
        # os.walk descends into the folders that stay in this list; sorting makes the order of documents reproducible.
        folders[:] = sorted(
            name
            for name in folders
            if not (_matches(prefix + name, exclude) or directory / name == out or is_partial(out, directory, name))
        )
        for name in [name for name in folders if (directory / name).is_symlink()]:
            source.skip("symlink", prefix + name)
        for name in sorted(files):
            if not (_matches(prefix + name, exclude) or is_partial(out, directory, name)):
                yield prefix + name


def _without_links(source: Source, names: Iterator[str]) -> Iterator[str]:
    """Yield the names of regular files, and of the Hugging Face cache's links to files that were not read yet."""
    targets = set[Path]()
    for name in names:
        path = source.root / name
        if path.is_symlink():
            target = path.resolve()
            owners = [folder.parent for folder in path.parents if folder.name == "snapshots"]
            # The cache's links point to the blobs of a data set, or to the blobs shared by the whole cache.
            blobs = [place / "blobs" for owner in owners for place in (owner, owner.parent)]
            cached = any(target.is_relative_to(folder) for folder in blobs) and target.is_file()
            if target in targets or not cached:
                source.skip("symlink", name)
                continue
            targets.add(target)
        yield name


def _included(source: Source, names: Iterator[str], include: Sequence[str]) -> Iterator[str]:
    """Yield matching names, and count the others."""
    for name in names:
        if _matches(name, include) or _matches(plain(Path(name)).as_posix(), include):
            yield name
        else:
            source.not_included[Path(name).suffix] += 1


def _matches(path: str, patterns: Sequence[str]) -> bool:
    name = path.rpartition("/")[2]
    return any(fnmatchcase(path if "/" in pattern else name, pattern) for pattern in patterns)


def _read(source: Source, name: str, see: Callable[[Document], None]) -> Contents:
    """Count the documents of a file; none in an unusable file."""
    path = source.root / name
    # A pipe would block, and reading a device might never end.
    if not path.is_file():
        source.skip("unreadable", name)
        return Contents()
    if not holds_records(path):
        return _read_text(source, name, see)
    documents = size = 0
    for number, (text, why) in enumerate(records(path, source.text_field), 1):
        if why:
            source.skip(why, f"{name}:{number}")
        else:
            see(Document.of(text))
            documents, size = documents + 1, size + len(text.encode())
    return Contents(documents, size)


def _read_text(source: Source, name: str, see: Callable[[Document], None]) -> Contents:
    path, digest, characters, size, why = source.root / name, hashlib.sha256(), 0, 0, "empty"
    try:
        for part in text_parts(path):
            raw = part.encode()
            digest.update(raw)
            characters, size = characters + len(part), size + len(raw)
    except UserError:
        raise
    except UNREADABLE as error:
        size, why = 0, {BinaryFile: "binary", UnicodeDecodeError: "not_utf8"}.get(type(error), "unreadable")
    if not size:
        source.skip(why, name)
        return Contents()
    document = Document(digest.digest(), characters, lambda: text_parts(path))
    see(document)
    return Contents(1, size, document)
