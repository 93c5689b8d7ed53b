"""Gradient program of any Flax model, for replicas side by side or for the rows of all replicas as one batch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.batches import Tree, rows_of, scan_microbatches, with_rows
from axonn_jax.any_flax.modules.loss_model import REPLICAS, ROW_AXES, Loss, LossModel, LossResult, Strategy, unsharded
from axonn_jax.any_flax.modules.metrics import Weight, averaged, is_total, part_weights, share_of
from axonn_jax.any_flax.parallelize.convolution import check_grouped
from axonn_jax.any_flax.parallelize.flow import MARK
from axonn_jax.any_flax.rewriting import in_fast_forms
from axonn_jax.core.engines.on_mesh import OnMesh, StepResults
from axonn_jax.core.errors import UserError, first_line
from axonn_jax.core.memory.zero import reduce_gradients
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.params import Params, Specs, global_norm
from axonn_jax.core.tensor.specs import is_replicated, shard_mapped, size_over
from axonn_jax.core.tensor.weight_gather import Weights


class Forward(NamedTuple):
    """Results of a loss on a batch."""

    loss: jax.Array
    aux: Any
    """Metrics, averaged like the loss."""
    carried: Params
    """State that the call has changed; [data, ...] if replicas run side by side."""
    weight: jax.Array
    """Number of items that the mean loss averages over, by `weight` or else rows."""
    grads: Params
    """Gradients, if requested."""


@dataclass(frozen=True)
class LossProgram(OnMesh[Tree]):
    """Gradients of a model whose layers `parallelize` has sharded, each in its own manual region.

    Batches are [microbatches, data, rows, ...]. In `parts`, the loss sees the rows of one replica. Every replica has a
    copy of the parameters on its devices, [data, ...], and `jax.vmap` over the copies with `data` as `spmd_axis_name`
    adds `data` to the specs of all regions; single-device replicas share one manual region instead. Gradients then
    accumulate over microbatches without communication over `data`, and are reduced once per step. Under the other
    strategies the loss sees a microbatch's rows of all replicas, and autodiff reduces gradients in every microbatch.
    """

    model: LossModel = field(kw_only=True)
    weight: Weight | None = field(default=None, kw_only=True)
    strategy: Strategy = field(default="parts", kw_only=True)
    user_selected: bool = field(default=False, kw_only=True)
    """True if the user, and not the proof, selected the strategy."""

    sub_batches = 1
    """Rows of a microbatch run together."""
    token_axes = ("data",)
    """Axes over which gradients still have to be summed; the layers sum them over `z`."""

    def results(
        self, params: Weights, carried: Params, batch: Any, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the mean loss of a batch and its gradients.

        Collectives over `data`, besides those of the layers. In parts: one bucketed all-reduce of the gradients
        (reduce-scatter with ZeRO), an all-reduce of loss and metrics, and BatchNorm's statistics per layer and
        microbatch. Otherwise: a reduction of all gradients in every microbatch.
        """
        formed = {} if self.forms is None else {name: params[name] for name in self.forms.shapes}
        local = partial(self._local, formed, True)
        (total, sums, aux, changed), _ = self._run_local(local, params, carried, batch, key, scale)
        if self.strategy != "parts":
            specs = self.grad_specs
            grads = {name: self._constrained(value, specs[name]) for name, value in sums.items()}
            return _step_results(grads, total, global_norm(grads, specs), scale, aux, changed)

        def reduce(total: jax.Array, sums: Params, aux: Any) -> Any:
            local_sums = {name: value[0] for name, value in sums.items()}
            layouts = (self.parts.specs, self.grad_specs)
            grads = reduce_gradients(local_sums, *layouts, self.memory.bucket, self.grid.mesh, lambda name: ("data",))
            loss, aux = jax.tree.map(lambda value: all_reduce(value[0], ("data",)), (total, aux))
            return grads, global_norm(grads, self.grad_specs), loss, aux

        numbers = jax.tree.map(lambda _: P("data"), aux)
        out_specs = (self.grad_specs, P(), P(), jax.tree.map(lambda _: P(), aux))
        in_specs = (P("data"), self._stacked, numbers)
        region = shard_mapped(reduce, self.grid.mesh, in_specs, out_specs, differentiated=False, keep_mesh=True)
        grads, norm, loss, aux = region(total, sums, aux)
        # The proof admits parts only if every replica computes the same state, so take the first replica's.
        return _step_results(grads, loss, norm, scale, aux, {name: value[0] for name, value in changed.items()})

    def forward(
        self,
        params: Weights,
        carried: Params,
        batch: Any,
        key: jax.Array | None = None,
        *,
        training: bool = False,
        gradients: bool = False,
    ) -> Forward:
        """Return the mean loss of a batch, its metrics, the changed state, and its gradients if requested."""
        local = partial(self._local, {} if gradients else None, training)
        (loss, grads, aux, changed), weight = self._run_local(local, params, carried, batch, key, None)
        if self.strategy == "parts":
            loss, grads, aux = jax.tree.map(lambda value: jnp.sum(value, 0), (loss, grads, aux))
        return Forward(loss, aux, changed, weight, grads)

    def evaluate(self, params: Weights, carried: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch in evaluation mode, and the number of items it averages over."""
        result = self.forward(params, carried, batch)
        return result.loss, result.weight

    def of(self, loss: Loss | None, *, at_once: bool) -> "LossProgram":
        """Return the program of another loss; it sees the rows of all replicas if it is another, or if `at_once`."""
        model = self.model if loss is None else self.model.with_loss(loss)
        strategy: Strategy = "whole" if (at_once or loss is not None) and self.strategy == "parts" else self.strategy
        return replace(self, model=model, strategy=strategy if model.split else "xla")

    def check_traced(self, jaxpr: Any) -> None:
        """Raise ``UserError`` for a convolution outside of layers that XLA would partition incorrectly."""
        check_grouped(jaxpr, self.grid.mesh, MARK)

    @property
    def _stacked(self) -> Specs:
        return {name: P("data", *spec) for name, spec in self.parts.specs.items()}

    def _used(self, name: str) -> P:
        """Return the layout in which the loss receives a parameter."""
        return self.parts.specs[name] if self.model.split and self.strategy != "xla" else P()

    def _shares(self, batch: Any, parts: int) -> tuple[jax.Array, jax.Array]:
        """Return each part's share of the mean loss, [microbatches, data] or [microbatches], and the batch's weight."""
        rows = rows_of(batch)
        weights = part_weights(self.weight, lambda rows: with_rows(batch, rows), rows, parts)
        total = jnp.sum(weights)
        return weights / total, total

    def _run_local(
        self,
        local: Callable[..., Any],
        params: Weights,
        carried: Params,
        batch: Any,
        key: jax.Array | None,
        scale: jax.Array | None,
    ) -> tuple[Any, jax.Array]:
        """Run `local` once, or for all replicas side by side, and return its results and the weight of the batch."""
        dense = {name: value if isinstance(value, jax.Array) else value.shard() for name, value in params.items()}
        if self.strategy != "parts":
            batch = jax.tree.map(self._merge_replicas, batch, is_leaf=is_replicated)
            shares, weight = self._shares(batch, 1)
            weights = {name: self._constrained(v.astype(jnp.float32), self._used(name)) for name, v in dense.items()}
            return local(weights, carried, batch, shares, 0, key, scale), weight
        shares, weight = self._shares(batch, 2)
        side_by_side = self._on_devices if self._manual else self._mapped
        try:
            return side_by_side(lambda *weights: local(*weights, key, scale), dense, carried, batch, shares), weight
        except Exception as error:  # from the loss, or from jax's manual axes if the model maps a layer by jax.vmap
            if self.user_selected and not isinstance(error, UserError):
                replace(self, strategy="whole").forward(
                    params, carried, batch, key, training=True
                )  # raises errors of the loss itself
                accepted = f"auto or whole: in parts of the rows the loss fails: {first_line(error)}"
                raise UserError("rows", "parts", accepted) from error
            raise

    @property
    def _manual(self) -> bool:
        """True if replicas have a single device each, so that all layers run in one manual region."""
        return self.strategy == "parts" and unsharded(self.grid.mesh)

    def _mapped(self, replica: Callable[..., Any], dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
        """Run replicas, whose layers are sharded, by `jax.vmap`."""
        replicas = self.grid.shape.data

        def copies(name: str, value: jax.Array) -> jax.Array:
            stacked = jnp.broadcast_to(value.astype(jnp.float32), (replicas, *value.shape))
            return self._constrained(stacked, P("data", *self._used(name)))

        copied_params = {name: copies(name, value) for name, value in dense.items()}
        of_batch = jax.tree.map(lambda leaf: None if is_replicated(leaf) else 1, batch, is_leaf=is_replicated)
        axes = (0, None, of_batch, 1, 0)
        run = jax.vmap(replica, in_axes=axes, spmd_axis_name="data", axis_name=REPLICAS)
        return run(copied_params, carried, batch, shares, jnp.arange(replicas))

    def _on_devices(self, replica: Callable[..., Any], dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
        """Run every replica on its device, in one manual region over all devices."""
        # The axis has the name over which BatchNorm averages, as it has under `jax.vmap`.
        mesh = Mesh(self.grid.mesh.devices.reshape(-1), (REPLICAS,), axis_types=(AxisType.Auto,))

        def run(dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
            rows = jax.tree.map(lambda leaf: leaf if is_replicated(leaf) else leaf[:, 0], batch, is_leaf=is_replicated)
            weights = {name: value.astype(jnp.float32) for name, value in dense.items()}
            results = replica(weights, carried, rows, shares[:, 0], lax.axis_index(REPLICAS))
            return jax.tree.map(lambda value: value[None], results)

        split = P(None, REPLICAS)
        of_batch = jax.tree.map(lambda leaf: P() if is_replicated(leaf) else split, batch, is_leaf=is_replicated)
        in_specs = (P(), P(), of_batch, split)
        region = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=P(REPLICAS), check_vma=False)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return region(dense, carried, batch, shares)

    def _merge_replicas(self, leaf: Any) -> Any:
        """Reshape rows of all replicas, [microbatches, data, rows, ...], to [microbatches, rows, ...]."""
        if is_replicated(leaf):
            return leaf
        count, data, rows, *trailing = leaf.shape
        choices = (("data", *ROW_AXES), ("data",), ())
        over = next(axes for axes in choices if data * rows % size_over(self.grid.mesh, axes) == 0) or None
        return self._constrained(leaf.reshape(count, data * rows, *trailing), P(None, over))

    def _part_key(self, key: Any, number: Any, replica: Any) -> Any:
        """Return the key of a part; `data = 2` with 4 microbatches draws what `data = 1` with 8 microbatches does."""
        if key is None:
            return None
        return jax.random.fold_in(key, number * self.grid.shape.data + replica if self.strategy == "parts" else number)

    def _local(
        self,
        formed: Mapping[str, Any] | None,
        training: bool,
        params: Params,
        carried: Params,
        batch: Any,
        shares: jax.Array,
        replica: Any,
        key: Any,
        scale: Any,
    ) -> tuple[jax.Array, Params, Any, Params]:
        """Return the contribution of some rows to the mean loss, to gradients and to metrics, and the written state.

        `formed` has the pruned weights, whose gradients accumulate for their trained entries only; None requests no
        gradients.
        """
        changed: set[str] = set()

        def part(params: Params, carried: Params, number: Any, share: Any, rows: Any) -> tuple[jax.Array, LossResult]:
            part_key = self._part_key(key, number, replica)
            result = self.model.run(
                params, carried, part_key, with_rows(batch, rows), training=training, strategy=self.strategy
            )
            changed.update(result.carried)
            loss = share_of(result.loss, share)
            return loss if scale is None else loss * scale, result._replace(loss=loss)

        backward = jax.value_and_grad(in_fast_forms(part), has_aux=True)

        @jax.jit  # so that unrolled microbatches trace the loss once
        def add(carry: Any, microbatch: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, Any]:
            total, sums, state = carry
            number, share, rows = microbatch
            args = (params, {name: state[name] for name in carried}, number, share, rows)
            if formed is None:
                result = part(*args)[1]
            else:
                (_, result), grads = backward(*args)
                sums = self._added(formed, sums, grads, share)
            aux = averaged(share, result.aux)
            return (total + result.loss, sums, {**state, **result.carried}), aux

        shapes = {} if formed is None else self.state_shapes
        sums = {name: self._shard(name, jnp.zeros(shape, self.precisions.grad_dtype)) for name, shape in shapes.items()}
        microbatches, total, state = (jnp.arange(shares.shape[0]), shares, rows_of(batch)), jnp.zeros(()), carried
        # A loop's carry has a fixed structure, so parameters that calls write join it from the start. Microbatches
        # still read the parameters of the step, as they would if all rows ran at once.
        if shares.shape[0] > 1:
            first = jax.tree.map(lambda value: value[0], microbatches)
            written = jax.eval_shape(add, (total, sums, state), first)[0][-1]
            state = carried | {name: params[name] for name in written if name in params}
        (total, sums, state), aux = scan_microbatches(add, (total, sums, state), microbatches)
        aux = jax.tree.map(lambda values: jnp.sum(values, 0), aux)
        return total, sums, aux, {name: state[name] for name in sorted(changed)}

    def _added(self, formed: Mapping[str, Any], sums: Params, grads: Params, share: jax.Array) -> Params:
        if self.weight is not None:  # the gradient of a mean over nothing is NaN, also when scaled by 0
            grads = {name: jnp.where(share != 0, grad, 0) for name, grad in grads.items()}
        if self.forms is not None:
            grads |= self.forms.values({name: weight.holding(grads[name]) for name, weight in formed.items()})
        return {name: self._shard(name, sums[name] + grads[name].astype(self.precisions.grad_dtype)) for name in sums}

    def _shard(self, name: str, value: jax.Array) -> jax.Array:
        return value if self._manual else self._constrained(value, self.parts.specs[name])

    def _constrained(self, value: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(self.grid.mesh, spec))


def _step_results(grads: Params, loss: Any, norm: Any, scale: Any, aux: Any, changed: Params) -> StepResults:
    norm = norm if scale is None else norm / scale
    aux = jax.tree.map(lambda leaf: leaf.value if is_total(leaf) else leaf, aux, is_leaf=is_total)
    return StepResults(grads, loss, norm, {"aux": aux} if jax.tree.leaves(aux) else {}, changed)
