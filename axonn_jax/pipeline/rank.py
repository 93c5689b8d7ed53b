"""One place along the pipe: its stages, their parameters, and what waits between their tasks."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.held import moved
from axonn_jax.memory.placement import on_host
from axonn_jax.pipeline.stage import Ran, Stage
from axonn_jax.pipeline.trace import DY, KEY, MICROBATCH, SCALE, TOKENS, X
from axonn_jax.schedule.tasks import Kind, Message, Task
from axonn_jax.tensor.params import Params


class Rank:
    """Starts the programs of the virtual stages at one place, and keeps activations and gradients between them."""

    def __init__(self, place: int, stages: Mapping[int, Stage]):
        self.place, self.stages = place, dict(stages)
        some = next(iter(self.stages.values()))
        self.mesh = some.mesh
        self._work = some.work
        self._replicated = NamedSharding(self.mesh, P())
        self._tokens_sharding = NamedSharding(self.mesh, P(BATCH_AXES))
        self._numbers: list[jax.Array] = []
        self._fold = jax.jit(
            lambda seed, step: jax.random.fold_in(jax.random.key(seed), step), out_shardings=self._replicated
        )
        if some.keyed:
            numbers = range(some.work.microbatches)
            self._numbers = [replicated(np.uint32(m), self._replicated) for m in numbers]
        self.sums: dict[int, dict[str, jax.Array]] = {}
        self.losses: list[jax.Array] = []
        self._offloads = some.work.activations == "offload"
        self._inbox: dict[Message, jax.Array] = {}
        # By (stage, microbatch): what arrived, and what its programs have handed over, until the last has started.
        self._waiting: dict[tuple[int, int], dict[str, jax.Array]] = {}
        self._kept: dict[tuple[int, int], list[list[Any]]] = {}

    @property
    def reads_tokens(self) -> bool:
        """Whether one of its stages is the first or the last."""
        return any(stage.first or stage.last for stage in self.stages.values())

    def begin(
        self,
        params: Params,
        rows: Sequence[np.ndarray],
        key: jax.Array | None,
        *,
        train: bool,
        scale: float | None = None,
    ) -> None:
        """Prepares a step on this process's rows of each microbatch, [rows, seq + 1]; `key` is the step's.

        `scale` is what the loss is multiplied by before the backward pass, where it is at all.
        """
        self._params = params
        self.losses = []
        self._given: list[dict[str, jax.Array]] = [{} for _ in range(self._work.microbatches)]
        factor = replicated(np.float32(1.0 if scale is None else scale), self._replicated)
        for number, given in enumerate(self._given):
            if self._work.scaled:
                given[SCALE] = factor
            if self.reads_tokens:
                shape = (self._work.rows, self._work.width)
                given[TOKENS] = jax.make_array_from_process_local_data(
                    self._tokens_sharding, rows[number].astype(np.int32, copy=False), shape
                )
            if self._numbers and key is not None:
                given[KEY], given[MICROBATCH] = key, self._numbers[number]
        self.sums = {number: stage.zero() for number, stage in self.stages.items()} if train else {}

    def key(self, seed: int, step: int) -> jax.Array:
        """The step's dropout key on this rank's mesh."""
        return self._fold(np.uint32(seed), np.uint32(step))  # type: ignore[no-any-return]

    def take_sums(self) -> list[dict[str, jax.Array]]:
        """Hands out the step's gradients by stage and forgets them: whoever uses them up frees them."""
        sums, self.sums = self.sums, {}
        return [sums[stage] for stage in sorted(sums)]

    def arrived(self, message: Message, value: jax.Array) -> None:
        """Keeps what a message brought until its task is started."""
        self._inbox[message] = value

    def joins(self, task: Task) -> bool:
        """Whether a task is started together with the next one: a forward with its backward, on a last stage."""
        return task.kind is Kind.FORWARD and self.stages[task.stage].joins

    def start(self, *tasks: Task, train: bool = True) -> Ran:
        """Starts the program of a task, or of one that `joins` and the next; returns at once.

        Unless `train`, the task is a forward of an evaluation.
        """
        kinds = [task.kind for task in tasks]
        number, microbatch = own = tasks[0].stage, tasks[0].microbatch
        stage = self.stages[number]
        waiting = self._waiting.setdefault(own, {})
        if Kind.FORWARD in kinds and not stage.first:
            waiting[X] = self._inbox.pop(Message("forward", *own))
        elif kinds[0] in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
            if not stage.last:
                waiting[DY] = self._inbox.pop(Message("backward", *own))
            if X in waiting and self._offloads:
                [waiting[X]] = moved([waiting[X]], [stage.x])
        given = {**self._params, **self._given[microbatch], **waiting}
        adds = kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
        if train:
            kept = self._kept.setdefault(own, [])
            ran = stage.run("".join(kinds), given, kept, self.sums[number] if adds else {})
        else:
            ran = stage.evaluate(given)
        if kinds == [Kind.FORWARD] and train and X in waiting and self._offloads:
            [waiting[X]] = moved([waiting[X]], [on_host(stage.x)])
        if ran.loss is not None:
            self.losses.append(ran.loss)
        if adds:
            self.sums[number] = ran.sums
        if adds or not train:
            self._kept.pop(own, None)
            del self._waiting[own]
        return ran


def replicated(value: np.generic, sharding: NamedSharding) -> jax.Array:
    """A host number on every device of a mesh, also where other processes hold some of the devices."""
    return jax.make_array_from_callback((), sharding, lambda _: np.asarray(value))
