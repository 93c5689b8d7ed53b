"""Worker of a rank of any Flax model: rows of the batch, shares of the mean loss, metrics and the model's state."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.any_flax.modules.metrics import Weight, part_weights
from axonn_jax.core.memory.host_arrays import replicated
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.weight_gather import Weights
from axonn_jax.pipe.stages.rank_worker import RankWorker
from axonn_jax.pipe.stages.stage_programs import Result
from axonn_jax.staged.loss_trace import Replicas, TraceSlot
from axonn_jax.staged.stage import STATE, LossStage
from axonn_jax.staged.stage_trace import name_of

KEY, NUMBER = name_of(TraceSlot("key")), name_of(TraceSlot("number"))
SHARE, SCALE = name_of(TraceSlot("share")), name_of(TraceSlot("scale"))


@dataclass(frozen=True)
class MicrobatchRows:
    """This process's part of a microbatch."""

    rows: int
    """Rows of a microbatch on one replica."""
    arrays: Mapping[str, Callable[[Replicas], jax.Array]]
    """Functions that put an array of the batch onto a mesh, by the name of the stages' input."""


class LossWorker(RankWorker):
    """Worker of a rank of a user's model and loss; see `RankWorker`.

    Args:
        carried: State of the model by name, [replicas, ...], which a step replaces.
        microbatches: Microbatches of a step.
        weight: Function of a batch, of the items that its mean loss averages over; None for rows.
        batch_of: Function from the arrays of a microbatch, by name, to the batch that `weight` takes.
        metrics: Number of metrics of the loss.
        borrowed: Parameters that an earlier rank holds too, and counts in the norm.
    """

    def __init__(
        self,
        pp_rank: int,
        stages: Mapping[int, LossStage],
        replicas: Replicas,
        specs: Specs,
        grad_specs: Specs,
        *,
        bucket: int,
        carried: Params,
        microbatches: int,
        weight: Weight | None,
        batch_of: Callable[[Mapping[str, jax.Array]], tuple[Callable[[Any], Any], list[jax.Array]]],
        metrics: int,
        borrowed: frozenset[str],
    ):
        super().__init__(
            pp_rank,
            stages,
            replicas.mesh,
            specs,
            grad_specs,
            bucket=bucket,
            sum_axes=lambda name: ("data",),
        )
        self._replicas, self._carried, self._metrics = replicas, carried, metrics
        self._numbers = [replicated(np.uint32(m), self._replicated) for m in range(microbatches)]
        self._reads: frozenset[str] = frozenset().union(*(stage.reads for stage in stages.values()))
        self._weight, self._batch_of = weight, batch_of
        self._last = any(stage.last for stage in stages.values())
        self._shares = self._sharing(microbatches)
        number = self._replicated
        self._sums = jax.jit(
            lambda values: [jnp.sum(jnp.stack(each), dtype=jnp.float32) for each in values], out_shardings=number
        )
        self._squares = jax.jit(self._square_sum(borrowed), out_shardings=number).lower(self._reduced()).compile()
        self._written: Params = {}
        self._aux: list[list[jax.Array]] = []
        self._scale, self._train = 1.0, True
        self._total: jax.Array | None = None

    @property
    def loss(self) -> float:  # noqa: D102
        return float(self._sums([self.losses])[0]) / self._scale if self.losses else 0.0

    @property
    def targets(self) -> float:  # noqa: D102
        return float(self._total) if self._total is not None else 0.0

    def measure(self, grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:  # noqa: D102
        return self._squares(grads), None, {}

    def numbers(self) -> list[float]:
        """Return the sums of the loss's metrics; zeros on ranks without the last stage."""
        if not self._last:
            return [0.0] * self._metrics
        return [float(value) for value in self._sums([each for each in self._aux if each])] if self._metrics else []

    def commit(self) -> None:
        """Keep the state that the step has written."""
        self._carried.update(self._written)

    def begin(  # noqa: D102
        self,
        params: Weights,
        rows: Sequence[MicrobatchRows],
        key: jax.Array | None,
        *,
        train: bool,
        scale: float | None = None,
    ) -> None:
        self._begin(params, len(rows), train=train)
        for stage in self.stages.values() if not train else ():
            stage.evaluation  # noqa: B018  compiled here, ahead of the tasks, whose peers wait
        self._written, self._aux, self._train = dict(self._carried), [[] for _ in range(self._metrics)], train
        self._scale = 1.0 if scale is None else scale
        factor = replicated(np.float32(self._scale), self._replicated)
        needs_all = self._last and self._weight is not None
        batch = [
            {n: put(self._replicas) for n, put in microbatch.arrays.items() if needs_all or n in self._reads}
            for microbatch in rows
        ]
        for number, (inputs, arrays) in enumerate(zip(self._inputs, batch, strict=True)):
            inputs |= arrays
            inputs |= {NUMBER: self._numbers[number]} | ({} if key is None else {KEY: key})
            if self._last:
                inputs[SCALE] = factor
        if self._last:
            # The shares stay on the device: they scale the gradients without a synchronization with the host.
            shares, self._total = self._shares(batch, rows[0].rows)
            for inputs, share in zip(self._inputs, shares, strict=True):
                inputs[SHARE] = share

    def _inputs_of(self, stage: int, microbatch: int) -> dict[str, Any]:
        state = {STATE + name: value for name, value in self._written.items()}
        return {**super()._inputs_of(stage, microbatch), **state}

    def _started(self, stage: int, microbatch: int, ran: Result) -> None:
        slots = self.stages[stage].result_slots if self._train else self.stages[stage].evaluation_slots
        for position, value in ran.further.items():
            slot = slots[position]
            if slot.kind == "aux":
                self._aux[int(slot.name)].append(value)
            else:
                self._written[slot.name] = value

    def _sharing(self, microbatches: int) -> Callable[[list[dict[str, Any]], int], tuple[list[jax.Array], Any]]:
        """Return a function: arrays of the microbatches, rows of a replica -> shares of the mean loss, their total."""
        by_replica = self._replicas.by_replica(jax.ShapeDtypeStruct((), jnp.float32)).sharding
        parts = microbatches * self._replicas.count
        if self._weight is None:
            share = jax.device_put(np.full(self._replicas.count, 1 / parts, np.float32), by_replica)
            return lambda batch, rows: ([share] * microbatches, np.float32(parts * rows))
        weight = self._weight

        def weigh(batch: list[dict[str, jax.Array]]) -> tuple[list[jax.Array], jax.Array]:
            weights = [part_weights(weight, *self._batch_of(arrays), 1) for arrays in batch]
            total = jnp.sum(jnp.stack(weights))
            return [number / total for number in weights], total

        run = jax.jit(weigh, out_shardings=([by_replica] * microbatches, self._replicated))

        return lambda batch, rows: run(batch)
