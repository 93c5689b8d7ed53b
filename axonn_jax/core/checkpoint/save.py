"""Saver of checkpoints in the background, with a single commit point for all stages' parts and retention."""

import contextlib
import json
import math
import os
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from axonn_jax.core.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    File,
    StoredArray,
    WrittenShard,
    all_steps,
    describe_files,
    name_of,
    step_of,
)
from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.checkpoint.orbax import OrbaxWriter, marker, reason, wait_for_markers
from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.documents import flush, in_sight, write_atomically
from axonn_jax.core.grid import Grid
from axonn_jax.core.options import typed

_UNFINISHED, _REMOVED = "unfinished_", "removed_"
_PACKAGES = ("axonn_jax", "jax", "jaxlib", "orbax-checkpoint")


@dataclass
class _Job:
    """A save in progress."""

    step: int
    folder: Path
    began: float
    losses: Mapping[int, float]
    """Held-out losses recorded by the saver so far, including this step's."""
    error: str = ""
    written: threading.Event = field(default_factory=threading.Event)
    """Set once this process's part is written or has failed."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Saver:
    """Writer of `directory/step_N`; all processes of a run make the same calls, at the same steps.

    A `step_N` appears by one rename, after every stage's part is written and the manifest lists every file with a
    checksum, so it is always complete. A failed save prints one warning and leaves earlier checkpoints unchanged, and
    training continues.

    Args:
        directory: Folder for the checkpoints, shared by all processes.
        grid: Grid of the run.
        sync: Messages between the run's processes.
        keep: Number of newest checkpoints to retain; the one with the lowest held-out loss is retained too.
        keep_every: Also retain steps divisible by this; 0: none.
        warn: Called with a line of text for each failed save.
        sizes: Unpadded shapes, by name, of padded arrays.
    """

    def __init__(
        self,
        directory: Path,
        grid: Grid,
        sync: HostSync,
        *,
        keep: int = 2,
        keep_every: int = 0,
        warn: Callable[[str], None] = lambda text: None,
        sizes: Mapping[str, tuple[int, ...]] | None = None,
    ):
        self.directory, self._grid, self._sync = directory.absolute(), grid, sync
        self._keep, self._keep_every, self._warn = keep, keep_every, warn
        self.losses: dict[int, float] = {}
        """Held-out loss by step, of successful saves that had one; equal on all processes.

        Losses of removed checkpoints stay, but `best` ignores them."""
        worlds = grid.shape.pipe if grid.size > 1 else 1
        parts = [f"part_{number:03d}" for number in range(worlds)]
        # Reversed: of an array in two parts the first part's copy counts, so `_commit` must merge it last.
        self._markers = [marker(part, number) for part in reversed(parts) for number in range(grid.stage_processes)]
        world = grid.rank // grid.stage_processes if grid.size > 1 and worlds > 1 else 0
        self._writer = OrbaxWriter(parts[world], sizes or {})
        self._first = sync.rank == 0
        # Read versions now: packages may be upgraded while the run goes on.
        self._versions = {name: metadata.version(name) for name in _PACKAGES}
        self._job: _Job | None = None
        self._refused = ""
        self.last: tuple[int, float] | None = None
        """Step of the last complete save, and its time on the monotonic clock (first process only)."""
        self.took_s = 0.0
        """Duration of the last complete save in seconds (first process only)."""

    @property
    def busy(self) -> bool:
        """True if a save is in progress on this process."""
        return self._job is not None and self._job.thread is not None and self._job.thread.is_alive()

    @property
    def best(self) -> int:
        """Step of the complete checkpoint with the lowest held-out loss, as this process sees it; 0 if none."""
        return _best(self.losses, all_steps(self.directory))

    def clean(self) -> None:
        """Remove unfinished saves of earlier runs; only the first process does."""
        if self._first and self.directory.is_dir():
            for path in self.directory.iterdir():
                if path.name.startswith((_UNFINISHED, _REMOVED)):
                    _clear(path)

    def resumed(self, step: int) -> None:
        """Record the complete checkpoint from which the run resumes."""
        self.last = (step, time.monotonic())

    def save(
        self,
        step: int,
        state: State,
        run: Mapping[str, Any],
        progress: Callable[[str], None] = lambda text: None,
        *,
        loss: float = math.inf,
    ) -> None:
        """Wait for the previous save, begin a new one, and return once the state is on the host.

        State in host memory is not copied but written before the call returns.

        Args:
            step: Steps done.
            state: Arrays by checkpoint name; emptied. The arrays may be donated afterwards.
            run: State of the run for the manifest.
            progress: Called with a line of text for each lot.
            loss: Held-out loss of the step; infinite if it shall not count for retention.
        """
        self.settle()
        if loss < math.inf:
            self.losses[step] = loss
        # Copy the losses: the job's thread reads them while the next evaluation is recorded.
        job = _Job(step, self.directory / (_UNFINISHED + name_of(step)), time.monotonic(), {**self.losses})
        needed = sum(value.nbytes for value in state.values())
        refusals = self._sync.gather(self._prepare(job.folder, needed) if self._first else "")
        if not refusals[0]:
            unseen = "" if in_sight(job.folder) else f"process {self._sync.rank} does not see {job.folder}"
            refusals = [f"{text}, a directory that all must share" for text in self._sync.gather(unseen) if text]
        if refusals and refusals[0]:
            return self.refuse(step, refusals[0])
        self._job = job
        try:
            self._writer.start(job.folder, state, progress)
        except Exception as error:
            job.error = reason(error)
        job.thread = threading.Thread(target=self._finish, args=(job, dict(run)), name="axonn-save")
        job.thread.start()
        return None

    def refuse(self, step: int, why: str) -> None:
        """Wait for the previous save, then record a save as failed without starting it."""
        self.settle()
        self._refused = why
        self._failed(step, why)

    def settle(self) -> str:
        """Wait for the last save; return the reason if it failed (only once), or an empty string, on all processes."""
        job, self._job = self._job, None
        if job is None:
            refused, self._refused = self._refused, ""
            return refused
        job.written.wait()
        errors = [text for text in self._sync.gather(job.error) if text]
        # The first process may be waiting for a marker that the failed process will never write.
        if errors:
            job.cancelled.set()
        assert job.thread is not None
        job.thread.join()
        error = errors[0] if errors else self._sync.gather(job.error)[0]
        if error:
            if self._first:
                shutil.rmtree(job.folder, ignore_errors=True)
            self._failed(job.step, error)
        return error

    def close(self) -> None:
        """Wait for the save in progress and end the background threads."""
        self.settle()
        self._writer.close()

    def _prepare(self, folder: Path, needed: int) -> str:
        """Create an empty folder for the save; return the obstacle, if any."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            _clear(folder)
            free = shutil.disk_usage(self.directory).free
            if free < needed:
                return (
                    f"no space left on the device: {free / 1e6:,.1f} MB are free, at least {needed / 1e6:,.1f} needed"
                )
            folder.mkdir()
        except OSError as error:
            return reason(error)
        return ""

    def _finish(self, job: _Job, run: dict[str, object]) -> None:
        """Finish this process's part; the first process also commits the checkpoint. Runs on the save's thread."""
        try:
            if not job.error:
                self._writer.finish(job.folder)
        except Exception as error:
            job.error = reason(error)
        finally:
            job.written.set()
        if not self._first or job.error:
            return
        try:
            if wait_for_markers(job.folder, self._markers, job.cancelled):
                self._commit(job, run)
                self.last, self.took_s = (job.step, time.monotonic()), time.monotonic() - job.began
                self._retire(job)
        except Exception as error:
            job.error = reason(error)

    def _commit(self, job: _Job, run: dict[str, object]) -> None:
        arrays: dict[str, StoredArray] = {}
        files: dict[str, File] = {}
        for name in self._markers:
            listing = job.folder / name
            written = typed(WrittenShard, json.loads(listing.read_text(encoding="utf-8")))
            arrays |= written.arrays
            files |= written.files
            listing.unlink()
        seen = (Path(folder, name) for folder, _, names in os.walk(job.folder) for name in names)
        # Usually none: a shared file system may have shown a writer an old listing of its folder.
        missed = [path for path in seen if path.relative_to(job.folder).as_posix() not in files]
        files |= describe_files(job.folder, missed)
        manifest = CheckpointManifest(
            job.step,
            str(self._grid.shape),
            self._grid.size,
            datetime.now(UTC).isoformat(timespec="seconds"),
            run,
            arrays,
            files,
            versions=self._versions,
        )
        write_atomically(job.folder / MANIFEST, manifest.text().encode())
        target = self.directory / name_of(job.step)
        # Saving a step twice, which only library users do: move the old folder away, as a rename needs a free name.
        if os.path.lexists(target):
            replaced = self.directory / (_REMOVED + target.name)
            _clear(replaced)
            target.rename(replaced)
        job.folder.rename(target)
        flush(self.directory)

    def _retire(self, job: _Job) -> None:
        paths = all_steps(self.directory)
        best = _best(job.losses, paths)
        for path in paths[self._keep :]:
            number = step_of(path)
            if number is None or number >= job.step or number == best:
                continue
            if self._keep_every and number % self._keep_every == 0:
                continue
            # Rename before deleting, so that no half-deleted folder is named like a complete checkpoint.
            removed = path.with_name(_REMOVED + path.name)
            with contextlib.suppress(OSError):
                _clear(removed)
                path.rename(removed)
                _clear(removed)

    def _failed(self, step: int, why: str) -> None:
        self.losses.pop(step, None)
        if not self._first:
            return
        last_complete = f"the last complete one is step {self.last[0]}" if self.last else "there is no complete one yet"
        self._warn(f"warning: the checkpoint of step {step} was not saved in {self.directory}: {why}; {last_complete}")


def _best(losses: Mapping[int, float], paths: Sequence[Path]) -> int:
    # Only existing checkpoints count: the save of a better one may have failed.
    candidates = [(losses[step], step) for path in paths if (step := step_of(path)) is not None and step in losses]
    return min(candidates, default=(math.inf, 0))[1]


def _clear(path: Path) -> None:
    """Remove a folder, file or link if possible, without following links."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
