"""Orbax: one jax world's shard of a checkpoint, written in the background; the world's processes fail together."""

import contextlib
import gc
import itertools
import json
import logging
import math
import os
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
import tensorstore

from axonn_jax import compat
from axonn_jax.backend.cpu_allocator import GrowthLimit
from axonn_jax.checkpoint.manifest import StoredArray, describe_files
from axonn_jax.checkpoint.naming import State
from axonn_jax.checkpoint.snapshot import on_the_hosts_cores, snapshot
from axonn_jax.documents import replace_whole
from axonn_jax.memory.host_arrays import HOST, LayerSlice, PrunedArray, joined

WORTH_IT = 32_000_000
"""Bytes of copies from which on the memory of the process is looked after."""
_TIMEOUT_S = 1800
_POLL_S = 0.02
_GROWTH = 0.05
"""Share of the copies by which the process may grow during the write."""
_WIDEST = 4
"""Bytes of an element in its widest stored form."""
_OF_A_PROCESS = "ocdbt.process_"
"""Prefix of the folders of one process's files; the process's number follows."""
_NOBODY_WAITED = ("was never retrieved", "was destroyed but it is pending")
"""Log messages of Python's event loops about failures beside the one that was raised."""
_LOTS = 24
"""A lot of state in host memory is about this part of it: 0.5 bytes a parameter of 12."""
_LEAST = 32_000_000
"""Bytes of a pruned state that may always be a lot: each costs a few tenths of a second."""


class OrbaxWriter:
    """Writer of parts, one at a time; every process of a jax world makes the same calls.

    `start` returns once the arrays are copied to the host and may be donated to the next step; `finish` waits for the
    files, on any thread. State in host memory is not copied, and a pruned state is never dense as a whole: `start`
    writes both in lots, one after another, each in its own folder, and returns when Orbax has written all. If one
    process fails, the others of the world learn of the failure instead of waiting. During a write the process keeps
    little freed memory. `sizes` are true shapes, by name, of padded arrays.
    """

    def __init__(self, name: str, sizes: Mapping[str, tuple[int, ...]]):
        self.name, self._sizes = name, sizes
        self._numbers = itertools.count()
        self._barrier = compat.FailingBarrier() if jax.process_count() > 1 else None
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, barrier_sync_fn=self._barrier)
        everyone = set(range(jax.process_count()))  # named, so that Orbax waits without collectives on the devices
        # Without compression: weights hardly compress, and it takes cores.
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        self._checkpointer = ocp.AsyncCheckpointer(
            handler,
            async_options=options,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=everyone if len(everyone) > 1 else None
            ),
        )
        self._growth: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()

    def start(self, folder: Path, state: State, progress: Callable[[str], None] = lambda what: None) -> None:
        """Copy the arrays to the host and begin to write them below `folder`; raise any failure to copy.

        `state` is used up, so that arrays without another user are freed one by one. `progress` is called for every
        lot.
        """
        if self._barrier is not None:
            self._barrier.begin(next(self._numbers))
        waits = any(_in_host_memory(value) or isinstance(value, PrunedArray) for value in state.values())
        least = 0 if any(map(_in_host_memory, state.values())) else _LEAST
        lots = _lots(state, least) if waits else [list(state)]
        parts = [self.name, *(f"{self.name}/lot_{number:03d}" for number in range(1, len(lots)))]
        self._described = {
            name: asdict(StoredArray(part, self._sizes.get(name, tuple(state[name].shape)), str(state[name].dtype)))
            for part, lot in zip(parts, lots, strict=True)
            for name in lot
        }
        with self._failing_together(), _quiet():
            for name, value in state.items():
                if not waits and isinstance(value, LayerSlice) and not on_the_hosts_cores(value):
                    state[name] = value.on_host()
            copied = 0 if waits else snapshot(state)
            for number, (part, lot) in enumerate(zip(parts, lots, strict=True)):
                progress(f"the checkpoint, lot {number + 1} of {len(lots)}")
                arrays = {name: joined(state.pop(name)) for name in lot}
                if self._barrier is not None:  # Orbax's own first barrier waits half an hour for one that has failed
                    self._barrier(key="copied", timeout_ms=_TIMEOUT_S * 1000)
                if arrays:  # none on a rank of the pipe that trains nothing, for which Orbax has no word
                    self._checkpointer.save(folder / part, args=ocp.args.PyTreeSave(arrays))
                if waits:
                    self._checkpointer.wait_until_finished()
        watched = copied >= WORTH_IT
        self._growth = contextlib.closing(GrowthLimit(int(copied * _GROWTH))) if watched else contextlib.nullcontext()

    def finish(self, folder: Path) -> None:
        """Wait until the part is written; each process then writes the checksums of its files beside the part."""
        with self._growth, self._failing_together():
            with _quiet():
                self._checkpointer.wait_until_finished()
            number = jax.process_index()
            files = describe_files(folder, written(folder / self.name, number))
            arrays = self._described if number == 0 else {}
            left = {"arrays": arrays, "files": {name: asdict(file) for name, file in files.items()}}
            replace_whole(folder / marker(self.name, number), json.dumps(left).encode())

    def close(self) -> None:
        """End Orbax's threads."""
        with _quiet(), contextlib.suppress(Exception):  # errors have been reported when they came
            self._checkpointer.close()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._barrier is not None:
                self._barrier.fail(str(error))
            raise


