"""Bytes of live arrays on a device, sampled where a test asks, and pipelines driven one task at a time."""

from collections.abc import Iterable
from math import prod
from typing import Any

import jax

from axonn_jax.core.memory.host_arrays import HOST
from axonn_jax.pipe.channels.local import move
from axonn_jax.pipe.engine import PipelineEngine
from axonn_jax.pipe.schedule.tasks import sends


def live_bytes(device: jax.Device, without: Iterable[Any] = (), kind: str = "device") -> int:
    """Bytes that a device has of all live arrays but `without`, in one kind of memory; single numbers are left out."""
    known, found = {id(array) for array in without}, 0
    for array in jax.live_arrays():
        elements = prod(array.sharding.shard_shape(array.shape))
        here = device in array.sharding.device_set and (array.sharding.memory_kind == HOST) == (kind == "host")
        if here and elements > 1 and id(array) not in known:
            found += elements * array.dtype.itemsize
    return found


class Peaks:
    """The most bytes on the first device of every place when a task starts, beside its model's state and `before`."""

    def __init__(self, trainer: Any, pipe: Any, before: list[Any]):
        self.most = dict.fromkeys(pipe.ranks, 0)
        for place, rank in pipe.ranks.items():
            self._watch(place, rank, trainer.engine.stores[place], before)

    def _watch(self, place: int, rank: Any, holding: Any, before: list[Any]) -> None:
        device, start = rank.mesh.devices.flat[0], rank.start

        def sampled(*tasks: Any, train: bool = True) -> Any:
            without = [*before, *jax.tree.leaves((holding.model, rank.sums))]
            self.most[place] = max(self.most[place], live_bytes(device, without))
            return start(*tasks, train=train)

        rank.start = sampled  # of this instance only


def run_with_a_slow_place(trainer: Any, pipe: Any, rows: Any, slow: int) -> None:
    """Runs the tasks of a step in an order in which every other place does all that it can before `slow` starts one."""
    choosers = {place: trainer.engine._dispatcher(place, pipe) for place in pipe.ranks}
    for place, rank in pipe.ranks.items():
        rank.begin(trainer.engine.stores[place].weights, rows, None, train=True)
    order = sorted(pipe.ranks, key=lambda place: place == slow)
    while not all(chooser.done for chooser in choosers.values()):
        place, task = next((p, task) for p in order if (task := choosers[p].next()) is not None)
        rank = pipe.ranks[place]
        tasks = (task, choosers[place].next()) if rank.joins(task) else (task,)
        ran = rank.start(*tasks)
        for one in tasks:
            choosers[place].finished(one)
            message = sends(one, trainer.engine.job.shape)
            if message is not None:
                to = trainer.engine.job.shape.rank_of(message.stage)
                stage = pipe.ranks[to].stages[message.stage]
                form = stage.x if message.direction == "forward" else stage.y
                pipe.ranks[to].arrived(message, move(ran.value, form))
                choosers[to].arrived(message)
    for rank in pipe.ranks.values():
        jax.block_until_ready(rank.sums)
        rank.sums = {}


class Updates:
    """Bytes of live arrays but tokens, on one device of every place: when its update begins, and the most within."""

    def __init__(self, trainer: Any, before: list[Any]):
        self._before = before
        self.begin: dict[int, dict[str, int]] = {}
        self.most: dict[int, int] = {}
        if isinstance(trainer.engine, PipelineEngine):
            for place, holding in trainer.engine.stores.items():
                holding.apply = self._watched(place, holding.mesh, holding.apply)
                if hasattr(holding.placement, "buckets"):
                    programs = holding.placement.programs
                    programs.update = self._within(place, holding.mesh, programs.update)
        else:
            update, mesh = trainer.engine.store.placement, trainer.engine.grid.mesh
            update.apply_update = self._watched(0, mesh, update.apply_update)
            update.programs.update = self._within(0, mesh, update.programs.update)

    def _bytes(self, mesh: Any, kind: str) -> int:
        tokens = [array for array in jax.live_arrays() if array.dtype == jax.numpy.int32]
        return live_bytes(mesh.local_devices[0], [*self._before, *tokens], kind)

    def _watched(self, place: int, mesh: Any, update: Any) -> Any:
        def begun(*given: Any) -> Any:
            self.begin[place] = {kind: self._bytes(mesh, kind) for kind in ("device", "host")}
            return self._within(place, mesh, update)(*given)

        return begun

    def _within(self, place: int, mesh: Any, update: Any) -> Any:
        def sampled(*given: Any) -> Any:
            results = update(*given)
            self.most[place] = max(self.most.get(place, 0), self._bytes(mesh, "device"))
            return results

        return sampled
