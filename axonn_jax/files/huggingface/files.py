"""Reader of safetensors files from untrusted directories: validated headers, and reads of any slice."""

import math
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from axonn_jax.core.documents import check_pointer, open_regular, parse_json, read_json
from axonn_jax.core.errors import UserError
from axonn_jax.files.huggingface.pretrained import no_model, root_of

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F16": np.dtype(np.float16),
    "F32": np.dtype(np.float32),
    "F64": np.dtype(np.float64),
}
"""Dtypes of stored weights, by their names in safetensors files."""
_MOST_INDEX = 64 << 20
_MOST_FILES = 100_000
# Small enough that the allocator reuses the memory: faulting in new pages for each piece takes longer than the copy.
_PIECE = 1 << 20
_POINTER_BYTES = 64  # enough of a file's start to recognize a Git LFS pointer
_EXPONENTS = {DTYPES["BF16"]: 0x7F80, DTYPES["F16"]: 0x7C00}  # exponent bits, all set in infinities and NaN
_FLOAT32 = 4  # bytes
_LENGTH = 8  # bytes of the header's length, at the start of a file


class StoredTensor(NamedTuple):
    """Header entry of a stored tensor."""

    file: str
    dtype: np.dtype
    shape: tuple[int, ...]


class FileSpan(NamedTuple):
    """Location of a tensor's bytes in a file."""

    path: Path
    start: int
    dtype: np.dtype