def _in_host_memory(value: Any) -> bool:
    return bool(value.sharding.memory_kind == HOST)


def _lots(state: State, least: int) -> list[list[str]]:
    """Return groups of names whose arrays are at most a small part of all, or `least` bytes, or one array."""
    most = max(sum(value.nbytes for value in state.values()) // _LOTS, least)
    lots: list[list[str]] = []
    room = 0
    for name, value in state.items():
        if not lots or value.nbytes > room:
            lots.append([])
            room = most
        lots[-1].append(name)
        room -= value.nbytes
    return lots


class _Arrays(ocp.type_handlers.ArrayHandler):  # type: ignore[misc]
    """Orbax's writer of arrays: one transaction, in which all arrays fail together."""

    async def serialize(
        self, values: Sequence[jax.Array], infos: Sequence[Any], args: Sequence[Any] | None = None
    ) -> Sequence[Any]:
        """See Orbax: copies the arrays to the host and returns futures of their writing."""
        for info in infos:
            info.byte_limiter = None  # with a limit there is no transaction
        return await super().serialize(values, infos, args)


def marker(part: str, process: int) -> str:
    """File in which a process lists the checksums of the files it wrote of a part."""
    return f"{part}.{process}.json"


def written(part: Path, process: int) -> list[Path]:
    """Files that a process wrote of a part: in the process's own folders, for the first process also in shared ones."""
    own, files_found = f"{_OF_A_PROCESS}{process}", []
    for folder, folders, files in os.walk(part):
        folders[:] = [name for name in folders if name == own or not name.startswith(_OF_A_PROCESS)]
        if process == 0 or own in Path(folder).relative_to(part).parts:
            files_found += [Path(folder, name) for name in files]
    return files_found


def wait_for_markers(folder: Path, names: list[str], cancelled: Any) -> bool:
    """Wait until all processes have left their checksums below `folder`; False if cancelled before.

    Raises ``TimeoutError`` with the missing processes after half an hour.
    """
    end = time.monotonic() + _TIMEOUT_S
    while missing := [name for name in names if not (folder / name).exists()]:
        if cancelled.wait(_POLL_S):
            return False
        if time.monotonic() > end:
            raise TimeoutError(f"no {', '.join(missing)} within {_TIMEOUT_S} s")
    return True


def read_shard(path: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read some arrays of a part into the shapes, types and layouts asked for; collective over the world.

    Arrays padded with zeros, here or in the part, are cut or padded: true shapes are in the manifest.
    """
    arguments = {
        name: ocp.ArrayRestoreArgs(sharding=want.sharding, global_shape=want.shape, dtype=want.dtype, strict=False)
        for name, want in wanted.items()
    }
    everyone = set(range(jax.process_count()))
    options = ocp.options.MultiprocessingOptions(active_processes=everyone if len(everyone) > 1 else None)
    restore = ocp.args.PyTreeRestore(item=dict(wanted), restore_args=arguments, partial_restore=True)
    largest = max((math.prod(want.shape) * max(want.dtype.itemsize, _WIDEST) for want in wanted.values()), default=0)
    at_a_time = 1 + largest // 10**9  # Orbax refuses a shard larger than this limit
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=at_a_time, multiprocessing_options=options)
    with _quiet(), ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        return dict(checkpointer.restore(path.absolute(), restore))


def stored_array(part: Path, name: str, keep: int) -> Any:
    """Return a stored array as tensorstore's, for reads of any slice; at most `keep` bytes stay in memory.

    Raises ``ValueError`` for an unreadable array.
    """
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{part.absolute()}/"}, "path": f"{name}/"}
    context = {"cache_pool": {"total_bytes_limit": keep}}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore, "context": context}, open=True, read=True).result()


def reason(error: BaseException) -> str:
    """Return a short reason for a failed save."""
    text = " ".join(str(error).split())
    for known, short in (
        ("No space left on device", "no space left on the device"),
        ("Disk quota exceeded", "the disk quota is used up"),
        ("Read-only file system", "the file system is read-only"),
        ("Permission denied", "permission denied"),
        ("Stale file handle", "the file system has gone (stale file handle)"),
        ("No such file or directory", "the directory has gone"),
        ("NOT_FOUND", "the directory has gone"),
        ("Input/output error", "input/output error"),
    ):
        if known in text:
            return short
    return f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the logs of Orbax and Python's event loops about errors reported anyway.

    Where one file cannot be written, others usually cannot either: Orbax raises the first failure, and Python logs the
    rest at garbage collection, which is done here.
    """
    logs = [logging.getLogger("absl"), logging.getLogger("asyncio")]

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "orbax" not in record.pathname and not any(words in message for words in _NOBODY_WAITED)

    for log in logs:
        log.addFilter(keep)
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:  # its frames hold the other failures
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            gc.collect()
        raise
    finally:
        for log in logs:
            log.removeFilter(keep)
