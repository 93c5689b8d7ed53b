"""End of a pipelined step on one rank: the gradients reduced and measured, the losses averaged."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.zero import reduce_gradients
from axonn_jax.pipeline.stage import Stage
from axonn_jax.tensor.collectives import all_reduce
from axonn_jax.tensor.params import Params, Specs, square_sum
from axonn_jax.tensor.specs import shard_mapped


class Reduction:
    """A rank's programs behind its last task, compiled once; all take and give global arrays."""

    def __init__(
        self,
        stages: Sequence[Stage],
        grad_specs: Specs,
        *,
        bucket: int,
        borrowed: frozenset[str],
    ):
        self._stages, self._bucket = stages, bucket
        self._mesh = stages[0].mesh
        specs = stages[0].parts.specs
        self._sums = {name: form for stage in stages for name, form in stage.sums.items()}
        self._specs = {name: specs[name] for name in self._sums}
        self._grad_specs = {name: grad_specs[name] for name in self._specs}
        self._grads = {
            name: jax.ShapeDtypeStruct(form.shape[1:], form.dtype, sharding=NamedSharding(self._mesh, spec))
            for (name, form), spec in zip(self._sums.items(), self._grad_specs.values(), strict=True)
        }
        model = stages[0].model
        self._counts = model.counts(stages[0].parts.loads & self._sums.keys())
        left_out = borrowed.union(() if self._counts is None else self._counts.names)
        counted = {name: spec for name, spec in self._grad_specs.items() if name not in left_out}
        self.reduce = self._reduce()
        self.mean = self._mean()
        self.measure = self._measure(counted)

    def _reduce(self) -> Callable[..., Any]:
        """Return the gradients from their sums, whose memory is reused unless gradients are scattered over `data`.

        Collectives: `reduce_gradients`, as in `StageProgram.gradients`.
        """
        sums = self._sums
        token_axes, parts = self._stages[0].model.token_axes, self._stages[0].parts

        def axes(name: str) -> tuple[str, ...]:
            return parts.sum_axes(name, token_axes)

        def local(sums: Params) -> Params:
            own = {name: value[0] for name, value in sums.items()}
            return reduce_gradients(own, self._specs, self._grad_specs, self._bucket, self._mesh, axes)

        specs = {name: form.sharding.spec for name, form in sums.items()}
        run = shard_mapped(local, self._mesh, (specs,), self._grad_specs)
        return jax.jit(run, donate_argnums=0).lower(sums).compile()

    def _mean(self) -> Callable[..., Any] | None:
        """Results of the last stage's forwards, targets that count -> mean loss; 4 bytes over `data` and `z`."""
        last = next((stage for stage in self._stages if stage.last), None)
        if last is None or last.losses is None:
            return None
        losses = [last.losses] * last.work.microbatches
        targets = jax.ShapeDtypeStruct((), jnp.float32, sharding=NamedSharding(self._mesh, P()))

        def local(losses: list[jax.Array], targets: jax.Array) -> jax.Array:
            return all_reduce(sum((value[0] for value in losses[1:]), losses[0][0]), BATCH_AXES) / targets

        specs = [last.losses.sharding.spec] * len(losses)
        run = jax.jit(shard_mapped(local, self._mesh, (specs, P()), P()))
        return run.lower(losses, targets).compile()

    def _measure(self, counted: dict[str, P]) -> Callable[..., Any]:
        """Gradients -> their sum of squares, a parameter that another rank also holds counted there; and of `Loads`
        their metric, or None, and by name the counts that the optimizer takes.
        """

        def local(grads: Params) -> jax.Array:
            return square_sum({name: grads[name] for name in counted}, counted)

        squares = shard_mapped(local, self._mesh, (self._grad_specs,), P())

        counts = self._counts

        def measure(grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:
            if counts is None:
                return squares(grads), None, {}
            own = {name: grads[name] for name in counts.names}
            return squares(grads), counts.measure(own), counts.centred(own)

        number = NamedSharding(self._mesh, P())
        own = {name: self._grads[name].sharding for name in (() if counts is None else counts.names)}
        shardings = (number, None if counts is None else number, own)
        return jax.jit(measure, out_shardings=shardings).lower(self._grads).compile()
