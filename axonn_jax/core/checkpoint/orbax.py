"""Orbax writer and reader of one JAX world's part of a checkpoint, with failures shared by the world's processes."""

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
from threading import Event

import jax
import orbax.checkpoint as ocp
import tensorstore

from axonn_jax.core import compat
from axonn_jax.core.backend.cpu_allocator import GrowthLimit
from axonn_jax.core.checkpoint.manifest import StoredArray, describe_files
from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.checkpoint.snapshot import on_the_hosts_cores, snapshot
from axonn_jax.core.documents import write_atomically
from axonn_jax.core.memory.host_arrays import HOST, LayerSlice, PrunedArray, materialize

WORTH_IT = 32_000_000
"""Bytes of copies above which the growth of the process during a write is limited."""
_TIMEOUT_S = 1800
_POLL_S = 0.02
_GROWTH = 0.05
"""Fraction of the copies' bytes by which the process may grow during the write."""
_MAX_ITEMSIZE = 4
"""Bytes of an element in its widest stored form."""
_PROCESS_PREFIX = "ocdbt.process_"
"""Prefix, before the process index, of the folders with a process's files."""
_UNRETRIEVED = ("was never retrieved", "was destroyed but it is pending")
"""Messages that Python's event loops log about failures besides the raised one."""
_LOT_COUNT = 24
"""Number of lots in which state in host memory is written: each has about 0.5 of the 12 bytes per parameter."""
_LOT_MIN_BYTES = 32_000_000
"""Least bytes of a pruned state's lot, since each lot costs a few tenths of a second."""


