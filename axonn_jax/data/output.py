"""The directory that a prepare makes: one writer at a time, whole or not at all, nothing of anybody else's removed."""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

from axonn_jax.data.manifest import MANIFEST
from axonn_jax.documents import Held, held, made
from axonn_jax.errors import UserError

_OURS = re.compile(r"manifest\.json|tokenizer\.json|(train|valid)-\d{5,}\.bin")


@contextlib.contextmanager
def appearing(source: Path, out: Path, *, force: bool) -> Iterator[Path]:
    """Gives a directory to write in, which becomes ``out`` at the end by a rename, or goes on any failure.

    Where ``out`` has been taken meanwhile, what was written is kept beside it, and the error says where.

    Raises:
        UserError: ``out`` holds something else or cannot be written, another prepare writes it, or the disk is full.
    """
    try:
        _check(source, out, force)
        with made(out.parent), held(out.parent / f".{out.name}.lock") as locked:
            if locked:  # else a directory that looks left over may be a live prepare's
                _sweep(out)
            _check(source, out, force)
            partial = out.parent / f".{out.name}.{secrets.token_hex(4)}.partial"
            partial.mkdir()
            try:
                yield partial
                _place(source, partial, out, force)
            except BaseException:
                _remove(partial)
                raise
    except Held as holder:
        raise UserError("OUT_DIR", str(out), f"a directory that no other prepare writes; {holder} does") from None
    except OSError as error:
        if error.strerror is None:  # not the system's
            raise
        raise UserError("OUT_DIR", str(out), f"a place that can be written; {error.strerror}") from None


def is_partial(out: Path, folder: Path, name: str) -> bool:
    """Whether an entry of a folder belongs to a prepare that makes ``out``, now or before it was killed."""
    return folder == out.parent and name.startswith(f".{out.name}.")


def _check(source: Path, out: Path, force: bool) -> None:
    if source.is_relative_to(out):
        raise UserError("OUT_DIR", str(out), "a directory other than SOURCE_DIR, and not one around it")
    if not os.path.lexists(out):
        return
    if not out.is_dir():
        raise UserError("OUT_DIR", str(out), "a directory, or a path where there is nothing yet")
    if out.is_mount():  # no rename replaces it
        raise UserError("OUT_DIR", str(out), "a directory in it: this one is where a file system is mounted")
    names = sorted(os.listdir(out))
    if not names:
        return
    foreign = [name for name in names if not _OURS.fullmatch(name)]
    if foreign or MANIFEST not in names:
        raise UserError(
            "OUT_DIR",
            str(out),
            f"a new or empty directory; this one holds {(foreign or names)[0]!r}, so it is left as it is",
        )
    if not force:
        raise UserError("OUT_DIR", str(out), "a new or empty directory; --force replaces this prepared one")


def _place(source: Path, partial: Path, out: Path, force: bool) -> None:
    """Renames the finished directory to ``out``, where minutes may have passed since it was checked."""
    old = partial.with_suffix(".old")
    try:
        _check(source, out, force)
        if force and out.is_dir() and os.listdir(out):
            out.rename(old)
        partial.rename(out)  # replaces an empty directory and nothing else
    except (UserError, OSError) as error:
        with contextlib.suppress(OSError):
            old.rename(out)
        kept = out.parent / partial.stem.removeprefix(".")
        partial.rename(kept)
        why = error.accepted if isinstance(error, UserError) else f"a place that stays as it is; {error.strerror}"
        raise UserError("OUT_DIR", str(out), f"{why}; what was prepared is whole in {str(kept)!r}") from None
    if old.exists():
        _retire(old, out)


def _sweep(out: Path) -> None:
    """Clears up after killed prepares: the caller holds the lock, so none of them is alive."""
    left_over = re.compile(rf"\.{re.escape(out.name)}\.[0-9a-f]{{8}}\.(partial|old)")
    for name in sorted(os.listdir(out.parent)):
        folder = out.parent / name
        match = left_over.fullmatch(name)
        if match is None or folder.is_symlink() or not folder.is_dir():
            continue
        if match[1] == "partial":
            _remove(folder)
        elif (out / MANIFEST).exists():
            _retire(folder, out)
        else:
            with contextlib.suppress(OSError):
                folder.rename(out)  # the earlier one: its successor never came


def _retire(old: Path, out: Path) -> None:
    """Removes the directory that ``out`` was; what somebody put there in the last moment goes to ``out``."""
    for name in os.listdir(old):
        if not (_OURS.fullmatch(name) or os.path.lexists(out / name)):
            (old / name).rename(out / name)
    _remove(old)


def _remove(folder: Path) -> None:
    """Removes a prepared directory, whole or not, but nothing else that may be in it."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if _OURS.fullmatch(name):
                (folder / name).unlink()
        folder.rmdir()
