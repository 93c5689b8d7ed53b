"""Manifest of a complete checkpoint: arrays, files with checksums, and the validation of both.

The manifest's checksum detects damage, not forgery, so every value is validated: a manifest may only name files inside
its own checkpoint.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from io import BufferedReader
from pathlib import Path, PurePosixPath
from typing import Any

from axonn_jax.core.documents import flush, open_regular, parse_json, read_bytes
from axonn_jax.core.errors import typed_arguments
from axonn_jax.core.options import typed

MANIFEST = "manifest.json"
FORMAT = 1
_MOST_BYTES = 64 << 20  # a few hundred thousand files and arrays
_MOST_AROUND = 1 << 16
_LONGEST, _DEEPEST = 512, 16  # of a file's name below a checkpoint
_NFS_PREFIX = ".nfs"
"""Prefix of files that NFS keeps while a removed file is still open."""
_CONTENT = b'\n "content": '
_PART = re.compile(r"part_[0-9]{3,}(/lot_[0-9]{3,})?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CorruptCheckpoint(Exception):
    """Unusable checkpoint; the message names the file and the fault."""


@dataclass(frozen=True)
class StoredArray:
    """Array of a checkpoint."""

    part: str
    """Folder, relative to the checkpoint, in which Orbax wrote the array."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class File:
    """Size and checksum of a file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenShard:
    """Arrays and files that one process wrote to a part."""

    arrays: Mapping[str, StoredArray]
    files: Mapping[str, File]


@dataclass(frozen=True)
class CheckpointManifest:
    """Everything about a checkpoint except the arrays' values."""

    step: int
    grid: str
    """Grid of the save, for information only: any other grid loads the checkpoint."""
    processes: int
    saved: str
    """Time of completion, in UTC."""
    run: Mapping[str, Any]
    """State for resuming the run: data position, seeds, configuration."""
    arrays: Mapping[str, StoredArray]
    files: Mapping[str, File]
    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all files except the manifest."""
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """Return the manifest file as text: the content and its checksum."""
        # The checksum covers the canonical rendering, so the file has a single valid spelling.
        content = asdict(self)
        return _render({"content": content, "sha256": _digest(_render(content).encode())})


def read(path: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory, ignoring fields of later versions.

    Raises ``CorruptCheckpoint`` unless the file is byte for byte as written and every value could come from a save.
    """
    try:
        raw = read_bytes(path / MANIFEST, _MOST_BYTES, inside=path)
    except FileNotFoundError:
        raise CorruptCheckpoint(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise CorruptCheckpoint(f"{MANIFEST} is not readable: {error.strerror}") from None
    except ValueError as error:
        raise CorruptCheckpoint(f"{MANIFEST} is {error}") from None
    try:
        document = parse_json(raw)
        content = document["content"] if _as_written(raw, document) else None
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise CorruptCheckpoint(f"{MANIFEST} has been altered or cut off")
    if (form := content.get("format", FORMAT)) != FORMAT:
        raise CorruptCheckpoint(f"{MANIFEST} is of format {str(form)[:20]}; this version reads format {FORMAT}")
    try:
        manifest = typed(CheckpointManifest, content)
        _check(manifest)
    except ValueError as error:
        raise CorruptCheckpoint(f"{MANIFEST} was not written by a save: {error}") from None
    if path.name.startswith("step_") and path.name != name_of(manifest.step):
        raise CorruptCheckpoint(f"{MANIFEST} is of step {manifest.step}")
    return manifest


def _as_written(raw: bytes, document: object) -> bool:
    """Return True if a manifest is spelled as `CheckpointManifest.text` does and has the right checksum."""
    # Hash the content as it is in the file: rendering a huge forged one again would take minutes.
    start = raw.find(_CONTENT) + len(_CONTENT)
    if not isinstance(document, dict) or start < len(_CONTENT):
        return False
    end = min((at for at in (raw.find(b',\n "', start), raw.find(b"\n}", start)) if at >= 0), default=start)
    content, around = raw[start:end], raw[:start] + b"0" + raw[end:]
    if content.count(b"\n") != content.count(b"\n ") or len(around) > _MOST_AROUND:
        return False
    spelled = around == _render({**document, "content": 0}).encode()
    return spelled and document.get("sha256") == _digest(content.replace(b"\n ", b"\n") + b"\n")


def _check(manifest: CheckpointManifest) -> None:
    """Raise ``ValueError`` for values that no save writes, in particular file names outside the checkpoint's parts."""
    if not (0 <= manifest.step < 10**15 and manifest.processes > 0):
        raise ValueError(f"step = {manifest.step}, processes = {manifest.processes}")
    saved = datetime.fromisoformat(manifest.saved)
    if saved.tzinfo is None or not 1970 <= saved.year < 9999:
        raise ValueError(f"saved = {_short(manifest.saved)}, not a time with its zone")
    folders: set[str] = set()
    for name, file in manifest.files.items():
        steps = name.split("/")
        plain = len(name) <= _LONGEST and len(steps) <= _DEEPEST and name.isprintable() and "\\" not in name
        if not (plain and _PART.fullmatch(steps[0])) or {"", ".", ".."} & set(steps):
            raise ValueError(f"files has {_short(name)}, which is no file in a part")
        if file.bytes < 0 or not _SHA256.fullmatch(file.sha256):
            raise ValueError(f"files[{_short(name)}] = {file.bytes} bytes with checksum {_short(file.sha256)}")
        folders |= {steps[0], "/".join(steps[:2])}
    for name, array in manifest.arrays.items():
        if not _PART.fullmatch(array.part) or array.part not in folders:
            raise ValueError(f"arrays[{_short(name)}].part = {_short(array.part)}, of which no file is listed")
        if min(array.shape, default=0) < 0 or not _DTYPE.fullmatch(array.dtype):
            raise ValueError(f"arrays[{_short(name)}] = {_short(array.dtype)} of shape {str(array.shape)[:80]}")


def name_of(step: int) -> str:
    """Return the directory name of a complete checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step in the name of a checkpoint's folder, or None for another folder."""
    match = re.fullmatch(r"step_([0-9]{1,15})", path.name)
    return int(match[1]) if match else None


def all_steps(directory: Path) -> list[Path]:
    """Return the folders in `directory` named like complete checkpoints, newest first; valid or not."""
    try:
        paths = list(directory.iterdir())
    except OSError:
        return []
    steps = [(step, path) for path in paths if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


FOLDER = "checkpoints"
"""Folder of a run directory's checkpoints."""


def inside(directory: Path) -> Path:
    """Return the checkpoints folder of a run directory, or the directory itself if it has none."""
    return directory / FOLDER if (directory / FOLDER).is_dir() else directory


@typed_arguments
def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint of a directory, or None if it has none.

    Args:
        directory: A run directory, or a directory passed to `Trainer.save`.
    """
    return next(iter(all_steps(inside(Path(directory)))), None)


def _render(value: object) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


def file_faults(
    path: Path, manifest: CheckpointManifest, share: tuple[int, int] = (0, 1), *, fast: bool = False
) -> list[str]:
    """Check the files of a checkpoint and return a line for each fault.

    Args:
        path: The checkpoint.
        manifest: Its manifest.
        share: (rank, size); this process only reads its share of the files, and rank 0 also finds unlisted ones.
        fast: Only check names and sizes.
    """
    rank, size = share
    root = path.resolve()
    wrong = []
    # Deal the files out by descending size, so that processes read about the same number of bytes.
    largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, file in largest_first[rank::size]:
        try:
            with open_regular(root / name, inside=root) as opened:
                actual_bytes = os.fstat(opened.fileno()).st_size
                if actual_bytes != file.bytes:
                    wrong.append(f"{name} has {actual_bytes} bytes, not {file.bytes}")
                elif not fast and checksum(opened) != file.sha256:
                    wrong.append(f"{name} has been altered: its checksum is not the manifest's")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} is not readable: {error.strerror}")
        except ValueError as error:
            wrong.append(f"{name} is {error}")
    if rank == 0:
        # Readers may open files that the manifest does not list, and no checksum would cover those.
        wrong += [f"{name} is not in the manifest" for name in _unlisted(root, manifest)]
    return wrong


def describe_files(root: Path, paths: Iterable[Path]) -> dict[str, File]:
    """Flush files to disk and return their sizes and checksums by path relative to `root`."""
    described = {}
    for path in sorted(paths):
        flush(path)  # before the checksum: a manifest must not list what a power failure could still lose
        with open(path, "rb") as file:
            described[path.relative_to(root).as_posix()] = File(path.stat().st_size, checksum(file))
    return described


def checksum(file: BufferedReader) -> str:
    """Return the SHA-256 of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _unlisted(root: Path, manifest: CheckpointManifest) -> Iterator[str]:
    """Yield files in a checkpoint's parts, and links to directories, that are not in the manifest."""
    for part in sorted({PurePosixPath(name).parts[0] for name in manifest.files}):
        for place, folders, files in os.walk(root / part):
            links = [folder for folder in folders if Path(place, folder).is_symlink()]
            for path in (Path(place, name) for name in sorted((*files, *links))):
                name = path.relative_to(root).as_posix()
                if name not in manifest.files and not path.name.startswith(_NFS_PREFIX):
                    yield name