class OrbaxWriter:
    """Writer of one part at a time; every process of a JAX world makes the same calls.

    `start` returns once the arrays are copied to the host and may be donated to the next step; `finish` waits for the
    files, on any thread. State in host memory is not copied, and a pruned state is never dense all at once: `start`
    writes both in lots, one after another, each in a separate folder, and returns when Orbax has written all. If one
    process fails, the other processes of the world raise instead of waiting for it.

    Args:
        name: Name of the part, a folder below the checkpoint.
        sizes: Unpadded shapes, by name, of padded arrays.
    """

    def __init__(self, name: str, sizes: Mapping[str, tuple[int, ...]]):
        self.name, self._sizes = name, sizes
        self._numbers = itertools.count()
        self._barrier = compat.FailingBarrier() if jax.process_count() > 1 else None
        options = ocp.options.AsyncOptions(timeout_secs=_TIMEOUT_S, barrier_sync_fn=self._barrier)
        # List all processes explicitly: Orbax then waits for them without collectives on the devices.
        everyone = set(range(jax.process_count()))
        # No compression: weights hardly compress, and it would take cores from training.
        registry = ocp.type_handlers.create_type_handler_registry((jax.Array, _Arrays()))
        handler = ocp.PyTreeCheckpointHandler(use_compression=False, type_handler_registry=registry)
        self._checkpointer = ocp.AsyncCheckpointer(
            handler,
            async_options=options,
            multiprocessing_options=ocp.options.MultiprocessingOptions(
                active_processes=everyone if len(everyone) > 1 else None
            ),
        )
        self._growth: contextlib.AbstractContextManager[object] = contextlib.nullcontext()

    def start(self, folder: Path, state: State, progress: Callable[[str], None] = lambda text: None) -> None:
        """Copy the arrays to the host and begin to write them below `folder`; raise any failure to copy.

        Empties `state`, so that arrays without other references are freed one by one. `progress` is called with a line
        of text for every lot.
        """
        if self._barrier is not None:
            self._barrier.begin(next(self._numbers))
        waits = any(_in_host_memory(value) or isinstance(value, PrunedArray) for value in state.values())
        least = 0 if any(map(_in_host_memory, state.values())) else _LOT_MIN_BYTES
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
                arrays = {name: materialize(state.pop(name)) for name in lot}
                # Orbax's first barrier would wait half an hour for a process that has failed by now.
                if self._barrier is not None:
                    self._barrier(key="copied", timeout_ms=_TIMEOUT_S * 1000)
                # A rank of the pipe that trains nothing has no arrays, and Orbax rejects an empty tree.
                if arrays:
                    self._checkpointer.save(folder / part, args=ocp.args.PyTreeSave(arrays))
                if waits:
                    self._checkpointer.wait_until_finished()
        watched = copied >= WORTH_IT
        self._growth = contextlib.closing(GrowthLimit(int(copied * _GROWTH))) if watched else contextlib.nullcontext()

    def finish(self, folder: Path) -> None:
        """Wait until the part is written; each process then writes its files' checksums to its `marker`."""
        with self._growth, self._failing_together():
            with _quiet():
                self._checkpointer.wait_until_finished()
            number = jax.process_index()
            files = describe_files(folder, written(folder / self.name, number))
            arrays = self._described if number == 0 else {}
            listing = {"arrays": arrays, "files": {name: asdict(file) for name, file in files.items()}}
            write_atomically(folder / marker(self.name, number), json.dumps(listing).encode())

    def close(self) -> None:
        """End Orbax's threads."""
        with _quiet(), contextlib.suppress(Exception):  # errors were reported by `start` and `finish`
            self._checkpointer.close()

    @contextlib.contextmanager
    def _failing_together(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if self._barrier is not None:
                self._barrier.fail(str(error))
            raise


def _in_host_memory(value: jax.Array) -> bool:
    return bool(value.sharding.memory_kind == HOST)


def _lots(state: State, least: int) -> list[list[str]]:
    """Group names into lots of at most 1/`_LOT_COUNT` of all bytes or `least` bytes; a larger array is one lot."""
    most = max(sum(value.nbytes for value in state.values()) // _LOT_COUNT, least)
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
    """Orbax's writer of arrays in one transaction, so that all arrays fail together."""

    async def serialize(
        self,
        values: Sequence[jax.Array],
        infos: Sequence[ocp.type_handlers.ParamInfo],
        args: Sequence[object] | None = None,
    ) -> Sequence[object]:
        """Copy the arrays to the host and return futures of their writes; see Orbax."""
        for info in infos:
            info.byte_limiter = None  # Orbax uses a transaction only without a byte limit
        return await super().serialize(values, infos, args)


def marker(part: str, process: int) -> str:
    """Return the name of the file in which a process lists the arrays and checksums that it wrote to a part."""
    return f"{part}.{process}.json"


def written(part: Path, process: int) -> list[Path]:
    """Return the files of a part that a process wrote: those in its folders, and for process 0 also the shared ones."""
    process_folder, paths = f"{_PROCESS_PREFIX}{process}", []
    for folder, folders, files in os.walk(part):
        folders[:] = [name for name in folders if name == process_folder or not name.startswith(_PROCESS_PREFIX)]
        if process == 0 or process_folder in Path(folder).relative_to(part).parts:
            paths += [Path(folder, name) for name in files]
    return paths


def wait_for_markers(folder: Path, names: list[str], cancelled: Event) -> bool:
    """Wait until all markers exist in `folder`; return False if cancelled first.

    Raises ``TimeoutError`` naming the missing markers after half an hour.
    """
    # Poll for files instead of a barrier: this runs on a thread beside training, and the worlds of a pipeline's stages
    # share no barrier.
    end = time.monotonic() + _TIMEOUT_S
    while missing := [name for name in names if not (folder / name).exists()]:
        if cancelled.wait(_POLL_S):
            return False
        if time.monotonic() > end:
            raise TimeoutError(f"no {', '.join(missing)} within {_TIMEOUT_S} s")
    return True


def read_shard(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read arrays of a part into the shapes, dtypes and layouts of `abstract`; collective over the world.

    Zero padding is cut or added as needed; the unpadded shapes are in the manifest.
    """
    arguments = {
        name: ocp.ArrayRestoreArgs(
            sharding=target.sharding, global_shape=target.shape, dtype=target.dtype, strict=False
        )
        for name, target in abstract.items()
    }
    everyone = set(range(jax.process_count()))
    options = ocp.options.MultiprocessingOptions(active_processes=everyone if len(everyone) > 1 else None)
    restore = ocp.args.PyTreeRestore(item=dict(abstract), restore_args=arguments, partial_restore=True)
    largest = max(
        (math.prod(target.shape) * max(target.dtype.itemsize, _MAX_ITEMSIZE) for target in abstract.values()), default=0
    )
    at_a_time = 1 + largest // 10**9  # Orbax refuses a shard larger than this limit
    handler = ocp.PyTreeCheckpointHandler(restore_concurrent_gb=at_a_time, multiprocessing_options=options)
    with _quiet(), ocp.Checkpointer(handler, multiprocessing_options=options) as checkpointer:
        return dict(checkpointer.restore(path.absolute(), restore))


def stored_array(part: Path, name: str, keep: int) -> tensorstore.TensorStore:
    """Open a stored array with TensorStore to read any slice, caching at most `keep` bytes.

    Raises ``ValueError`` for an unreadable array.
    """
    kvstore = {"driver": "ocdbt", "base": {"driver": "file", "path": f"{part.absolute()}/"}, "path": f"{name}/"}
    context = {"cache_pool": {"total_bytes_limit": keep}}
    return tensorstore.open({"driver": "zarr", "kvstore": kvstore, "context": context}, open=True, read=True).result()


def reason(error: BaseException) -> str:
    """Return a short reason for a failed save."""
    text = " ".join(str(error).split())
    for pattern, short in (
        ("No space left on device", "no space left on the device"),
        ("Disk quota exceeded", "the disk quota is used up"),
        ("Read-only file system", "the file system is read-only"),
        ("Permission denied", "permission denied"),
        ("Stale file handle", "the file system has gone (stale file handle)"),
        ("No such file or directory", "the directory has gone"),
        ("NOT_FOUND", "the directory has gone"),
        ("Input/output error", "input/output error"),
    ):
        if pattern in text:
            return short
    return f"{type(error).__name__}: {text[:300]}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence logs of Orbax and Python's event loops about errors that are reported anyway."""
    # If one file cannot be written, usually none can. Orbax raises the first failure, and Python logs the remaining
    # ones at garbage collection, which is therefore forced here, inside the filter.
    logs = [logging.getLogger("absl"), logging.getLogger("asyncio")]

    def keep(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        return "orbax" not in record.pathname and not any(words in message for words in _UNRETRIEVED)

    for log in logs:
        log.addFilter(keep)
    try:
        yield
    except BaseException as error:
        cause: BaseException | None = error
        while cause is not None:  # its frames keep the remaining failures alive
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # coroutines that were never awaited
            gc.collect()
        raise
    finally:
        for log in logs:
            log.removeFilter(keep)
