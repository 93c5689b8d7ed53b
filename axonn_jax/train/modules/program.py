"""Program of the gradients of any Flax model: of replicas side by side, or of the rows of all replicas as one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.pooling import with_sliced_pooling
from axonn_jax.errors import UserError, first_line
from axonn_jax.memory.zero import reduce_gradients
from axonn_jax.tensor.collectives import all_reduce
from axonn_jax.tensor.parallelize.convolution import check_grouped
from axonn_jax.tensor.parallelize.flow import MARK
from axonn_jax.tensor.params import Params, Specs, global_norm
from axonn_jax.tensor.specs import is_replicated, shard_mapped, size_over
from axonn_jax.tensor.weight_gather import Weights
from axonn_jax.train.engines.on_mesh import OnMesh, StepResults
from axonn_jax.train.modules.apart import REPLICAS, ROW_AXES, Apart, Loss, LossResult, Way, one_device_each
from axonn_jax.train.modules.batches import each_microbatch, rows_of, with_rows
from axonn_jax.train.modules.numbers import Weight, averaged, is_total, part_weights, share_of


class Forward(NamedTuple):
    """Results of a loss on a batch."""

    loss: jax.Array
    aux: Any
    """The numbers beside the loss, averaged as it is."""
    carried: Params
    """State that the call has changed; of replicas side by side that of each, [data, ...]."""
    weight: jax.Array
    """Weight of the mean loss: by `weight`, else the batch's rows."""
    grads: Params
    """Gradients, in training."""


