"""Programs of a one-stage model on global arrays: gradients of a step, and evaluation."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar, TypeVarTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.core import compat
from axonn_jax.core.backend.traits import overlaps_collectives
from axonn_jax.core.backend.workarounds import depend_on
from axonn_jax.core.engines.on_mesh import BATCH_SPEC, OnMesh, StepResults
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.load import Loads
from axonn_jax.core.grid import BATCH_AXES, GridShape
from axonn_jax.core.memory.offload_buckets import unreduced_spec
from axonn_jax.core.memory.remat import batch_loss, layer_runner
from axonn_jax.core.memory.zero import reduce_gradients
from axonn_jax.core.models.packed import counted_targets
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.models.stacked import Stacked
from axonn_jax.core.tensor.collectives import all_reduce, mark_varying
from axonn_jax.core.tensor.elementwise import DropoutKey
from axonn_jax.core.tensor.overlap.reorder import in_order
from axonn_jax.core.tensor.params import Params, evaluating, global_norm, square_sum
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import (
    GatheredWeight,
    MaybeGathered,
    Weights,
    as_gathered,
    cast_for_reduction,
    gather_once,
    gather_params,
    scatter_grads,
    trained,
    training,
)

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def sub_batches_of(requested: int, grid: GridShape, rows: int) -> int:
    """Return the number of parts in which a device's rows run; 0 requests two on accelerators where it helps, else one.

    Raises ``UserError`` if the rows do not divide into the requested parts.
    """
    if requested:
        if rows % requested:
            raise UserError("tensor.sub_batches", requested, f"0 or a divisor of a device's {rows} rows")
        return requested
    # Two parts only pay if there are all-reduces within layers to hide, over grid.x or grid.y.
    helps = overlaps_collectives(jax.default_backend()) and max(grid.x, grid.y) > 1
    return 2 if helps and rows % 2 == 0 else 1


def exposed(sub_batches: int, grid: GridShape, rows: int) -> list[str]:
    """Return a line of text if a device's rows cannot be halved, so that nothing overlaps with all-reduces."""
    if sub_batches or sub_batches_of(0, grid, 2) == sub_batches_of(0, grid, rows):
        return []
    cause = f"{rows} sequence{'s' if rows > 1 else ''} of a microbatch on a device cannot be halved"
    effect = "nothing is computed while all-reduces over grid.x and grid.y run; an even number would hide them"
    return [f"overlap: {cause}: {effect}"]


