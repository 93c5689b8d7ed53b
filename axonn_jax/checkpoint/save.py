"""Saves of checkpoints beside training: the parts of all stages, one commit point, retention, failures."""

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

from axonn_jax.checkpoint.manifest import (
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
from axonn_jax.checkpoint.naming import State
from axonn_jax.checkpoint.orbax import OrbaxWriter, marker, reason, wait_for_markers
from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.documents import flush, in_sight, replace_whole
from axonn_jax.grid import Grid
from axonn_jax.options import typed

_UNFINISHED, _REMOVED = "unfinished_", "removed_"
_PACKAGES = ("axonn_jax", "jax", "jaxlib", "orbax-checkpoint")


@dataclass
class _Job:
    """A save under way."""

    step: int
    folder: Path
    began: float
    losses: Mapping[int, float]
    """Held-out losses of the steps that were given to the saver so far, this one's included."""
    error: str = ""
    written: threading.Event = field(default_factory=threading.Event)
    """This process's part is written, or has failed."""
    cancelled: threading.Event = field(default_factory=threading.Event)
    thread: threading.Thread | None = None


class Saver:
    """Writer of `directory/step_N`; all processes of a run make the same calls, at the same steps.

    A `step_N` appears by one rename, after every stage's part is written and the manifest names every file with a
    checksum: a `step_N` is always complete. A failed save prints one warning, leaves the earlier checkpoints unchanged,
    and training goes on. The `keep` newest checkpoints stay, steps divisible by `keep_every`, and of those whose saves
    were given a held-out loss the one with the lowest. `sizes` are the true shapes of padded arrays.
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
        """Held-out loss by step, of the steps whose saves were given one and have not failed; alike on all processes.

        One number for each such save; those of removed checkpoints stay, and are never the lowest."""
        worlds = grid.shape.pipe if grid.size > 1 else 1
        parts = [f"part_{number:03d}" for number in range(worlds)]
        # Of an array that two parts hold, the first one's copy counts: it comes last.
        self._markers = [marker(part, number) for part in reversed(parts) for number in range(grid.stage_processes)]
        own = grid.rank // grid.stage_processes if grid.size > 1 and worlds > 1 else 0
        self._writer = OrbaxWriter(parts[own], sizes or {})
        self._first = sync.rank == 0
        self._versions = {name: metadata.version(name) for name in _PACKAGES}  # now: packages may change under a run
        self._job: _Job | None = None
        self._refused = ""
        self.last: tuple[int, float] | None = None
        """Step of the last complete save, and its time on the monotonic clock (first process only)."""
        self.took_s = 0.0
        """Duration of the last complete save in seconds (first process only)."""

    @property
    def busy(self) -> bool:
        """True if a save is under way here."""
        return self._job is not None and self._job.thread is not None and self._job.thread.is_alive()

    @property
    def best(self) -> int:
        """The step of the complete checkpoint with the lowest held-out loss, as seen here; 0 without any."""
        return _best(self.losses, all_steps(self.directory))

    def clean(self) -> None:
        """Remove unfinished saves of earlier runs, in the first process alone."""
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
        progress: Callable[[str], None] = lambda what: None,
        *,
        loss: float = math.inf,
    ) -> None:
        """Begin a save; return once the state is on the host. Waits first for an unfinished save.

        The mapping `state` is used up, and the arrays may be donated afterwards. State on the host is not copied but
        written before the return; `progress` is called for each lot. `loss` is the held-out loss of the step; infinite
        for a checkpoint that does not stay for its loss.
        """
        self.settle()
        if loss < math.inf:
            self.losses[step] = loss
        # A copy: the job's thread reads it while the next evaluation is recorded.
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
        """Record a save as failed without starting; wait first for the save before."""
        self.settle()
        self._refused = why
        self._failed(step, why)

    def settle(self) -> str:
        """Wait for the last save; return the reason of a failure (once) or an empty text, on all processes."""
        job, self._job = self._job, None
        if job is None:
            refused, self._refused = self._refused, ""
            return refused
        job.written.wait()
        errors = [text for text in self._sync.gather(job.error) if text]
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
        """End the background threads, after the save under way."""
        self.settle()
        self._writer.close()

    def _prepare(self, folder: Path, needed: int) -> str:
        """Make room for the save; return the obstacle, if any."""
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

    def _finish(self, job: _Job, run: dict[str, Any]) -> None:
        """The thread of a save: the part, and on the first process the commit."""
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

    def _commit(self, job: _Job, run: dict[str, Any]) -> None:
        arrays: dict[str, StoredArray] = {}
        files: dict[str, File] = {}
        for name in self._markers:
            left = job.folder / name
            written = typed(WrittenShard, json.loads(left.read_text(encoding="utf-8")))
            arrays |= written.arrays
            files |= written.files
            left.unlink()
        seen = (Path(folder, name) for folder, _, names in os.walk(job.folder) for name in names)
        missed = [path for path in seen if path.relative_to(job.folder).as_posix() not in files]
        files |= describe_files(job.folder, missed)  # none, unless a file system showed its writer an old listing
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
        replace_whole(job.folder / MANIFEST, manifest.text().encode())
        target = self.directory / name_of(job.step)
        if os.path.lexists(target):  # only a library's caller saves a step twice
            replaced = self.directory / (_REMOVED + target.name)
            _clear(replaced)
            target.rename(replaced)
        job.folder.rename(target)
        flush(self.directory)

    def _retire(self, job: _Job) -> None:
        """Remove surplus checkpoints, where possible."""
        paths = all_steps(self.directory)
        best = _best(job.losses, paths)
        for path in paths[self._keep :]:
            number = step_of(path)
            if number is None or number >= job.step or number == best:
                continue
            if self._keep_every and number % self._keep_every == 0:
                continue
            removed = path.with_name(_REMOVED + path.name)
            with contextlib.suppress(OSError):
                _clear(removed)
                path.rename(removed)
                _clear(removed)

    def _failed(self, step: int, why: str) -> None:
        self.losses.pop(step, None)
        if not self._first:
            return
        before = f"the last complete one is step {self.last[0]}" if self.last else "there is no complete one yet"
        self._warn(f"warning: the checkpoint of step {step} was not saved in {self.directory}: {why}; {before}")


def _best(losses: Mapping[int, float], paths: Sequence[Path]) -> int:
    """Return the step with the lowest loss of the checkpoints that are there: the save of a better one may fail."""
    there = [(losses[step], step) for path in paths if (step := step_of(path)) is not None and step in losses]
    return min(there, default=(math.inf, 0))[1]


def _clear(path: Path) -> None:
    """Remove a folder, or a file or link of its name, where possible; no link is followed."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        path.unlink()
