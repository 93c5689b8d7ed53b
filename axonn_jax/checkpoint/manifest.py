"""Manifest of a complete checkpoint: files with checksums, arrays, and tests of the files.

A manifest's own checksum finds accidental damage, not forgery, so a manifest may name files inside its own checkpoint
only.
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

from axonn_jax.documents import flush, open_regular, parse_json, read_bytes
from axonn_jax.errors import typed_arguments
from axonn_jax.options import typed

MANIFEST = "manifest.json"
FORMAT = 1
_MOST_BYTES = 64 << 20  # a few hundred thousand files and arrays
_MOST_AROUND = 1 << 16
_LONGEST, _DEEPEST = 512, 16  # of a file's name below a checkpoint
_KEPT_OPEN = ".nfs"
"""Prefix of a removed file still open on NFS."""
_CONTENT = b'\n "content": '
_PART = re.compile(r"part_[0-9]{3,}(/lot_[0-9]{3,})?")
_DTYPE = re.compile(r"[a-z][a-z0-9_]{0,31}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


class CorruptCheckpoint(Exception):
    """A checkpoint cannot be used; the text names the file and the fault."""


@dataclass(frozen=True)
class StoredArray:
    """An array of a checkpoint."""

    part: str
    """Folder below the checkpoint with the array, written by Orbax."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class File:
    """A file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class WrittenShard:
    """Arrays and files of a part by one process."""

    arrays: Mapping[str, StoredArray]
    files: Mapping[str, File]


@dataclass(frozen=True)
class CheckpointManifest:
    """Description of a checkpoint: all but the arrays' values."""

    step: int
    grid: str
    """Grid of the save, for people: any other grid loads the checkpoint."""
    processes: int
    saved: str
    """Time at which the checkpoint was complete, in UTC."""
    run: Mapping[str, Any]
    """State of the run to resume: data position, seeds, configuration."""
    arrays: Mapping[str, StoredArray]
    files: Mapping[str, File]
    format: int = FORMAT
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """Bytes of all files but the manifest."""
        return sum(file.bytes for file in self.files.values())

    def text(self) -> str:
        """The manifest file: the content, and its checksum over the content's only spelling."""
        content = asdict(self)
        return _render({"content": content, "sha256": _digest(_render(content).encode())})


def read(path: Path) -> CheckpointManifest:
    """Read the manifest of a checkpoint directory; fields of later versions are left out.

    Raises ``CorruptCheckpoint`` unless the file is unchanged to the byte, and holds only fields of a save.
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
        both = parse_json(raw)
        content = both["content"] if _as_written(raw, both) else None
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


def _as_written(raw: bytes, both: Any) -> bool:
    """True if a manifest has the spelling of `CheckpointManifest.text` and the right checksum.

    The content is compared as spelled in the file: rendering a forged, huge one anew would take minutes.
    """
    start = raw.find(_CONTENT) + len(_CONTENT)
    if not isinstance(both, dict) or start < len(_CONTENT):
        return False
    end = min((at for at in (raw.find(b',\n "', start), raw.find(b"\n}", start)) if at >= 0), default=start)
    content, around = raw[start:end], raw[:start] + b"0" + raw[end:]
    if content.count(b"\n") != content.count(b"\n ") or len(around) > _MOST_AROUND:
        return False
    spelled = around == _render({**both, "content": 0}).encode()
    return spelled and both.get("sha256") == _digest(content.replace(b"\n ", b"\n") + b"\n")


def _check(manifest: CheckpointManifest) -> None:
    """Raise ``ValueError`` for values never written by a save, above all names outside of the checkpoint's parts."""
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
    """The directory name of a complete checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """Return the step of a checkpoint's folder by its name, None for another folder."""
    match = re.fullmatch(r"step_([0-9]{1,15})", path.name)
    return int(match[1]) if match else None


def all_steps(directory: Path) -> list[Path]:
    """Folders named as complete checkpoints below `directory`, newest first; valid or not."""
    try:
        paths = list(directory.iterdir())
    except OSError:
        return []
    steps = [(step, path) for path in paths if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


FOLDER = "checkpoints"
"""Folder of a run directory's checkpoints."""


def inside(directory: Path) -> Path:
    """Return where a directory has its checkpoints: in the folder of a run directory's, or itself."""
    return directory / FOLDER if (directory / FOLDER).is_dir() else directory


@typed_arguments
def latest(directory: str | Path) -> Path | None:
    """Return the newest checkpoint of a directory, None where there is none.

    Args:
        directory: A run directory, or one that `Trainer.save` was given.
    """
    return next(iter(all_steps(inside(Path(directory)))), None)


def _render(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def _short(text: str) -> str:
    return repr(text) if len(text) <= 80 else f"{text[:80]!r}..."


def file_faults(
    path: Path, manifest: CheckpointManifest, share: tuple[int, int] = (0, 1), *, fast: bool = False
) -> list[str]:
    """Read the files of a checkpoint and return a line for each fault, none if all is well.

    `share` = (rank, size) reads only this process's share. The first process also looks for unlisted files, which
    nobody would check. `fast` looks at names and sizes alone.
    """
    rank, size = share
    root = path.resolve()
    wrong = []
    largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, file in largest_first[rank::size]:
        try:
            with open_regular(root / name, inside=root) as opened:
                size_here = os.fstat(opened.fileno()).st_size
                if size_here != file.bytes:
                    wrong.append(f"{name} has {size_here} bytes, not {file.bytes}")
                elif not fast and checksum(opened) != file.sha256:
                    wrong.append(f"{name} has been altered: its checksum is not the manifest's")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} is not readable: {error.strerror}")
        except ValueError as error:
            wrong.append(f"{name} is {error}")
    if rank == 0:
        wrong += [f"{name} is not in the manifest" for name in _unlisted(root, manifest)]
    return wrong


def describe_files(root: Path, paths: Iterable[Path]) -> dict[str, File]:
    """Return sizes and checksums of files on the disk, named from `root`."""
    described = {}
    for path in sorted(paths):
        flush(path)
        with open(path, "rb") as file:
            described[path.relative_to(root).as_posix()] = File(path.stat().st_size, checksum(file))
    return described


def checksum(file: BufferedReader) -> str:
    """SHA-256 of a file."""
    return hashlib.file_digest(file, "sha256").hexdigest()


def _unlisted(root: Path, manifest: CheckpointManifest) -> Iterator[str]:
    """Return names, missing in the manifest, of files in a checkpoint's parts and of links to directories."""
    for part in sorted({PurePosixPath(name).parts[0] for name in manifest.files}):
        for place, folders, files in os.walk(root / part):
            links = [folder for folder in folders if Path(place, folder).is_symlink()]
            for path in (Path(place, name) for name in sorted((*files, *links))):
                name = path.relative_to(root).as_posix()
                if name not in manifest.files and not path.name.startswith(_KEPT_OPEN):
                    yield name
