"""The end of a pipelined step on one rank: reduce the gradients, measure them, update the parameters."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.buckets import reduce_in_buckets
from axonn_jax.pipeline.rank import replicated
from axonn_jax.pipeline.stage import Stage
from axonn_jax.tensor.clip import spec_axes, square_sum
from axonn_jax.tensor.collectives import reduce_sum
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.region import manual

_EPSILON = 1e-6  # the published coefficient (AxoNN, Megatron-LM): clip / (norm + 1e-6), never above one


class Update:
    """A rank's programs behind its last task, compiled once; all take and give global arrays."""

    def __init__(
        self,
        stages: Sequence[Stage],
        optimizer: optax.GradientTransformation,
        opt_state: Any,
        *,
        bucket: int,
        borrowed: frozenset[str],
    ):
        self._stages, self._bucket = stages, bucket
        self._mesh = stages[0].mesh
        self._scalar = NamedSharding(self._mesh, P())
        specs = stages[0].parts.specs
        self._specs = {name: specs[name] for stage in stages for name in stage.names}
        self._params = {
            name: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=NamedSharding(self._mesh, self._specs[name]))
            for name in self._specs
            for p in [stages[0].parts.params[name]]
        }
        counted = {name: spec for name, spec in self._specs.items() if name not in borrowed}
        self.reduce = self._reduce()
        self.mean = self._mean()
        self.squares = self._squares(counted)
        self.apply = self._apply(optimizer, opt_state)

    def _reduce(self) -> Callable[..., Any]:
        """Sums by stage -> gradients.

        Collectives: as `StageProgram.gradients` at its end: one set of buckets over `data` (and `z` where replicated).
        """
        sums = [stage.sums for stage in self._stages]

        def local(sums: list[Params]) -> Params:
            own = {name: value[0] for part in sums for name, value in part.items()}

            def axes_of(name: str) -> tuple[str, ...]:
                return ("data",) if "z" in spec_axes(self._specs[name]) else BATCH_AXES

            return reduce_in_buckets(own, axes_of, self._bucket)

        specs = jax.tree.map(lambda s: s.sharding.spec, sums)
        run = manual(local, self._mesh, (specs,), self._specs)
        return jax.jit(run).lower(sums).compile()

    def _mean(self) -> Callable[..., Any] | None:
        """Results of the last stage's forwards -> mean loss, an all-reduce of a scalar over `data` and `z`."""
        last = next((stage for stage in self._stages if stage.last), None)
        if last is None or last.losses is None:
            return None
        losses, targets = [last.losses] * last.work.microbatches, last.work.targets

        def local(losses: list[jax.Array]) -> jax.Array:
            return reduce_sum(sum((value[0] for value in losses[1:]), losses[0][0]), BATCH_AXES) / targets

        specs = [last.losses.sharding.spec] * len(losses)
        return jax.jit(manual(local, self._mesh, (specs,), P())).lower(losses).compile()

    def _squares(self, counted: dict[str, P]) -> Callable[..., Any]:
        """Gradients -> their sum of squares, a parameter that another rank also holds counted there."""

        def local(grads: Params) -> jax.Array:
            return square_sum({name: grads[name] for name in counted}, counted)

        run = manual(local, self._mesh, (self._specs,), P())
        return jax.jit(run).lower(self._params).compile()

    def _apply(self, optimizer: optax.GradientTransformation, opt_state: Any) -> Callable[..., Any]:
        """(parameters, state, gradients, scale) -> (parameters, state, done), the first two donated."""

        def apply(params: Params, state: Any, grads: Params, scale: jax.Array) -> tuple[Params, Any, jax.Array]:
            grads = {name: grad * scale for name, grad in grads.items()}
            with jax.numpy_dtype_promotion("standard"):  # optax mixes step counters with floats
                updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state, jnp.zeros((), jnp.int32)

        states = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=a.sharding), opt_state)
        scale = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._scalar)
        out = jax.tree.map(lambda s: s.sharding, (self._params, states))
        run = jax.jit(apply, donate_argnums=(0, 1), out_shardings=(*out, self._scalar))
        return run.lower(self._params, states, self._params, scale).compile()

    def scale(self, value: float) -> jax.Array:
        """A factor for `apply`."""
        return replicated(np.float32(value), self._scalar)


def clip_scale(norm: float, clip: float) -> float:
    """The factor that brings gradients of a global norm down to `clip` (0: no clipping)."""
    return min(1.0, clip / (norm + _EPSILON)) if clip > 0.0 else 1.0
