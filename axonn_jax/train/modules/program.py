"""Program of the gradients of any Flax model: replicas side by side, and one reduction over them a step."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.traits import convolves_slowly_in_loops
from axonn_jax.errors import UserError
from axonn_jax.memory.forms import Weights
from axonn_jax.memory.zero import reduce_gradients, split_over_replicas
from axonn_jax.tensor.collectives import all_reduce, axis_size
from axonn_jax.tensor.parallelize.convolution import check_grouped, convolves
from axonn_jax.tensor.parallelize.flow import MARK
from axonn_jax.tensor.params import Params, Specs, global_norm
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.train.engines.on_mesh import OnMesh, StepResults
from axonn_jax.train.modules.apart import REPLICAS, Apart, LossResult
from axonn_jax.train.modules.batches import is_replicated

_FLOAT32 = jnp.dtype("float32")

Weight = Callable[[Any], Any]
"""Function of a batch -> what its mean loss counts."""


@dataclass(frozen=True)
class ReplicaProgram(OnMesh):
    """Gradients of a model whose layers are split by `parallelize`, each in a manual region of its own.

    Every replica has a copy of the parameters, [data, ...], local to its devices: `jax.vmap` over it, with `data` as
    `spmd_axis_name`, puts `data` into the specs of all regions. So gradients add up over microbatches without
    communication over `data`, and are reduced once. Batches are [microbatches, data, rows, ...].
    """

    model: Apart
    weight: Weight | None = None
    bucket: int = 16_000_000
    sums: jnp.dtype = _FLOAT32
    """Dtype in which gradients add up, and are reduced over `data`."""
    zero: bool = False
    """True if gradients are scattered over `data` (ZeRO-1)."""

    ordered = False
    """The order of computation is XLA's."""
    sub_batches = 1
    """Rows of a microbatch run together."""
    token_axes = ("data",)
    """Axes over which gradients add up; the layers have added them up over `z`."""

    @property
    def grad_specs(self) -> Specs:
        """Layout of every gradient, the same as its parameter's, or with ZeRO split over `data` too."""
        if not self.zero:
            return self.parts.specs
        return split_over_replicas(self.state_shapes, self.parts.specs, self.grid.mesh)

    def results(
        self, params: Weights, carried: Params, batch: Any, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the mean loss of a batch and its gradients.

        Collectives over `data`: the reduction of the gradients (with ZeRO a reduce-scatter), once, in buckets, and of
        some numbers; with BatchNorm its statistics, a layer and microbatch. The others are the layers'.
        """
        shares, _ = self._shares(batch)
        local = partial(self._local, {} if self.forms is None else {name: params[name] for name in self.forms.shapes})
        total, sums, aux, changed = self._mapped(local, params, carried, batch, shares, key, scale)

        def reduce(total: jax.Array, sums: Params, aux: Any, changed: Params) -> Any:
            own = {name: value[0] for name, value in sums.items()}
            layouts = (self.parts.specs, self.grad_specs)
            grads = reduce_gradients(own, *layouts, self.bucket, self.grid.mesh, lambda name: ("data",))
            # A replica's loss and numbers are shares of the mean; state is alike, or its mean counts.
            loss, aux = jax.tree.map(lambda value: all_reduce(value[0], ("data",)), (total, aux))
            return grads, global_norm(grads, self.grad_specs), loss, aux, jax.tree.map(_of_replicas, changed)

        numbers = jax.tree.map(lambda _: P("data"), (aux, changed))
        in_specs = (P("data"), self._stacked, *numbers)
        out_specs = (self.grad_specs, P(), P(), *jax.tree.map(lambda _: P(), (aux, changed)))
        region = shard_mapped(reduce, self.grid.mesh, in_specs, out_specs, differentiated=False, among_others=True)
        grads, norm, loss, aux, changed = region(total, sums, aux, changed)
        norm = norm if scale is None else norm / scale
        return StepResults(grads, loss, norm, {"aux": aux} if jax.tree.leaves(aux) else {}, changed)

    def evaluate(self, params: Weights, carried: Params, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch in evaluation mode, and its weight: by `weight`, else its rows."""
        shares, weight = self._shares(batch)

        def local(params: Params, carried: Params, batch: Any, shares: jax.Array, *_: Any) -> jax.Array:
            def add(total: jax.Array, microbatch: tuple[jax.Array, Any]) -> tuple[jax.Array, None]:
                share, rows = microbatch
                result = self.model.run(params, carried, None, _with(batch, rows), training=False)
                return total + _share_of(result.loss, share), None

            return _each(add, jnp.zeros(()), (shares, _rows_of(batch)))[0]

        return jnp.sum(self._mapped(local, params, carried, batch, shares, None, None)), weight

    def check_traced(self, jaxpr: Any) -> None:
        """Raise ``UserError`` for a convolution between layers, which XLA splits wrong where replicas are mapped."""
        check_grouped(jaxpr, self.grid.mesh, MARK)

    @property
    def _stacked(self) -> Specs:
        """Layouts of the replicas' copies."""
        return {name: P("data", *spec) for name, spec in self.parts.specs.items()}

    def _shares(self, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return each part's share of the mean loss, [microbatches, data], and the weight of the batch."""
        rows = _rows_of(batch)
        if self.weight is None:
            weights = jnp.full(rows[0].shape[:2], rows[0].shape[2], jnp.float32)
        else:
            weights = jax.vmap(jax.vmap(partial(_weight, self.weight, batch)))(rows)
        total = jnp.sum(weights)
        return weights / total, total

    def _mapped(
        self,
        local: Callable[..., Any],
        params: Weights,
        carried: Params,
        batch: Any,
        shares: jax.Array,
        key: jax.Array | None,
        scale: jax.Array | None,
    ) -> Any:
        """Call a function for all replicas side by side, each with a copy of the parameters and its rows."""
        replicas = self.grid.shape.data

        def copies(name: str, value: Any) -> jax.Array:
            dense = value if isinstance(value, jax.Array) else value.shard()
            stacked = jnp.broadcast_to(dense.astype(jnp.float32), (replicas, *dense.shape))
            return lax.with_sharding_constraint(stacked, NamedSharding(self.grid.mesh, self._stacked[name]))

        def replica(*given: Any) -> Any:
            return local(*given, key, scale)

        own = {name: copies(name, value) for name, value in params.items()}
        of_batch = jax.tree.map(lambda leaf: None if is_replicated(leaf) else 1, batch, is_leaf=is_replicated)
        axes = (0, None, of_batch, 1, 0)
        run = jax.vmap(replica, in_axes=axes, spmd_axis_name="data", axis_name=REPLICAS)
        return run(own, carried, batch, shares, jnp.arange(replicas))

    def _local(
        self,
        formed: Mapping[str, Any],
        params: Params,
        carried: Params,
        batch: Any,
        shares: jax.Array,
        replica: Any,
        key: Any,
        scale: Any,
    ) -> tuple[jax.Array, Params, Any, Params]:
        """Return one replica's part of the mean loss, its sums of gradients, of numbers, and the changed state.

        `formed` has the weights that are in another form, of whose gradients the trained values' alone add up.
        """
        changed: set[str] = set()

        def part(params: Params, carried: Params, number: Any, share: Any, rows: Any) -> tuple[jax.Array, LossResult]:
            own = None if key is None else jax.random.fold_in(key, number * self.grid.shape.data + replica)
            result = self.model.run(params, carried, own, _with(batch, rows), training=True)
            changed.update(result.carried)
            loss = _share_of(result.loss, share)
            return loss if scale is None else loss * scale, result._replace(loss=loss)

        backward = jax.value_and_grad(part, has_aux=True)

        def add(carry: Any, microbatch: tuple[jax.Array, jax.Array, Any]) -> tuple[Any, Any]:
            total, sums, carried = carry
            number, share, rows = microbatch
            (_, result), grads = backward(params, carried, number, share, rows)
            if self.weight is not None:  # of a mean over nothing, the gradient times 0 would be NaN
                grads = {name: jnp.where(share != 0, grad, 0) for name, grad in grads.items()}
            if self.forms is not None:
                grads |= self.forms.values({name: weight.holding(grads[name]) for name, weight in formed.items()})
            sums = {name: self._laid(name, sums[name] + grads[name].astype(self.sums)) for name in sums}
            aux = jax.tree.map(partial(_number, share), result.aux)
            return (total + result.loss, sums, {**carried, **result.carried}), aux

        zeros = {name: self._laid(name, jnp.zeros(shape, self.sums)) for name, shape in self.state_shapes.items()}
        microbatches = (jnp.arange(shares.shape[0]), shares, _rows_of(batch))
        (total, sums, carried), aux = _each(add, (jnp.zeros(()), zeros, carried), microbatches)
        aux = jax.tree.map(lambda values: jnp.sum(values, 0), aux)
        return total, sums, aux, {name: carried[name] for name in sorted(changed)}

    def _laid(self, name: str, value: jax.Array) -> jax.Array:
        return lax.with_sharding_constraint(value, NamedSharding(self.grid.mesh, self.parts.specs[name]))


def _each(add: Callable[[Any, Any], tuple[Any, Any]], carry: Any, microbatches: Any) -> tuple[Any, Any]:
    """`lax.scan`, without a loop for one microbatch, and where convolutions would be slow in it."""
    count = len(jax.tree.leaves(microbatches)[0])

    def part(at: int) -> Any:
        return jax.tree.map(lambda value: value[at], microbatches)

    slow = convolves_slowly_in_loops(jax.default_backend())
    if count > 1 and not (slow and convolves(jax.make_jaxpr(add)(carry, part(0)).jaxpr)):
        return lax.scan(add, carry, microbatches)
    results = []
    for at in range(count):
        carry, result = add(carry, part(at))
        results.append(result)
    return carry, jax.tree.map(lambda *values: jnp.stack(values), *results)


def _of_replicas(value: jax.Array) -> jax.Array:
    """Return one value for state of all replicas, which is alike but for floats of a replica's own: their mean."""
    own = value[0]
    return all_reduce(own, ("data",)) / axis_size("data") if jnp.issubdtype(own.dtype, jnp.floating) else own


def _weight(weight: Weight, batch: Any, rows: list[jax.Array]) -> jax.Array:
    """Return the weight of some rows of a batch; raises ``UserError`` for what is no number."""
    value = weight(_with(batch, rows))
    if jnp.shape(value) != ():
        raise UserError("weight", f"an array of shape {jnp.shape(value)}", "a function that returns a number")
    return jnp.asarray(value, jnp.float32)


def _number(share: jax.Array, value: Any) -> jax.Array:
    """Return a number's part of its mean; raises ``UserError`` for what is no number."""
    if jnp.shape(value) != ():
        given = f"an array of shape {jnp.shape(value)} beside the loss"
        raise UserError("loss", given, "numbers, which are averaged as the loss is: take a mean over the rows")
    return _share_of(jnp.asarray(value, jnp.float32), share)


def _share_of(value: jax.Array, share: jax.Array) -> jax.Array:
    """Return a part's share of a mean: 0 where nothing in the part counts, whatever its value."""
    return jnp.where(share != 0, value * share, 0)


def _rows_of(batch: Any) -> list[jax.Array]:
    """The arrays of a batch that have rows, in order."""
    return [leaf for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if not is_replicated(leaf)]


def _with(batch: Any, rows: list[jax.Array]) -> Any:
    """The batch as its loss takes it, with other arrays in place of those that have rows."""
    leaves, structure = jax.tree.flatten(batch, is_leaf=is_replicated)
    given = iter(rows)
    return jax.tree.unflatten(structure, [leaf.value if is_replicated(leaf) else next(given) for leaf in leaves])