class TensorFiles:
    """Tensors of a directory's safetensors; the constructor reads only headers.

    Args:
        directory: Directory with `single`, or with an index and the files that it names.
        field: Name of the directory in errors.
        single: Name of the file that holds all tensors.

    Raises:
        UserError: A file is missing, damaged, not a regular file of this directory, or contradicts the index.
    """

    def __init__(self, directory: Path, field: str, single: str = SINGLE):
        self.directory, self._field, self._single = directory, field, single
        self.bytes_read = 0
        """Bytes of tensors that `read` has returned."""
        self._open: dict[str, safe_open] = {}
        self._starts: dict[str, dict[str, int]] = {}
        self.tensors: dict[str, StoredTensor] = {}
        """All tensors, by their names in the files."""
        index = self._index()
        for name in sorted(set(index.values())) if index is not None else [single]:
            self.tensors |= self._header(name)
        if index is not None:
            self._compare(index)

    @property
    def nbytes(self) -> int:
        """Total bytes of all tensors."""
        return sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in self.tensors.values())

    def read(self, name: str, bounds: tuple[tuple[int, int], ...]) -> NDArray[np.generic]:
        """Return the slice of a tensor within `bounds`; reads nothing else of its file.

        Raises:
            UserError: The slice contains infinities or NaN.
        """
        if not bounds:
            part = self._open[self.tensors[name].file].get_tensor(name)
        else:
            part = self._open[self.tensors[name].file].get_slice(name)[tuple(slice(*ends) for ends in bounds)]
        self.bytes_read += part.nbytes
        # Every reader of weights comes through here, so this is the place to reject damaged values.
        if not _finite(part):
            accepted = f"finite numbers, which {self.tensors[name].file} has not"
            raise UserError(f"{self._field}: tensor {name}", "infinite or NaN", accepted)
        return part  # type: ignore[no-any-return]

    def pieces(self, name: str) -> Iterator[NDArray[np.generic]]:
        """Yield a tensor in pieces along its first dim, so that memory does not grow with its size."""
        shape, dtype = self.tensors[name].shape, self.tensors[name].dtype
        if not shape:
            yield self.read(name, ())
            return
        inner_bounds = tuple((0, size) for size in shape[1:])
        rows = max(1, _PIECE // max(1, math.prod(shape[1:]) * dtype.itemsize))
        for at in range(0, shape[0], rows):
            yield self.read(name, ((at, min(at + rows, shape[0])), *inner_bounds))

    def span(self, name: str) -> FileSpan:
        """Return the location of a tensor's bytes after checking its values; raises ``UserError`` as `read` does."""
        stored = self.tensors[name]
        # The bytes are going to be copied without being looked at: read them once to check the values.
        for _ in self.pieces(name):
            pass
        path = self.directory / stored.file
        if stored.file not in self._starts:
            with path.open("rb") as file:
                (length,) = struct.unpack("<Q", file.read(_LENGTH))
                header = parse_json(file.read(length))
            offsets = {key: entry["data_offsets"][0] for key, entry in header.items() if key != "__metadata__"}
            self._starts[stored.file] = {key: _LENGTH + length + at for key, at in offsets.items()}
        return FileSpan(path, self._starts[stored.file][name], stored.dtype)

    def _bad(self, name: str, accepted: str) -> UserError:
        return UserError(self._field, str(self.directory / name), accepted)

    def _index(self) -> dict[str, str] | None:
        if self._single != SINGLE or os.path.lexists(self.directory / SINGLE):
            return None
        try:
            raw = read_json(self.directory / INDEX, _MOST_INDEX, inside=root_of(self.directory))
        except FileNotFoundError:
            raise no_model(self.directory, self._field, SINGLE) from None
        except OSError as error:
            raise self._bad(INDEX, f"an index that can be read; {error.strerror}") from None
        except ValueError as error:
            raise self._bad(INDEX, f"an index in JSON; {error}") from None
        index = raw.get("weight_map") if isinstance(raw, dict) else None
        if not isinstance(index, dict) or not index:
            raise self._bad(INDEX, "an index with a weight_map of tensors to files")
        for tensor, name in index.items():
            if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
                raise UserError(f"{self._field}: file of {tensor}", name, f"a .safetensors file beside {INDEX}")
        if len(set(index.values())) > _MOST_FILES:
            raise self._bad(INDEX, f"at most {_MOST_FILES:,} files")
        return index

    def _header(self, name: str) -> dict[str, StoredTensor]:
        path = self.directory / name
        try:
            with open_regular(path, inside=root_of(self.directory)) as file:
                check_pointer(file.read(_POINTER_BYTES))
            opened = safe_open(path, framework="numpy")
            slices = {tensor: opened.get_slice(tensor) for tensor in opened.keys()}  # noqa: SIM118
            stored = {tensor: (part.get_dtype(), tuple(part.get_shape())) for tensor, part in slices.items()}
        except FileNotFoundError:
            missing = (
                f"the link leads to {os.readlink(path)}, which is missing" if path.is_symlink() else "it is missing"
            )
            raise self._bad(name, f"a file that is there; {missing}") from None
        except OSError as error:
            raise self._bad(name, f"a file that can be read; {error.strerror or error}") from None
        except (SafetensorError, ValueError) as error:
            why = str(error).removeprefix("Error while deserializing header: ").replace("\n", " ")
            why = why[:200]
            if path.is_symlink():
                why += f" ({os.readlink(path)[:200]}); give the directory that has the file itself, or a copy of it"
            raise self._bad(name, f"a sound safetensors file; {why}") from None
        entries = {}
        for tensor, (dtype, shape) in stored.items():
            if dtype not in DTYPES:
                if tensor.endswith((".attn.bias", ".attn.masked_bias")):  # causal masks in old files, not used
                    continue
                accepted = f"one of {', '.join(DTYPES)}; quantised weights are not computed"
                raise UserError(f"{self._field}: dtype of {tensor}", str(dtype), accepted)
            entries[tensor] = StoredTensor(name, DTYPES[dtype], shape)
        if twice := entries.keys() & self.tensors.keys():
            raise self._bad(name, f"tensors of its own; {min(twice)[:200]!r} is in {self.tensors[min(twice)].file} too")
        self._open[name] = opened
        return entries

    def _compare(self, index: Mapping[str, str]) -> None:
        for tensor, name in index.items():
            if tensor not in self.tensors or self.tensors[tensor].file != name:
                raise self._bad(name, f"a file with the tensor {tensor[:200]!r}, as {INDEX} says")
        for tensor, stored in self.tensors.items():
            if tensor not in index:
                raise self._bad(stored.file, f"only tensors that {INDEX} has; {tensor[:200]!r} is not among them")


def _finite(part: np.ndarray) -> bool:
    # Also False for float64 values that overflow float32. Checked in pieces whose copies stay in the cores' caches.
    flat = part.reshape(-1)
    rows = _PIECE // flat.itemsize
    return all(_all_finite(flat[at : at + rows]) for at in range(0, flat.size, rows))


def _all_finite(piece: NDArray[np.generic]) -> bool:
    if bits := _EXPONENTS.get(piece.dtype):  # `isfinite` takes six times as long for these dtypes
        return not np.any(piece.view(np.uint16) & bits == bits)
    with np.errstate(over="ignore"):
        return bool(np.isfinite(piece.astype(np.float32) if piece.itemsize > _FLOAT32 else piece).all())
