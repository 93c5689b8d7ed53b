"""Worker of a rank of a token model: targets that count, losses, dropout keys and experts' counts."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.memory.host_arrays import replicated
from axonn_jax.core.models.packed import counted_targets
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.params import Params, Specs
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import Weights
from axonn_jax.pipe.stages.rank_worker import RankWorker
from axonn_jax.pipe.stages.stage import Stage
from axonn_jax.pipe.stages.trace import KEY, MICROBATCH, SCALE, TOKENS


class StageWorker(RankWorker):
    """Worker of a rank of a `models.protocol.Model`; see `RankWorker`.

    `borrowed` parameters are left out of the norm: another rank holds them too and counts them.
    """

    def __init__(
        self, pp_rank: int, stages: Mapping[int, Stage], grad_specs: Specs, *, bucket: int, borrowed: frozenset[str]
    ):
        stage = next(iter(stages.values()))
        self._work, self._model = stage.work, stage.model
        axes = partial(stage.parts.sum_axes, token_axes=self._model.token_axes)
        super().__init__(pp_rank, stages, stage.mesh, stage.parts.specs, grad_specs, bucket=bucket, sum_axes=axes)
        self._tokens_sharding = NamedSharding(self.mesh, P(BATCH_AXES))
        self._numbers: list[jax.Array] = []
        if stage.keyed:
            # Put the numbers on the device once, rather than in every task of every step.
            numbers = range(stage.work.microbatches)
            self._numbers = [replicated(np.uint32(m), self._replicated) for m in numbers]
        self._count = None
        if self._model.balanced or any(stage.last for stage in self.stages.values()):
            self._count = _counting(self._model, self.mesh, self._work.microbatches)
        self.counted: jax.Array | None = None
        """Number of the step's targets that count; None on ranks without a loss."""
        self._mean = self._averaging()
        self._measure = self._measuring(stage.parts.loads, borrowed)

    @property
    def targets(self) -> float:  # noqa: D102
        return float(self.counted) if self.losses and self.counted is not None else 0.0

    @property
    def loss(self) -> jax.Array | float:  # noqa: D102
        return 0.0 if self._mean is None else self._mean(self.losses, self.counted)  # type: ignore[no-any-return]

    def measure(self, grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:  # noqa: D102
        return self._measure(grads)  # type: ignore[no-any-return]

    def begin(  # noqa: D102
        self,
        params: Weights,
        rows: Sequence[np.ndarray],
        key: jax.Array | None,
        *,
        train: bool,
        scale: float | None = None,
    ) -> None:
        self._begin(params, self._work.microbatches, train=train)
        reads = any(stage.tokens is not None for stage in self.stages.values())
        for number, inputs in enumerate(self._inputs):
            if reads:
                shape = (self._work.rows, self._work.width)
                inputs[TOKENS] = jax.make_array_from_process_local_data(
                    self._tokens_sharding, rows[number].astype(np.int32, copy=False), shape
                )
            if self._numbers and key is not None:
                inputs[KEY], inputs[MICROBATCH] = key, self._numbers[number]
        if self._count is not None:
            factor = replicated(np.float32(1.0 if scale is None else scale), self._replicated)
            # The count stays on the device: it scales the gradients without a synchronization with the host.
            self.counted, seed = self._count([inputs[TOKENS] for inputs in self._inputs], factor)
            for inputs in self._inputs:
                inputs[SCALE] = seed

    def _averaging(self) -> Callable[..., Any] | None:
        """Return a program: last stage's losses, target count -> mean loss; all-reduces 4 bytes over `data` and `z`."""
        last = next((stage for stage in self.stages.values() if stage.last), None)
        if last is None or last.losses is None:
            return None
        losses = [last.losses] * self._work.microbatches
        targets = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)

        def local(losses: list[jax.Array], targets: jax.Array) -> jax.Array:
            return all_reduce(sum((value[0] for value in losses[1:]), losses[0][0]), BATCH_AXES) / targets

        specs = [last.losses.sharding.spec] * len(losses)
        return jax.jit(shard_mapped(local, self.mesh, (specs, P()), P())).lower(losses, targets).compile()

    def _measuring(self, loads: frozenset[str], borrowed: frozenset[str]) -> Callable[..., Any]:
        # Gradients of `loads` parameters are counts of experts' tokens, so they are excluded from the norm.
        counts = self._model.counts(loads & self._forms.keys())
        names = () if counts is None else counts.names
        squares = self._square_sum(borrowed.union(names))

        def measure(grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:
            if counts is None:
                return squares(grads), None, {}
            loads = {name: grads[name] for name in counts.names}
            return squares(grads), counts.measure(loads), counts.centred(loads)

        grads, number = self._reduced(), self._replicated
        shardings = (number, None if counts is None else number, {name: grads[name].sharding for name in names})
        return jax.jit(measure, out_shardings=shardings).lower(grads).compile()


def _counting(model: Model, mesh: Mesh, microbatches: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a program: tokens of all microbatches, loss scale -> number of targets that count, scale over that number.

    Collective: an all-reduce of 4 bytes over `data` and `z`.
    """

    def local(tokens: list[jax.Array], scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        local_count = sum(jnp.sum(counted_targets(words, packed=model.packed), dtype=jnp.float32) for words in tokens)
        total = all_reduce(jnp.asarray(local_count), BATCH_AXES)
        return total, scale / total

    return jax.jit(shard_mapped(local, mesh, ([P(BATCH_AXES)] * microbatches, P()), (P(), P())))