@dataclass(frozen=True)
class StageProgram(OnMesh[jax.Array]):
    """Pure functions on global arrays for a model on one 4D mesh; call them under `jax.jit`."""

    sub_batches: int = field(default=1, kw_only=True)
    """Parts of a microbatch's local rows, of which one computes while another communicates; 0: two on accelerators
    where that helps, else one."""

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split tokens, over which the gradients of parameters they do not split are summed."""
        return self._model(self.parts.params).token_axes

    def sum_axes(self, name: str) -> tuple[str, ...]:
        """Return the axes over which a device's gradient of a parameter is only a partial sum."""
        return self.parts.sum_axes(name, self.token_axes)

    @property
    def counts(self) -> Loads | None:
        """Interpretation of the gradients that are counts of tokens; None if none are."""
        return self._model(self.parts.params).counts(self.parts.loads)

    def results(
        self, params: Weights, carried: Params, batch: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the results of `gradients`, with counts turned into a metric and into updates for the optimizer."""
        grads, loss, norm = self.gradients(params, batch, key, scale)
        if (counts := self.counts) is None:
            return StepResults(grads, loss, norm, {})
        return StepResults(counts.centred(grads), loss, norm, {counts.metric: counts.measure(grads)})

    def gradients(
        self, params: Weights, tokens: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Return the gradients of a global batch's mean loss, the mean loss, and the gradients' global norm.

        Microbatches run one after the other and add up unreduced.

        Args:
            params: Weights by name.
            tokens: Token ids [microbatches, sequences, seq + 1].
            key: Dropout key, or None.
            scale: Factor on the gradients, but not on loss and norm; an overflow makes the norm infinite or NaN.

        Returns:
            Gradients laid out by `grad_specs`, the mean loss, and the norm.

        Collectives: every gradient is summed once per step, in buckets, over `data` (and over `z`, with sequence
        parallelism `y`, if the parameter is replicated over it). With `reshard_after` "step" and several microbatches,
        all weights are gathered before the first, and gradients are reduce-scattered over `z` after the last, in
        the dtype of the sums. Other collectives are those of the layers.
        """
        out_specs = (self.grad_specs, P(), P())
        region = self._manual(self._local_gradients, (self.parts.specs, BATCH_SPEC, P(), P()), out_specs)
        return region(params, tokens, key, scale)

    def unreduced(
        self, params: Weights, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Return each device's unreduced sums of gradients, the mean loss, and the sum of all their squares.

        Sums are laid out by `offload_buckets.unreduced_spec`; only three numbers are reduced over `data`. If the sum of
        squares is finite, so are the gradients that the sums add up to.
        """
        # Every device's sums count, replicas included: this only tests for overflow and is not the norm.
        per_device = P((*BATCH_AXES, "y", "x"))

        def local(params: Weights, tokens: jax.Array, key: jax.Array | None) -> tuple[Params, jax.Array, jax.Array]:
            sums, loss = self._local_sums(params, tokens, key, None)
            squares = square_sum(sums, dict.fromkeys(sums, per_device))
            return {name: value[None] for name, value in sums.items()}, loss, squares

        sums = {name: unreduced_spec(spec, self.grid.mesh) for name, spec in self.parts.specs.items()}
        region = self._manual(local, (self.parts.specs, BATCH_SPEC, P()), (sums, P(), P()))
        return region(params, tokens, key)  # type: ignore[no-any-return]

    def evaluate(self, params: Weights, carried: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of [microbatches, sequences, seq + 1] tokens, without dropout, and the target count."""
        evaluated = replace(self, parts=evaluating(self.parts))

        def local(params: Weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            def add(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
                return total + evaluated._loss_sum(params, batch, None), None

            total, _ = lax.scan(add, mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES), tokens)
            targets = self._targets(tokens)
            return all_reduce(total, BATCH_AXES) / targets, targets

        return self._manual(local, (self.parts.specs, BATCH_SPEC), (P(), P()))(params, batch)  # type: ignore[no-any-return]

    def _manual(self, f: Callable[[*Ts], T], in_specs: object, out_specs: object) -> Callable[[*Ts], T]:
        return shard_mapped(f, self.grid.mesh, in_specs, out_specs)

    def _model(self, params: Mapping[str, Any]) -> Model:
        model: Any = self.parts.merge(params)
        return model  # type: ignore[no-any-return]

    @property
    def _separates_last(self) -> bool:
        """True if the last microbatch is outside the loop, so that the reduction overlaps with its backward pass."""
        # Behind a scan over layers all gradients arrive together, and there is nothing left to overlap with.
        model = self._model(self.parts.params)
        scanned = isinstance(getattr(model, model.layer_list), Stacked)
        return self.ordered and self.grid.shape.replicas > 1 and not scanned

    def _targets(self, tokens: jax.Array) -> jax.Array:
        """Return the number of counted targets in the global batch; an all-reduce of 4 bytes over the batch axes."""
        counts = counted_targets(tokens, packed=self._model(self.parts.params).packed)
        return all_reduce(jnp.sum(counts, dtype=jnp.float32), BATCH_AXES)

    def _loss_sum(self, params: MaybeGathered | Weights, batch: jax.Array, key: DropoutKey | None) -> jax.Array:
        model = self._model(params)
        run_layer = layer_runner(model, self.memory.activations, regather=self.memory.reshard_after == "forward")
        parts = sub_batches_of(self.sub_batches, self.grid.shape, batch.shape[0])
        return batch_loss(model, batch, self.precisions.compute, key, run_layer, parts)

    def _local_gradients(
        self, params: Weights, tokens: jax.Array, key: jax.Array | None, scale: jax.Array | None
    ) -> tuple[Params, jax.Array, jax.Array]:
        layouts = (self.parts.specs, self.grad_specs)

        def reduced(sums: Params) -> Params:
            # The order found by `reorder` already sends buckets one after the other, as gradients arrive.
            in_turn = not self._separates_last
            return reduce_gradients(sums, *layouts, self.memory.bucket, self.grid.mesh, self.sum_axes, in_turn=in_turn)

        grads, loss = self._local_sums(params, tokens, key, scale, reduced)
        counted = {name: grad for name, grad in grads.items() if name not in self.parts.loads}
        norm = global_norm(counted, self.grad_specs)
        return grads, loss, norm if scale is None else norm / scale

    def _local_sums(
        self,
        params: Weights,
        tokens: jax.Array,
        key: jax.Array | None,
        scale: jax.Array | None,
        finish: Callable[[Params], Params] | None = None,
    ) -> tuple[Params, jax.Array]:
        """Return the result of `finish` on each device's sums of gradients over microbatches, and the mean loss."""
        # Mark weights varying over the token axes: autodiff then leaves gradients unreduced over them (the gather of a
        # z-sharded kernel reduce-scatters over z), so the sum over microbatches costs no communication.
        sum_dtype = self.precisions.grad_dtype
        shards = {name: mark_varying(trained(p, sum_dtype), self.sum_axes(name)) for name, p in params.items()}
        count = tokens.shape[0]
        once = self.memory.reshard_after == "step" and count > 1
        weights: MaybeGathered = {**shards}
        if once:
            plain = {name: shards[name] for name, p in params.items() if isinstance(p, jax.Array)}
            weights |= gather_params(plain, self.parts.specs, self.precisions.compute)
        trainable = {name: weights.pop(name) for name in self.parts.trained}
        # Gather outside the loop over microbatches; XLA hoists these gathers itself on CPUs but not on GPUs.
        gathers_once = count > 1 and not once
        layers = f"{self._model(params).layer_list}."
        gathered = gather_once(shards, self.parts.specs, self.precisions.compute, layers) if gathers_once else {}
        # Without a gradient: frozen weights, which the loss closes over instead of taking them as an argument.
        frozen = {
            name: GatheredWeight(gathered.pop(name)) if name in gathered else value for name, value in weights.items()
        }
        targets = self._targets(tokens)

        def backward(p: MaybeGathered, index: jax.Array, batch: jax.Array) -> tuple[jax.Array, MaybeGathered]:
            microbatch_key = None if key is None else DropoutKey(key, microbatch=index)

            def scaled(p: MaybeGathered) -> tuple[jax.Array, jax.Array]:
                weights = training(params, as_gathered(p, gathered, self.parts.specs), sum_dtype)
                loss = self._loss_sum({**weights, **frozen}, batch, microbatch_key) / targets
                return (loss if scale is None else loss * scale), loss

            p = cast_for_reduction(sum_dtype, p, self.parts.specs)
            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(p)
            return loss, grads

        # Trace once for both the loop and the last microbatch.
        if self.ordered:
            backward = jax.jit(backward)

        def plus(sums: MaybeGathered, grads: MaybeGathered) -> MaybeGathered:
            return jax.tree.map(lambda a, grad: a + grad.astype(a.dtype), sums, grads)

        def add(
            carry: tuple[jax.Array, MaybeGathered], microbatch: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, MaybeGathered], None]:
            total, sums = carry
            loss, grads = (in_order(backward) if self.ordered else backward)(trainable, *microbatch)
            return (total + loss, plus(sums, grads)), None

        def finished(sums: MaybeGathered) -> Params:
            shards = scatter_grads(sums, self.parts.specs)
            return shards if finish is None else finish(shards)

        def last(trainable: MaybeGathered, sums: MaybeGathered, batch: jax.Array) -> tuple[jax.Array, Params]:
            loss, grads = backward(trainable, jnp.int32(count - 1), batch)
            return loss, finished(plus(sums, grads))

        def zero(name: str, p: object) -> Any:
            dtype = self.precisions.sums_of(name)
            return jax.tree.map(lambda p: mark_varying(jnp.zeros_like(p, dtype), compat.varying_axes(p)), p)

        zeros = {name: zero(name, p) for name, p in trainable.items()}
        start = (mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES), zeros)
        separates_last = finish is not None and self._separates_last
        looped = count - 1 if separates_last else count
        total, sums = start
        if looped:
            (total, sums), _ = lax.scan(add, start, (jnp.arange(looped), tokens[:looped]))
        # XLA unrolls a loop of one microbatch and would run it together with the last, with twice the activations.
        if looped and separates_last:
            trainable = jax.tree.map(depend_on, trainable, sums)
        if not separates_last:
            return finished(sums), all_reduce(total, BATCH_AXES)
        loss, grads = in_order(last)(trainable, sums, tokens[-1])
        return grads, all_reduce(total + loss, BATCH_AXES)