@dataclass(frozen=True)
class LossProgram(OnMesh):
    """Gradients of a model whose layers are split by `parallelize`, each in a manual region of its own.

    Batches are [microbatches, data, rows, ...]. A loss that runs in `parts` sees a replica's rows: every replica has a
    copy of the parameters, [data, ...], local to its devices, and `jax.vmap` over it, with `data` as `spmd_axis_name`,
    puts `data` into the specs of all regions; replicas of one device each run in one manual region. So gradients add up
    over microbatches without communication over `data`, and are reduced once. Otherwise the loss sees a microbatch's
    rows of all replicas, and autodiff reduces gradients in each microbatch.
    """

    model: Apart = field(kw_only=True)
    weight: Weight | None = field(default=None, kw_only=True)
    way: Way = field(default="parts", kw_only=True)
    asked: bool = field(default=False, kw_only=True)
    """True if the user chose the way."""

    sub_batches = 1
    """Rows of a microbatch run together."""
    token_axes = ("data",)
    """Axes over which gradients add up; the layers have added them up over `z`."""

    def results(
        self, params: Weights, carried: Params, batch: Any, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the mean loss of a batch and its gradients.

        Collectives over `data` in parts: the reduction of the gradients (with ZeRO a reduce-scatter), once, in buckets,
        and of some numbers; with BatchNorm its statistics, a layer and microbatch. Otherwise the reduction of all
        gradients in each microbatch. The others are the layers'.
        """
        formed = {} if self.forms is None else {name: params[name] for name in self.forms.shapes}
        local = partial(self._local, formed, True)
        (total, sums, aux, changed), _ = self._called(local, params, carried, batch, key, scale)
        if self.way != "parts":
            specs = self.grad_specs
            grads = {name: self._constrained(value, specs[name]) for name, value in sums.items()}
            return _step_results(grads, total, global_norm(grads, specs), scale, aux, changed)

        def reduce(total: jax.Array, sums: Params, aux: Any) -> Any:
            own = {name: value[0] for name, value in sums.items()}
            layouts = (self.parts.specs, self.grad_specs)
            grads = reduce_gradients(own, *layouts, self.memory.bucket, self.grid.mesh, lambda name: ("data",))
            loss, aux = jax.tree.map(lambda value: all_reduce(value[0], ("data",)), (total, aux))
            return grads, global_norm(grads, self.grad_specs), loss, aux

        numbers = jax.tree.map(lambda _: P("data"), aux)
        out_specs = (self.grad_specs, P(), P(), jax.tree.map(lambda _: P(), aux))
        in_specs = (P("data"), self._stacked, numbers)
        region = shard_mapped(reduce, self.grid.mesh, in_specs, out_specs, differentiated=False, among_others=True)
        grads, norm, loss, aux = region(total, sums, aux)
        # What calls change is the same in all replicas, or the loss would not run in parts.
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
        """Return the mean loss of a batch, its numbers and the changed state, and if asked for its gradients."""
        local = partial(self._local, {} if gradients else None, training)
        (loss, grads, aux, changed), weight = self._called(local, params, carried, batch, key, None)
        if self.way == "parts":
            loss, grads, aux = jax.tree.map(lambda value: jnp.sum(value, 0), (loss, grads, aux))
        return Forward(loss, aux, changed, weight, grads)

    def evaluate(self, params: Weights, carried: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch in evaluation mode, and its weight: by `weight`, else its rows."""
        result = self.forward(params, carried, batch)
        return result.loss, result.weight

    def of(self, loss: Loss | None, *, at_once: bool) -> "LossProgram":
        """Return the program of another loss, of all rows of a batch `at_once` or where the loss is another."""
        model = self.model if loss is None else self.model.with_loss(loss)
        way: Way = "whole" if (at_once or loss is not None) and self.way == "parts" else self.way
        return replace(self, model=model, way=way if model.split else "xla")

    def check_traced(self, jaxpr: Any) -> None:
        """Raise ``UserError`` for a convolution between layers, which XLA splits wrong."""
        check_grouped(jaxpr, self.grid.mesh, MARK)

    @property
    def _stacked(self) -> Specs:
        """Layouts of the replicas' copies."""
        return {name: P("data", *spec) for name, spec in self.parts.specs.items()}

    def _used(self, name: str) -> P:
        """Return the layout in which the loss gets a parameter."""
        return self.parts.specs[name] if self.model.split and self.way != "xla" else P()

    def _shares(self, batch: Any, parts: int) -> tuple[jax.Array, jax.Array]:
        """Return each part's share of the mean loss, and the weight of the batch.

        Parts are in the first `parts` dims: [microbatches, data], or [microbatches].
        """
        rows = rows_of(batch)
        weights = part_weights(self.weight, lambda rows: with_rows(batch, rows), rows, parts)
        total = jnp.sum(weights)
        return weights / total, total

    def _called(
        self,
        local: Callable[..., Any],
        params: Weights,
        carried: Params,
        batch: Any,
        key: jax.Array | None,
        scale: jax.Array | None,
    ) -> tuple[Any, jax.Array]:
        """Call a function of some rows: for all replicas side by side, each with a copy of the parameters, or once.

        Returns its results, in parts [data, ...], and the weight of the batch.
        """
        dense = {name: value if isinstance(value, jax.Array) else value.shard() for name, value in params.items()}
        if self.way != "parts":
            batch = jax.tree.map(self._as_one, batch, is_leaf=is_replicated)
            shares, weight = self._shares(batch, 1)
            own = {name: self._constrained(v.astype(jnp.float32), self._used(name)) for name, v in dense.items()}
            return local(own, carried, batch, shares, 0, key, scale), weight
        shares, weight = self._shares(batch, 2)
        side_by_side = self._on_devices if self._manual else self._mapped
        try:
            return side_by_side(lambda *own: local(*own, key, scale), dense, carried, batch, shares), weight
        except Exception as error:  # of jax's manual axes, where the model maps a layer by jax.vmap, or of the loss
            if self.asked and not isinstance(error, UserError):
                replace(self, way="whole").forward(params, carried, batch, key, training=True)  # raises the loss's own
                accepted = f"auto or whole: in parts of the rows the loss fails: {first_line(error)}"
                raise UserError("rows", "parts", accepted) from error
            raise

    @property
    def _manual(self) -> bool:
        """True if each replica is on a device of its own, where its model runs as on one device."""
        return self.way == "parts" and one_device_each(self.grid.mesh)

    def _mapped(self, replica: Callable[..., Any], dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
        """Run each replica, its layers split, in `jax.vmap` over replicas."""
        replicas = self.grid.shape.data

        def copies(name: str, value: jax.Array) -> jax.Array:
            stacked = jnp.broadcast_to(value.astype(jnp.float32), (replicas, *value.shape))
            return self._constrained(stacked, P("data", *self._used(name)))

        own = {name: copies(name, value) for name, value in dense.items()}
        of_batch = jax.tree.map(lambda leaf: None if is_replicated(leaf) else 1, batch, is_leaf=is_replicated)
        axes = (0, None, of_batch, 1, 0)
        run = jax.vmap(replica, in_axes=axes, spmd_axis_name="data", axis_name=REPLICAS)
        return run(own, carried, batch, shares, jnp.arange(replicas))

    def _on_devices(self, replica: Callable[..., Any], dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
        """Run each replica on its device, in a manual region over all."""
        mesh = Mesh(self.grid.mesh.devices.reshape(-1), (REPLICAS,), axis_types=(AxisType.Auto,))

        def run(dense: Params, carried: Params, batch: Any, shares: Any) -> Any:
            rows = jax.tree.map(lambda leaf: leaf if is_replicated(leaf) else leaf[:, 0], batch, is_leaf=is_replicated)
            own = {name: value.astype(jnp.float32) for name, value in dense.items()}
            results = replica(own, carried, rows, shares[:, 0], lax.axis_index(REPLICAS))
            return jax.tree.map(lambda value: value[None], results)

        split = P(None, REPLICAS)
        of_batch = jax.tree.map(lambda leaf: P() if is_replicated(leaf) else split, batch, is_leaf=is_replicated)
        in_specs = (P(), P(), of_batch, split)
        region = jax.shard_map(run, mesh=mesh, in_specs=in_specs, out_specs=P(REPLICAS), check_vma=False)
        with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
            return region(dense, carried, batch, shares)

    def _as_one(self, leaf: Any) -> Any:
        """Return rows of all replicas, [microbatches, data, rows, ...], as [microbatches, rows, ...]."""
        if is_replicated(leaf):
            return leaf
        count, data, rows, *rest = leaf.shape
        axes = (("data", *ROW_AXES), ("data",), ())
        over = next(each for each in axes if data * rows % size_over(self.grid.mesh, each) == 0) or None
        return self._constrained(leaf.reshape(count, data * rows, *rest), P(None, over))

    def _part_key(self, key: Any, number: Any, replica: Any) -> Any:
        """Return the key of a part, so that `data = 2` with 4 microbatches draws what `data = 1` with 8 does."""
        if key is None:
            return None
        return jax.random.fold_in(key, number * self.grid.shape.data + replica if self.way == "parts" else number)

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
        """Return some rows' part of the mean loss, its sums of gradients, of numbers, and what calls have written.

        `formed` has the weights that are in another form, of whose gradients the trained values' alone add up; None for
        no gradients.
        """
        changed: set[str] = set()

        def part(params: Params, carried: Params, number: Any, share: Any, rows: Any) -> tuple[jax.Array, LossResult]:
            own = self._part_key(key, number, replica)
            result = self.model.run(params, carried, own, with_rows(batch, rows), training=training, way=self.way)
            changed.update(result.carried)
            loss = share_of(result.loss, share)
            return loss if scale is None else loss * scale, result._replace(loss=loss)

        backward = jax.value_and_grad(with_sliced_pooling(part), has_aux=True)

        @jax.jit  # traced once
        def add(carry: Any, microbatch: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, Any]:
            total, sums, state = carry
            number, share, rows = microbatch
            given = (params, {name: state[name] for name in carried}, number, share, rows)
            if formed is None:
                result = part(*given)[1]
            else:
                (_, result), grads = backward(*given)
                sums = self._added(formed, sums, grads, share)
            aux = averaged(share, result.aux)
            return (total + result.loss, sums, {**state, **result.carried}), aux

        shapes = {} if formed is None else self.state_shapes
        sums = {name: self._laid(name, jnp.zeros(shape, self.precisions.grad_dtype)) for name, shape in shapes.items()}
        microbatches, total, state = (jnp.arange(shares.shape[0]), shares, rows_of(batch)), jnp.zeros(()), carried
        if shares.shape[0] > 1:  # a loop carries parameters that calls write, too; all parts read those of the step
            first = jax.tree.map(lambda value: value[0], microbatches)
            written = jax.eval_shape(add, (total, sums, state), first)[0][-1]
            state = carried | {name: params[name] for name in written if name in params}
        (total, sums, state), aux = each_microbatch(add, (total, sums, state), microbatches)
        aux = jax.tree.map(lambda values: jnp.sum(values, 0), aux)
        return total, sums, aux, {name: state[name] for name in sorted(changed)}

    def _added(self, formed: Mapping[str, Any], sums: Params, grads: Params, share: jax.Array) -> Params:
        """Return sums of gradients with those of one more part."""
        if self.weight is not None:  # of a mean over nothing, the gradient times 0 would be NaN
            grads = {name: jnp.where(share != 0, grad, 0) for name, grad in grads.items()}
        if self.forms is not None:
            grads |= self.forms.values({name: weight.holding(grads[name]) for name, weight in formed.items()})
        return {name: self._laid(name, sums[name] + grads[name].astype(self.precisions.grad_dtype)) for name in sums}

    def _laid(self, name: str, value: jax.Array) -> jax.Array:
        return value if self._manual else self._constrained(value, self.parts.specs[name])

    def _constrained(self, value: jax.Array, spec: P) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(self.grid.mesh, spec))


def _step_results(grads: Params, loss: Any, norm: Any, scale: Any, aux: Any, changed: Params) -> StepResults:
    norm = norm if scale is None else norm / scale
    aux = jax.tree.map(lambda leaf: leaf.value if is_total(leaf) else leaf, aux, is_leaf=is_total)
    return StepResults(grads, loss, norm, {"aux": aux} if jax.tree.leaves(aux) else {}, changed)
