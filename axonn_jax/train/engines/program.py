"""The compiled programs of a one-stage model: gradients of a step, evaluation, logits."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax import compat
from axonn_jax.backend.repairs import after
from axonn_jax.backend.traits import overlaps_collectives
from axonn_jax.errors import UserError
from axonn_jax.experts.load import Loads
from axonn_jax.grid import BATCH_AXES, GridShape
from axonn_jax.memory.offload_buckets import unreduced_spec
from axonn_jax.memory.remat import batch_loss, layer_runner
from axonn_jax.memory.zero import reduce_gradients
from axonn_jax.models.packed import counted_targets
from axonn_jax.models.protocol import Model
from axonn_jax.models.stacked import Stacked
from axonn_jax.tensor.collectives import all_reduce, mark_varying
from axonn_jax.tensor.elementwise import DropoutKey
from axonn_jax.tensor.overlap.reorder import in_order
from axonn_jax.tensor.params import Params, evaluating, global_norm, square_sum
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.tensor.weight_gather import (
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
from axonn_jax.train.engines.on_mesh import BATCH_SPEC, OnMesh, StepResults


def sub_batches_of(wanted: int, grid: GridShape, rows: int) -> int:
    """Return the parts that a device's rows run in; 0 is two on accelerators where that can help, else one.

    Raises ``UserError`` where the rows do not divide into those wanted.
    """
    if wanted:
        if rows % wanted:
            raise UserError("tensor.sub_batches", wanted, f"0 or a divisor of a device's {rows} rows")
        return wanted
    helps = overlaps_collectives(jax.default_backend()) and max(grid.x, grid.y) > 1
    return 2 if helps and rows % 2 == 0 else 1


def exposed(sub_batches: int, grid: GridShape, rows: int) -> list[str]:
    """A line for people where a device's rows cannot be halved, so that nothing runs beside all-reduces."""
    if sub_batches or sub_batches_of(0, grid, 2) == sub_batches_of(0, grid, rows):
        return []
    cause = f"{rows} sequence{'s' if rows > 1 else ''} of a microbatch on a device cannot be halved"
    effect = "nothing is computed while all-reduces over grid.x and grid.y run; an even number would hide them"
    return [f"overlap: {cause}: {effect}"]


