"""What all places of a pipeline decide together once a step: the loss, the norm, gradients of shared parameters."""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

import jax
import numpy as np

from axonn_jax.channels.shards import (
    empty_bytes,
    from_bytes,
    host_bytes,
    local_devices,
    local_shards,
    rebuild,
    shard_bytes,
)

if TYPE_CHECKING:
    from mpi4py import MPI

_NUMBERS = 2


class Together(ABC):
    """Small exchanges between the places of the pipe."""

    @abstractmethod
    def sums(self, numbers: Mapping[int, tuple[float, ...]]) -> list[float]:
        """Adds up each of several numbers over all places, in the order of the places, so that all get the same.

        `numbers` has an entry for every place of this process.
        """

    @abstractmethod
    def swap(self, values: Mapping[int, jax.Array], first: int, last: int) -> dict[int, jax.Array]:
        """Gives the places `first` and `last` each other's array of the same shape and layout, on their own meshes.

        `values` has an entry for each of the two that this process holds. Bytes: those of the local shards, each way.
        """


class Alone(Together):
    """One process holds every place."""

    def sums(self, numbers: Mapping[int, tuple[float, ...]]) -> list[float]:  # noqa: D102
        return _add([numbers[place] for place in sorted(numbers)])

    def swap(self, values: Mapping[int, jax.Array], first: int, last: int) -> dict[int, jax.Array]:  # noqa: D102
        return {
            first: jax.device_put(values[last], values[first].sharding),
            last: jax.device_put(values[first], values[last].sharding),
        }


class OverMpi(Together):
    """Each place is a process of an MPI communicator of the pipe's places; waiting does not spin."""

    def __init__(self, pipe: "MPI.Comm"):
        self._comm = pipe.Dup()

    def sums(self, numbers: Mapping[int, tuple[float, ...]]) -> list[float]:  # noqa: D102
        (own,) = numbers.values()
        everyone = np.empty((self._comm.Get_size(), len(own)), np.float64)
        self._wait(self._comm.Iallgather(np.asarray(own, np.float64), everyone))
        return _add([tuple(row) for row in everyone])

    def swap(self, values: Mapping[int, jax.Array], first: int, last: int) -> dict[int, jax.Array]:  # noqa: D102
        if not values:
            return {}
        ((place, value),) = values.items()
        other = last if place == first else first
        form = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding)
        outgoing = [host_bytes(shard) for shard in local_shards(value)]
        incoming = [empty_bytes(shard_bytes(form)) for _ in outgoing]
        requests = [self._comm.Irecv(buffer, other, tag) for tag, buffer in enumerate(incoming)]
        requests += [self._comm.Isend(buffer, other, tag) for tag, buffer in enumerate(outgoing)]
        for request in requests:
            self._wait(request)
        devices = local_devices(value.sharding)
        received = [from_bytes(buffer, form, device) for buffer, device in zip(incoming, devices, strict=True)]
        return {place: rebuild(form, received)}

    @staticmethod
    def _wait(request: "MPI.Request") -> None:
        pause = 20e-6
        while not request.Test():  # an MPI wait would spin, and take the core from a peer that still computes
            time.sleep(pause)
            pause = min(pause * 1.5, 1e-3)


def _add(rows: list[tuple[float, ...]]) -> list[float]:
    return [sum(column) for column in zip(*rows, strict=True)]
