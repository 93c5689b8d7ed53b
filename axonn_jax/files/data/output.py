"""Output directory of a command: one writer at a time, whole or not at all, nothing of anybody else's removed."""

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from axonn_jax.core.documents import LockHeldError, created_folder, file_lock
from axonn_jax.core.errors import UserError


@dataclass(frozen=True)
class OutputKind:
    """Kind of output directory: command, files, and names in errors."""

    command: str
    done: str
    """Past participle of the command, as in "prepared"."""
    source: str
    out: str
    """Names of the command's arguments."""
    ours: re.Pattern[str]
    """Names of the command's files and folders."""
    last: str = ""
    """The file without which a directory is none of the command's; without any, the command never replaces one."""


@contextlib.contextmanager
def appearing(source: Path, out: Path, kind: OutputKind, *, force: bool = False) -> Iterator[Path]:
    """Yield a directory to write in, which is renamed to ``out`` at the end or removed on any failure.

    If something else has appeared at ``out`` meanwhile, the new files stay next to ``out``, and the error names them.

    Raises:
        UserError: ``out`` holds something else or cannot be written, another process writes it, or the disk is full.
    """
    try:
        # Check before the work and again under the lock: the first check fails early, the second one is reliable.
        _check(source, out, force, kind)
        with created_folder(out.parent), file_lock(out.parent / f".{out.name}.lock") as locked:
            # Without the lock a directory that looks abandoned may belong to a live process.
            if locked:
                _sweep(out, kind)
            _check(source, out, force, kind)
            partial = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
            partial.mkdir()
            try:
                yield partial
                _place(source, partial, out, force, kind)
            except BaseException:
                _remove(partial, kind)
                raise
    except LockHeldError as holder:
        raise UserError(kind.out, str(out), f"a directory without a writer; {holder} writes there") from None
    except OSError as error:
        if error.strerror is None:  # not the system's
            raise
        raise UserError(kind.out, str(out), f"a place that can be written; {error.strerror}") from None


def is_partial(out: Path, folder: Path, name: str) -> bool:
    """True if an entry of a folder belongs to a process making ``out``, alive or killed."""
    return folder == out.parent and name.startswith(f".{out.name}.")


def _check(source: Path, out: Path, force: bool, kind: OutputKind) -> None:
    if source.is_relative_to(out) and os.path.lexists(source):  # else a name on the Hub
        raise UserError(kind.out, str(out), f"a directory other than {kind.source} and its parents")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError(kind.out, str(out), "a directory, or a path where there is nothing yet")
    if out.is_mount():  # no rename replaces it
        raise UserError(kind.out, str(out), "a directory below: this one is a mount point")
    names = sorted(os.listdir(out))
    if not names:
        return
    foreign = [name for name in names if not kind.ours.fullmatch(name)]
    if foreign or kind.last not in names:
        raise UserError(
            kind.out,
            str(out),
            f"a new or empty directory; this one holds {(foreign or names)[0]!r} and stays unchanged",
        )
    if not force:
        raise UserError(kind.out, str(out), f"a new or empty directory; --force replaces this {kind.done} one")


def _place(source: Path, partial: Path, out: Path, force: bool, kind: OutputKind) -> None:
    """Rename the finished directory to ``out``, perhaps minutes after the check."""
    old = partial.with_suffix(".old")
    try:
        _check(source, out, force, kind)
        if force and out.is_dir() and os.listdir(out):
            out.rename(old)
        partial.rename(out)  # replaces an empty directory and nothing else
    except (UserError, OSError) as error:
        with contextlib.suppress(OSError):
            old.rename(out)
        finished = out.parent / partial.stem.removeprefix(".")
        partial.rename(finished)
        why = error.accepted if isinstance(error, UserError) else f"an unchanged directory; {error.strerror}"
        raise UserError(kind.out, str(out), f"{why}; the {kind.done} directory is in {str(finished)!r}") from None
    if old.exists():
        _retire(old, out, kind)


def _sweep(out: Path, kind: OutputKind) -> None:
    """Clean up after killed processes; the caller holds the lock, so no other writer is alive."""
    abandoned = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    for name in sorted(os.listdir(out.parent)):
        folder = out.parent / name
        match = abandoned.fullmatch(name)
        if match is None or folder.is_symlink() or not folder.is_dir():
            continue
        if match[1] == "partial":
            _remove(folder, kind)
        elif (out / kind.last).exists():
            _retire(folder, out, kind)
        else:
            with contextlib.suppress(OSError):
                folder.rename(out)  # restore the replaced directory, whose successor was never finished


def _retire(old: Path, out: Path, kind: OutputKind) -> None:
    """Remove the former ``out``; files that somebody else has put there meanwhile move to the new ``out``."""
    for name in os.listdir(old):
        if not (kind.ours.fullmatch(name) or os.path.lexists(out / name)):
            (old / name).rename(out / name)
    _remove(old, kind)


def _remove(folder: Path, kind: OutputKind) -> None:
    """Remove a directory of this command, complete or not, but keep foreign files in it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = folder / name
            if kind.ours.fullmatch(name):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        folder.rmdir()