@dataclass(frozen=True)
class StageProgram(OnMesh):
    """Pure functions on global arrays for a model that lives on one 4D mesh; jit them to run them."""

    sub_batches: int = field(default=1, kw_only=True)
    """Parts of a microbatch's local rows that run side by side, to hide communication behind compute; 0: two on
    accelerators where that can help, else one."""

    @property
    def token_axes(self) -> tuple[str, ...]:
        """Axes that split tokens, over which gradients of other parameters add up."""
        return self._model(self.parts.params).token_axes

    def sum_axes(self, name: str) -> tuple[str, ...]:
        """Return the axes over which a device's gradient of a parameter is a partial sum."""
        return self.parts.sum_axes(name, self.token_axes)

    @property
    def counts(self) -> Loads | None:
        """Meaning of the gradients that are counts."""
        return self._model(self.parts.params).counts(self.parts.loads)

    def results(
        self, params: Weights, carried: Params, batch: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the results of `gradients`, with counts measured and in the form that the optimizer takes."""
        grads, loss, norm = self.gradients(params, batch, key, scale)
        if (counts := self.counts) is None:
            return StepResults(grads, loss, norm, {})
        return StepResults(counts.centred(grads), loss, norm, {counts.metric: counts.measure(grads)})

    def gradients(
        self, params: Weights, tokens: jax.Array, key: jax.Array | None, scale: jax.Array | None = None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Mean loss over a global batch, its gradients and their global norm.

        `tokens` is [microbatches, sequences, seq + 1]; gradients are laid out by `grad_specs`. Microbatches run one
        after the other and add up unreduced; then every gradient is summed once, in buckets, over `data` (and over
        `z`, with sequence parallelism `y`, where a parameter is replicated over it). With `reshard_after` "step" and
        several microbatches all weights are gathered before the first, and gradients are reduce-scattered over `z`
        behind the last, in `sums`. Other collectives are those of the layers. Where a loss `scale` is given the
        gradients are multiplied by it, loss and norm are not; an overflow makes the norm infinite or NaN.
        """
        out_specs = (self.grad_specs, P(), P())
        region = self._manual(self._local_gradients, (self.parts.specs, BATCH_SPEC, P(), P()), out_specs)
        return region(params, tokens, key, scale)

    def unreduced(
        self, params: Weights, tokens: jax.Array, key: jax.Array | None
    ) -> tuple[Params, jax.Array, jax.Array]:
        """Return each device's unreduced sums of gradients, the mean loss, and the sum of all their squares.

        Sums are laid out by `offload_buckets.unreduced_spec`; nothing but three numbers is reduced over `data`. Where
        the sum of squares, over all devices, is finite, so are the gradients that the sums add up to.
        """
        each = P((*BATCH_AXES, "y", "x"))  # every device's count, copies too

        def local(params: Weights, tokens: jax.Array, key: jax.Array | None) -> tuple[Params, jax.Array, jax.Array]:
            sums, loss = self._local_sums(params, tokens, key, None)
            squares = square_sum(sums, dict.fromkeys(sums, each))
            return {name: value[None] for name, value in sums.items()}, loss, squares

        sums = {name: unreduced_spec(spec, self.grid.mesh) for name, spec in self.parts.specs.items()}
        region = self._manual(local, (self.parts.specs, BATCH_SPEC, P()), (sums, P(), P()))
        return region(params, tokens, key)  # type: ignore[no-any-return]

    def evaluate(self, params: Weights, carried: Params, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of [microbatches, sequences, seq + 1] tokens, without dropout, and their targets."""
        evaluated = replace(self, parts=evaluating(self.parts))

        def local(params: Weights, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
            def add(total: jax.Array, batch: jax.Array) -> tuple[jax.Array, None]:
                return total + evaluated._loss_sum(params, batch, None), None

            total, _ = lax.scan(add, mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES), tokens)
            targets = self._targets(tokens)
            return all_reduce(total, BATCH_AXES) / targets, targets

        return self._manual(local, (self.parts.specs, BATCH_SPEC), (P(), P()))(params, batch)  # type: ignore[no-any-return]

    def _manual(self, f: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        return shard_mapped(f, self.grid.mesh, in_specs, out_specs)

    def _model(self, params: Mapping[str, Any]) -> Model:
        model: Any = self.parts.merge(params)
        return model  # type: ignore[no-any-return]

    @property
    def _last_apart(self) -> bool:
        """True if replicas add up beside a backward pass: in an order found here, but not behind a loop over layers."""
        model = self._model(self.parts.params)
        scanned = isinstance(getattr(model, model.layer_list), Stacked)
        return self.ordered and self.grid.shape.replicas > 1 and not scanned

    def _targets(self, tokens: jax.Array) -> jax.Array:
        """Targets that count in the global batch of which `tokens` is this device's part, 4 bytes over `data`, `z`."""
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
            # The order found has buckets one after the other as gradients come.
            in_turn = not self._last_apart
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
        """Return the result of `finish` on each device's sums of gradients over microbatches, and the mean loss.

        With `_last_apart` the last microbatch is apart from the loop over the others, so that `finish` runs beside its
        backward pass.
        """
        # Varying over the axes that split tokens, on purpose: autodiff then leaves gradients unreduced over them (the
        # gather of a z-sharded kernel reduce-scatters over z), and the sum over microbatches costs no communication.
        sum_dtype = self.precisions.grad_dtype
        shards = {name: mark_varying(trained(p, sum_dtype), self.sum_axes(name)) for name, p in params.items()}
        count = tokens.shape[0]
        once = self.memory.reshard_after == "step" and count > 1
        held: MaybeGathered = {**shards}
        if once:
            plain = {name: shards[name] for name, p in params.items() if isinstance(p, jax.Array)}
            held |= gather_params(plain, self.parts.specs, self.precisions.compute)
        own = {name: held.pop(name) for name in self.parts.trained}
        # XLA moves these gathers out of the loop by itself on CPUs, not on GPUs.
        several = count > 1 and not once
        layers = f"{self._model(params).layer_list}."
        wholes = gather_once(shards, self.parts.specs, self.precisions.compute, layers) if several else {}
        # None of these has a gradient.
        frozen = {name: GatheredWeight(wholes.pop(name)) if name in wholes else value for name, value in held.items()}
        targets = self._targets(tokens)

        def backward(p: MaybeGathered, index: jax.Array, batch: jax.Array) -> tuple[jax.Array, MaybeGathered]:
            key_here = None if key is None else DropoutKey(key, microbatch=index)

            def scaled(p: MaybeGathered) -> tuple[jax.Array, jax.Array]:
                held = training(params, as_gathered(p, wholes, self.parts.specs), sum_dtype)
                loss = self._loss_sum({**held, **frozen}, batch, key_here) / targets
                return (loss if scale is None else loss * scale), loss

            p = cast_for_reduction(sum_dtype, p, self.parts.specs)
            (_, loss), grads = jax.value_and_grad(scaled, has_aux=True)(p)
            return loss, grads

        if self.ordered:  # traced once for the loop and the last
            backward = jax.jit(backward)

        def plus(sums: MaybeGathered, grads: MaybeGathered) -> MaybeGathered:
            return jax.tree.map(lambda a, grad: a + grad.astype(a.dtype), sums, grads)

        def add(
            carry: tuple[jax.Array, MaybeGathered], microbatch: tuple[jax.Array, jax.Array]
        ) -> tuple[tuple[jax.Array, MaybeGathered], None]:
            total, sums = carry
            loss, grads = (in_order(backward) if self.ordered else backward)(own, *microbatch)
            return (total + loss, plus(sums, grads)), None

        def finished(sums: MaybeGathered) -> Params:
            shards = scatter_grads(sums, self.parts.specs)
            return shards if finish is None else finish(shards)

        def last(own: MaybeGathered, sums: MaybeGathered, batch: jax.Array) -> tuple[jax.Array, Params]:
            loss, grads = backward(own, jnp.int32(count - 1), batch)
            return loss, finished(plus(sums, grads))

        def zero(name: str, p: Any) -> Any:
            dtype = self.precisions.sums_of(name)
            return jax.tree.map(lambda p: mark_varying(jnp.zeros_like(p, dtype), compat.varying_axes(p)), p)

        zeros = {name: zero(name, p) for name, p in own.items()}
        start = (mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES), zeros)
        apart = finish is not None and self._last_apart
        looped = count - 1 if apart else count
        total, sums = start
        if looped:
            (total, sums), _ = lax.scan(add, start, (jnp.arange(looped), tokens[:looped]))
        if looped and apart:  # XLA takes a loop of one apart, and would run both microbatches at once
            own = jax.tree.map(after, own, sums)
        if not apart:
            return finished(sums), all_reduce(total, BATCH_AXES)
        loss, grads = in_order(last)(own, sums, tokens[-1])
        return grads, all_reduce(total + loss, BATCH_AXES)
