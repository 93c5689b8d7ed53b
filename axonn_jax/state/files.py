"""Files of a checkpoint: written so that they last, and read only where they lie inside it."""

import hashlib
import os
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path, PurePosixPath
from typing import BinaryIO

from axonn_jax.documents import flush, open_regular
from axonn_jax.state.manifest import Damaged, File, Manifest, read

_BLOCK = 1 << 20
_SHOWN = 3
_KEPT_OPEN = ".nfs"
"""What NFS names a removed file that somebody still has open."""


def verify(path: Path, manifest: Manifest, share: tuple[int, int] = (0, 1), *, fast: bool = False) -> list[str]:
    """Reads the files of a checkpoint and says what is wrong with each, none if all is well.

    `share` = (rank, size) reads only this process's share of them. The first process also looks for files beside them,
    which nobody would check. `fast` looks at names and sizes alone.
    """
    rank, size = share
    root = path.resolve()
    wrong = []
    largest_first = sorted(manifest.files.items(), key=lambda item: (-item[1].bytes, item[0]))
    for name, file in largest_first[rank::size]:
        try:
            with open_regular(root / name, inside=root) as opened:
                found = os.fstat(opened.fileno()).st_size
                if found != file.bytes:
                    wrong.append(f"{name} has {found} bytes, not {file.bytes}")
                elif not fast and checksum(opened) != file.sha256:
                    wrong.append(f"{name} has been altered: its checksum is not the manifest's")
        except FileNotFoundError:
            wrong.append(f"{name} is missing")
        except OSError as error:
            wrong.append(f"{name} is not readable: {error.strerror}")
        except ValueError as error:
            wrong.append(f"{name} is {error}")
    if rank == 0:
        wrong += [f"{name} is not in the manifest" for name in _beside(root, manifest)]
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
        with open(path, "rb") as file:
            found[path.relative_to(root).as_posix()] = File(path.stat().st_size, checksum(file, rest))
    return found


def checksum(file: BinaryIO, rest: Callable[[float], None] = lambda worked: None) -> str:
    """SHA-256 of a file, read block by block; `rest` is called after each, as for `describe_files`."""
    digest = hashlib.sha256()
    began = time.monotonic()
    while block := file.read(_BLOCK):
        digest.update(block)
        rest(time.monotonic() - began)
        began = time.monotonic()
    return digest.hexdigest()


def _beside(root: Path, manifest: Manifest) -> Iterator[str]:
    """Names of files in the parts of a checkpoint, and of links to directories, that the manifest does not have."""
    for part in sorted({PurePosixPath(name).parts[0] for name in manifest.files}):
        for place, folders, files in os.walk(root / part):
            links = [folder for folder in folders if Path(place, folder).is_symlink()]
            for path in (Path(place, name) for name in sorted((*files, *links))):
                name = path.relative_to(root).as_posix()
                if name not in manifest.files and not path.name.startswith(_KEPT_OPEN):
                    yield name
