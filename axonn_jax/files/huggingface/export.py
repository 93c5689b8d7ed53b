"""Writer of safetensors: one tensor at a time and piece by piece, into files of limited size with an index."""

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_jax.files.huggingface.files import DTYPES, INDEX, SINGLE, FileSpan

Report = Callable[[int, int], None]
"""Callback with the bytes written so far and the total bytes."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Names of dtypes in config.json, by their names in safetensors files."""
_ALIGNED = 8
_CHUNK = 64 << 20
# Errors by which file systems or old kernels decline `copy_file_range`.
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class Tensors(Protocol):
    """Source of tensors by name."""

    def span(self, name: str) -> FileSpan | None:
        """Return a tensor's location in a source file if it is written unchanged, else None."""

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield a tensor in pieces along its first dim."""


class Planned(NamedTuple):
    """Tensor to be written."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, tensors: Sequence[Planned], source: Tensors, most: int, report: Report) -> None:
    """Write `model.safetensors`, or several files with an index.

    Args:
        folder: Folder of the files.
        tensors: Tensors to write. Each is requested once, in this order if all have the same dtype.
        source: Source of the tensors; pieces are cast to the planned dtype.
        most: Maximum bytes of tensors in a file; a larger tensor gets a file to itself.
        report: Progress callback.
    """
    files = _shards(tensors, most)
    total, done = sum(tensor.nbytes for tensor in tensors), 0
    count = len(files)
    names = [SINGLE] if count == 1 else [f"model-{at:05d}-of-{count:05d}.safetensors" for at in range(1, count + 1)]
    for name, shard in zip(names, files, strict=True):
        with (folder / name).open("xb", buffering=0) as file:
            _put(file, _header(shard))
            for tensor in shard:
                for size in _write(file, tensor, source):
                    done += size
                    report(done, total)
            os.fsync(file.fileno())
    if count > 1:
        weight_map = {tensor.name: name for name, shard in zip(names, files, strict=True) for tensor in shard}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _write(file: FileIO, tensor: Planned, source: Tensors) -> Iterator[int]:
    span, start, remaining = source.span(tensor.name), file.tell(), tensor.nbytes
    if span is not None and span.dtype == tensor.dtype:
        for size in _copied(file, span, remaining):
            remaining -= size
            yield size
        if remaining == 0:
            return
        # The kernel could not copy all of it: discard the part, take back the progress, and write from memory.
        file.seek(start)
        file.truncate()
        yield remaining - tensor.nbytes
        remaining = tensor.nbytes
    for piece in source.pieces(tensor.name):
        raw = np.ascontiguousarray(piece.astype(tensor.dtype, copy=False)).reshape(-1).view(np.uint8)
        _put(file, raw.data)
        remaining -= raw.nbytes
        yield raw.nbytes
    assert remaining == 0, tensor.name


def _copied(file: FileIO, span: FileSpan, remaining: int) -> Iterator[int]:
    # Copies in the kernel, without a pass through user space; ends early if the file systems do not support it.
    with span.path.open("rb") as source:
        at = span.start
        while remaining:
            try:
                size = os.copy_file_range(source.fileno(), file.fileno(), min(remaining, _CHUNK), offset_src=at)
            except OSError as error:
                if error.errno in _CANNOT_COPY:
                    return
                raise
            if not size:  # end of file: another process is truncating the source
                return
            at, remaining = at + size, remaining - size
            yield size


def _put(file: FileIO, raw: bytes | memoryview) -> None:
    view = memoryview(raw)
    while view:
        view = view[file.write(view) :]


def _shards(tensors: Sequence[Planned], most: int) -> list[list[Planned]]:
    # Within a file larger elements come first, so that every tensor is aligned without gaps, which the format forbids.
    shards: list[list[Planned]] = [[]]
    room = most
    for tensor in tensors:
        if shards[-1] and tensor.nbytes > room:
            shards.append([])
            room = most
        shards[-1].append(tensor)
        room -= tensor.nbytes
    return [sorted(shard, key=lambda tensor: -tensor.dtype.itemsize) for shard in shards]


def _header(tensors: Sequence[Planned]) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    at = 0
    for tensor in tensors:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [at, at + tensor.nbytes],
        }
        at += tensor.nbytes
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % _ALIGNED)
    return struct.pack("<Q", len(raw)) + raw


def dtype_name(tensors: Sequence[Planned]) -> str:
    """Return the config.json name of the dtype that holds the most bytes."""
    bytes_of: dict[str, int] = {}
    for tensor in tensors:
        name = TORCH_NAMES[_NAMES[tensor.dtype]]
        bytes_of[name] = bytes_of.get(name, 0) + tensor.nbytes
    return max(bytes_of, key=bytes_of.__getitem__)
