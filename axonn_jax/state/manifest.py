"""What a complete checkpoint holds: its manifest, with a checksum of every file, and the check against it."""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
FORMAT = 1
_BLOCK = 1 << 20
_SHOWN = 3


class Damaged(Exception):
    """A checkpoint cannot be used; the text names the file and what is wrong with it."""


@dataclass(frozen=True)
class Stored:
    """An array of a checkpoint."""

    part: str
    """The folder below the checkpoint that Orbax wrote it into."""
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class File:
    """A file of a checkpoint."""

    bytes: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """Everything about a checkpoint but its arrays' values."""

    step: int
    grid: str
    """The grid that saved it, for people: any other loads it."""
    processes: int
    saved: str
    """When it was complete, in UTC."""
    run: Mapping[str, Any]
    """What a run needs to go on: data position, seeds, configuration."""
    arrays: Mapping[str, Stored]
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


def read(path: Path) -> Manifest:
    """Reads the manifest of a checkpoint directory; raises ``Damaged`` unless it is to the byte as it was written."""
    try:
        raw = (path / MANIFEST).read_bytes()
    except FileNotFoundError:
        raise Damaged(f"{MANIFEST} is missing") from None
    except OSError as error:
        raise Damaged(f"{MANIFEST} is not readable: {error.strerror}") from None
    try:
        both = json.loads(raw)
        content = both["content"]
        whole = raw == _render(both).encode() and both["sha256"] == _digest(_render(content).encode())
    except (ValueError, KeyError, TypeError, RecursionError):
        whole = False
    if not whole:
        raise Damaged(f"{MANIFEST} has been altered or cut off")
    if content["format"] != FORMAT:
        raise Damaged(f"{MANIFEST} is of format {content['format']}; this version reads format {FORMAT}")
    arrays, files = contents(content)
    manifest = Manifest(**{**content, "arrays": arrays, "files": files})
    if path.name.startswith("step_") and path.name != name_of(manifest.step):
        raise Damaged(f"{MANIFEST} is that of step {manifest.step}")
    return manifest


def contents(raw: Mapping[str, Any]) -> tuple[dict[str, Stored], dict[str, File]]:
    """The arrays and files that JSON of a manifest, or of a part of one, lists."""
    arrays = {name: Stored(a["part"], tuple(a["shape"]), a["dtype"]) for name, a in raw["arrays"].items()}
    return arrays, {name: File(**file) for name, file in raw["files"].items()}


def verify(path: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Reads the files of a checkpoint and says what is wrong with each, none if all is well.

    `share` = (rank, size) reads only this process's share of them.
    """
    rank, size = share
    wrong = []
    largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, file in largest_first[rank::size]:
        try:
            found = (path / name).stat().st_size
            if found != file.bytes:
                wrong.append(f"{name} has {found} bytes, not {file.bytes}")
            elif checksum(path / name) != file.sha256:
                wrong.append(f"{name} has been altered: its checksum is not the manifest's")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} is not readable: {error.strerror}")
    return wrong


def check(path: Path) -> Manifest:
    """Returns the manifest of a sound checkpoint; raises ``Damaged`` with the names of what is not."""
    manifest = read(path)
    if wrong := verify(path, manifest):
        raise Damaged(listed(wrong))
    return manifest


def listed(wrong: list[str]) -> str:
    """The first few faults, and how many more there are."""
    more = f" and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
    return "; ".join(wrong[:_SHOWN]) + more


def describe_files(
    root: Path, paths: Iterable[Path], rest: Callable[[float], None] = lambda worked: None
) -> dict[str, File]:
    """Sizes and checksums of files, named from `root`, once they are on the disk.

    `rest` is called now and then with the seconds of work since it was called last.
    """
    found = {}
    for path in sorted(paths):
        flush(path)
        found[path.relative_to(root).as_posix()] = File(path.stat().st_size, checksum(path, rest))
    return found


def flush(path: Path) -> None:
    """Waits until a file, or a directory's list of names, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_whole(path: Path, text: str) -> None:
    """Writes a file that is there whole or not at all, also after a crash."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    flush(part)
    part.replace(path)
    flush(path.parent)


def checksum(path: Path, rest: Callable[[float], None] = lambda worked: None) -> str:
    """SHA-256 of a file, read block by block; `rest` is called after each, as for `describe_files`."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        began = time.monotonic()
        while block := file.read(_BLOCK):
            digest.update(block)
            rest(time.monotonic() - began)
            began = time.monotonic()
    return digest.hexdigest()


def name_of(step: int) -> str:
    """The directory name of a complete checkpoint."""
    return f"step_{step:08d}"


def step_of(path: Path) -> int | None:
    """The step that a directory's name says it is a checkpoint of, if it is one's name."""
    number = path.name.removeprefix("step_")
    return int(number) if path.name.startswith("step_") and number.isdecimal() and len(number) < 16 else None


def all_steps(directory: Path) -> list[Path]:
    """What is named as a complete checkpoint below `directory`, newest first; sound or not."""
    try:
        found: Iterable[Path] = list(directory.iterdir())
    except OSError:
        return []
    steps = [(step, path) for path in found if (step := step_of(path)) is not None and path.is_dir()]
    return [path for _, path in sorted(steps, reverse=True)]


def _render(value: Any) -> str:
    return json.dumps(value, sort_keys=True, indent=1, ensure_ascii=True) + "\n"


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
