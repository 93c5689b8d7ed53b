"""Export of tensors as safetensors: one at a time and piece by piece, into files of a size, with their index."""

import errno
import json
import math
import os
import struct
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from axonn_jax.models.huggingface.files import DTYPES, INDEX, SINGLE, FileSpan

Report = Callable[[int, int], None]
"""Called with the bytes that are written and the bytes in all."""

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
TORCH_NAMES = {"BF16": "bfloat16", "F16": "float16", "F32": "float32", "F64": "float64"}
"""Names of dtypes in config.json, by the name in a file."""
_ALIGNED = 8
_CHUNK = 64 << 20
_CANNOT_COPY = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EPERM, errno.EBADF)


class Tensors(Protocol):
    """Tensors by name, from wherever they are."""

    def span(self, name: str) -> FileSpan | None:
        """Place of a tensor in a source file, if it is written unchanged; else None."""

    def pieces(self, name: str) -> Iterator[NDArray[Any]]:
        """A tensor in pieces along its first dim."""


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return math.prod(self.shape) * self.dtype.itemsize


def write_tensors(folder: Path, tensors: Sequence[Planned], source: Tensors, most: int, report: Report) -> None:
    """Write `model.safetensors`, or several files of at most `most` bytes (or one tensor) each and their index.

    Every tensor is asked for once, in their order where all have one dtype. Pieces are cast to the dtype planned.
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
    """Copy bytes as they are, by the kernel; ends before where the file systems cannot."""
    with span.path.open("rb") as source:
        at = span.start
        while remaining:
            try:
                size = os.copy_file_range(source.fileno(), file.fileno(), min(remaining, _CHUNK), offset_src=at)
            except OSError as error:
                if error.errno in _CANNOT_COPY:
                    return
                raise
            if not size:  # the end of a file that somebody is changing
                return
            at, remaining = at + size, remaining - size
            yield size


def _put(file: FileIO, raw: bytes | memoryview) -> None:
    view = memoryview(raw)
    while view:
        view = view[file.write(view) :]


def _shards(tensors: Sequence[Planned], most: int) -> list[list[Planned]]:
    """The tensors of each file; in one, larger elements come first, so that all are aligned."""
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
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
    """Name in config.json of the dtype that most bytes are in."""
    bytes_of: dict[str, int] = {}
    for tensor in tensors:
        name = TORCH_NAMES[_NAMES[tensor.dtype]]
        bytes_of[name] = bytes_of.get(name, 0) + tensor.nbytes
    return max(bytes_of, key=bytes_of.__getitem__)
