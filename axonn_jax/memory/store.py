"""Where offloaded buckets wait for their next update: in host memory, or on disk for state that is larger than that."""

import json
import os
import zlib
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from axonn_jax.errors import UserError
from axonn_jax.memory.placement import on_host

Flats = dict[str, jax.Array]
"""A bucket's arrays by slot, each flat and laid out over all devices of a mesh."""
INDEX = "index.json"


class Store(Protocol):
    """Keeps buckets. What `put` returns stands for the bucket until `put` is called for its number again."""

    def put(self, number: int, flats: Flats) -> Any:
        """Starts to store a bucket that is on the devices; returns at once."""

    def get(self, kept: Any) -> Flats:
        """The bucket on the devices."""

    def view(self, kept: Any) -> Flats:
        """The bucket as arrays in host memory."""

    def settle(self, kept: Any) -> None:
        """Waits until a bucket no longer needs the devices' memory."""

    def commit(self, buckets: int) -> None:
        """Called when all buckets of an update have been put."""


class HostStore:
    """In host memory that devices copy from and to by themselves, where the backend has such."""

    def __init__(self, sharding: NamedSharding):
        self._device, self._host = sharding, on_host(sharding)

    def put(self, number: int, flats: Flats) -> Flats:  # noqa: D102
        return {slot: jax.device_put(flat, self._host, may_alias=False) for slot, flat in flats.items()}

    def get(self, kept: Flats) -> Flats:  # noqa: D102
        return {slot: jax.device_put(flat, self._device, may_alias=False) for slot, flat in kept.items()}

    def view(self, kept: Flats) -> Flats:  # noqa: D102
        return kept

    def settle(self, kept: Flats) -> None:  # noqa: D102
        jax.block_until_ready(kept)

    def commit(self, buckets: int) -> None:  # noqa: D102
        return None


class OnDisk(NamedTuple):
    """A bucket on disk, or on its way there."""

    number: int
    generation: int
    written: "Future[dict[str, int]]"
    """Gives the checksum of every file when they are written."""
    dtypes: Mapping[str, np.dtype[Any]]
    length: int
    """Elements on each device."""


class DiskStore:
    """Memory-mapped files in a directory, two generations in turns: an update never writes where the last one's are.

    An index, replaced in one step when all files of an update are on disk, says which generation is whole; so a
    process that dies at any moment leaves the state of its last complete update there (`read_disk`). One process of a
    run has a directory of its own. Raises ``UserError`` where it cannot be written.
    """

    def __init__(self, directory: Path, sharding: NamedSharding):
        self._directory, self._device, self._host = directory, sharding, on_host(sharding)
        self._devices = [d for d in sharding.mesh.devices.flat if d.process_index == jax.process_index()]
        try:
            directory.mkdir(parents=True, exist_ok=True)
            (directory / INDEX).unlink(missing_ok=True)  # of another run, whose files are overwritten now
        except OSError as error:
            raise UserError("memory.offload_to", str(directory), f"a directory that can be written: {error}") from None
        self._generation, self._updates = 0, 0
        self._written: dict[int, OnDisk] = {}
        self._worker = ThreadPoolExecutor(1, "offload")

    def put(self, number: int, flats: Flats) -> OnDisk:  # noqa: D102
        some = next(iter(flats.values()))
        dtypes = {slot: flat.dtype for slot, flat in flats.items()}
        written = self._worker.submit(self._write, number, self._generation, flats)
        kept = OnDisk(number, self._generation, written, dtypes, some.size // self._device.mesh.size)
        self._written[number] = kept
        return kept

    def _write(self, number: int, generation: int, flats: Flats) -> dict[str, int]:
        sums = {}
        for slot, flat in flats.items():
            shards = {shard.device: np.asarray(shard.data) for shard in flat.addressable_shards}
            rows = np.stack([shards[device] for device in self._devices])
            path = self._path(number, slot, generation)
            file = np.memmap(path, rows.dtype, "w+", shape=rows.shape)
            file[:] = rows
            file.flush()
            sums[path.name] = zlib.crc32(rows.tobytes())
        return sums

    def get(self, kept: OnDisk) -> Flats:  # noqa: D102
        return self._read(kept, self._device)

    def view(self, kept: OnDisk) -> Flats:  # noqa: D102
        return self._read(kept, self._host)

    def _read(self, kept: OnDisk, sharding: NamedSharding) -> Flats:
        kept.written.result()
        flats: Flats = {}
        for slot, dtype in kept.dtypes.items():
            path = self._path(kept.number, slot, kept.generation)
            rows = np.memmap(path, dtype, "r", shape=(len(self._devices), kept.length))
            kind = sharding.memory_kind
            shards = [
                jax.device_put(row, SingleDeviceSharding(device, memory_kind=kind), may_alias=False)
                for device, row in zip(self._devices, rows, strict=True)
            ]
            shape = (kept.length * sharding.mesh.size,)
            flats[slot] = jax.make_array_from_single_device_arrays(shape, sharding, shards)
        return flats

    def settle(self, kept: OnDisk) -> None:  # noqa: D102
        kept.written.result()

    def commit(self, buckets: int) -> None:  # noqa: D102
        sums: dict[str, int] = {}
        for number in range(buckets):
            sums |= self._written[number].written.result()
        index = {"generation": self._generation, "updates": self._updates, "crc32": sums}
        fresh = self._directory / f"{INDEX}.new"
        with fresh.open("w", encoding="utf-8") as file:
            json.dump(index, file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(self._directory / INDEX)
        self._generation, self._updates = 1 - self._generation, self._updates + 1

    def _path(self, number: int, slot: str, generation: int) -> Path:
        word = "".join(letter if letter.isalnum() else "_" for letter in slot).strip("_")
        return self._directory / f"bucket_{number:05d}.{word}.{generation}"


def read_disk(directory: Path) -> tuple[int, dict[str, np.ndarray]]:
    """The number of updates before the last whole one in a directory, and its files' bytes by bucket and slot.

    Raises ``ValueError`` naming a file that is not as it was written.
    """
    index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
    found = {}
    for name, checksum in index["crc32"].items():
        data = np.fromfile(directory / name, np.uint8)
        if zlib.crc32(data.tobytes()) != checksum:
            raise ValueError(f"{directory / name} is not as it was written")
        found[name.rsplit(".", 1)[0]] = data
    return index["updates"], found
