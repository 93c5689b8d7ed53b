"""Sharded forms of `flax.nnx` layers, each in its own manual region, with unchanged attributes and results."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.kinds import Kernel, in_place_of_base
from axonn_jax.any_flax.parallelize.layouts import LayerPlan, OutsideRead, spec_of, stored_params, without_z
from axonn_jax.core.backend.workarounds import over_rows
from axonn_jax.core.tensor.collectives import all_reduce, mark_varying
from axonn_jax.core.tensor.embedding import lookup, tied_logits
from axonn_jax.core.tensor.norm import layer_norm, rms_norm
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import gather_weight


class LocalLayer:
    """Stand-in for `self` in a layer's Flax method: a few attributes are replaced, the others are the layer's."""

    def __init__(self, layer: Any, **replaced: Any):
        self._layer = layer
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


Local = Callable[[jax.Array, dict[str, Any], bool], jax.Array]
"""Computes a layer on local shards, given the input, parameters by name (None if absent), and whether rows are split.
"""


def in_region(
    plan: LayerPlan,
    local: Local,
    x: jax.Array,
    params: Mapping[str, jax.Array | None],
    *,
    x_feature: tuple[int, str | None] | None,
    y_spec: P,
    rows: tuple[int, int] | None = (0, 0),
) -> jax.Array:
    """Run `local` on the local shards of an input [rows, ..., features] and of a layer's parameters.

    Rows are split over the plan's `row_axes` if these divide them; a weight gathered over `z` is then gathered again in
    the backward pass. Otherwise every device along those axes computes the same rows, and XLA gathers the parameters
    along `z`.

    Args:
        plan: The layer's plan.
        local: The computation on local shards.
        x: The global input.
        params: The layer's global parameters by name, None for absent ones.
        x_feature: Feature dim of the input and its axis; None for an input without features, such as ids.
        y_spec: Layout of the output's features.
        rows: Batch dim of the input and of the output; None if rows are not to be split.

    Returns:
        The global output.
    """
    x_spec = spec_of(x.ndim) if x_feature is None else spec_of(x.ndim, x_feature)
    is_row = rows is not None and x.ndim > 0 and (x_feature is None or rows[0] != x_feature[0] % x.ndim)
    split = is_row and rows is not None and x.shape[rows[0]] % plan.size(*plan.row_axes) == 0
    if split and rows is not None:
        x_spec = P(*(plan.row_axes if dim == rows[0] else axis for dim, axis in enumerate(x_spec)))
        y_spec = P(*(plan.row_axes if dim == rows[1] else axis for dim, axis in enumerate(y_spec)))
    present = {name: value for name, value in params.items() if value is not None}
    specs = {name: plan.spec(name) if split else without_z(plan.spec(name)) for name in present}

    def run(x: jax.Array, present: dict[str, jax.Array]) -> jax.Array:
        return local(x, {**dict.fromkeys(params), **present}, split)

    if split and plan.regathers and plan.z_dim is not None and plan.size("z") > 1:
        # This recomputes only the gather: everything else in the forward pass is dead code in the backward pass.
        run = jax.checkpoint(run)
    return shard_mapped(run, plan.mesh, (x_spec, specs), y_spec, keep_mesh=True)(x, present)  # type: ignore[no-any-return]


def gather_kernel(plan: LayerPlan, kernel: jax.Array, split: bool, dtype: jnp.dtype) -> jax.Array:
    """Return the kernel in `dtype`, all-gathered over `z` if rows are split."""
    if not split or plan.z_dim is None:
        return kernel.astype(dtype)
    # Mark the kernel varying over `data` before the gather: autodiff then reduce-scatters the gradient over `z` first
    # and reduces only the remaining 1/Gz of it over `data`.
    return gather_weight(mark_varying(kernel, plan.replica_axes), dtype, dim=plan.z_dim)


def contract(layer: Any, x: jax.Array, flax_call: Callable[[Any, jax.Array], jax.Array], **replaced: Any) -> jax.Array:
    """Compute a layer `Y = X W + b` (matmul, einsum or convolution) by the 4D algorithm, on global arrays.

    Where one axis splits both sides, each shard is an independent layer. Otherwise the collectives are those of
    `tensor.linear.matmul_4d`: forward an all-gather of W over `z` and an all-reduce of Y over `in_axis`; backward the
    all-gather of W over `z` again, an all-reduce of dX over `out_axis`, a reduce-scatter of dW over `z` and an
    all-reduce of the local part over `data`.

    Args:
        layer: The sharded layer.
        x: The global input.
        flax_call: The layer's Flax method, called with a stand-in for the layer and a local input.
        **replaced: Attributes that the stand-in replaces.
    """
    plan: LayerPlan = layer.axonn_plan
    kernel, side_in, side_out = plan.of, *plan.sides
    assert isinstance(kernel, Kernel)

    def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
        weight, bias = params["kernel"], params["bias"]
        # Mark parameters varying before the cast, so that gradients are summed over devices in the parameters' dtype.
        if split:
            weight = mark_varying(weight, plan.row_axes if plan.z_dim is None else plan.replica_axes)
            bias = None if bias is None else mark_varying(bias, plan.row_axes)
        x, cast, bias = layer.promote_dtype((x, weight, bias), dtype=layer.dtype)
        weight = gather_kernel(plan, weight, split, cast.dtype)
        if plan.out_axis is not None:
            x = mark_varying(x, (plan.out_axis,))
        y = flax_call(LocalLayer(layer, kernel=weight, bias=None, use_bias=False, **replaced), x)
        y = y if plan.in_axis in (None, plan.out_axis) else all_reduce(y, plan.in_axis)
        # The bias comes after the all-reduce, which would otherwise add it once per device.
        if bias is None:
            return y
        shape = [1] * y.ndim
        for size, dim in zip(bias.shape, kernel.bias or (), strict=True):
            shape[dim] = size
        return y + bias.reshape(shape)

    y_spec = spec_of(x.ndim + kernel.rank, (side_out.activation, plan.out_axis))
    params, feature = stored_params(layer, ("kernel", "bias")), (side_in.activation, plan.in_axis)
    return in_region(plan, local, x, params, x_feature=feature, y_spec=y_spec, rows=kernel.rows)


def _linear(layer: Any, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
    # All layers ignore `out_sharding`: the plan determines the layout.
    def flat(layer: Any, x: jax.Array) -> jax.Array:
        return over_rows(lambda rows: nnx.Linear.__call__(layer, rows), x)

    return contract(layer, inputs, flat)


def _linear_general(layer: Any, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
    return contract(layer, inputs, nnx.LinearGeneral.__call__)


def _einsum(layer: Any, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
    if einsum_str is not None:  # the plan is for the constructor's string; Flax's call raises an error
        return nnx.Einsum.__call__(layer, inputs, einsum_str)
    return contract(layer, inputs, nnx.Einsum.__call__)


def _conv(layer: Any, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
    """Convolve with channels split as features, or as complete groups of them; spatial dims are not split."""
    if inputs.ndim < len(layer.kernel_size) + 2:  # one example without a batch dim
        return _conv(layer, inputs[None])[0]
    if layer.feature_group_count == 1:
        return contract(layer, inputs, nnx.Conv.__call__)
    parts = layer.axonn_plan.size(layer.axonn_plan.in_axis)
    groups, features = layer.feature_group_count // parts, layer.in_features // parts
    return contract(layer, inputs, nnx.Conv.__call__, feature_group_count=groups, in_features=features)


def _conv_transpose(layer: Any, inputs: jax.Array) -> jax.Array:
    if inputs.ndim < len(layer.kernel_size) + 2:  # one example without a batch dim
        return _conv_transpose(layer, inputs[None])[0]
    return contract(layer, inputs, nnx.ConvTranspose.__call__)


def _embed(layer: Any, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
    """Look up ids [rows, ...] -> [rows, ..., features]: vocabulary over `in_axis` and `z`, features over `out_axis`.

    Collectives: all-gather of the table over `z`, all-reduce of the result over `in_axis`; backward a
    reduce-scatter of the table's gradient over `z`, an all-reduce over `data`.
    """
    if not jnp.issubdtype(inputs.dtype, jnp.integer):
        raise ValueError("Input type must be an integer or unsigned integer.")
    plan, total = layer.axonn_plan, layer.num_embeddings

    def local(ids: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
        (cast,) = layer.promote_dtype((params["embedding"],), dtype=layer.dtype, inexact=False)
        table = gather_kernel(plan, params["embedding"], split, cast.dtype)
        ids = jnp.where(ids < 0, ids + total, ids)
        rows = lookup(table, ids, plan.in_axis or "")
        # Like jnp.take, which Flax uses: an id outside the table gives NaN, not another shard's row.
        inside = (ids >= 0) & (ids < total)
        return jnp.where(inside[..., None], rows, jnp.full((), jnp.nan, rows.dtype))

    ids = inputs.astype(jnp.int32)
    y_spec = spec_of(ids.ndim + 1, (-1, plan.out_axis))
    # Ids of one dim are positions, which all rows share, so they are not split.
    rows = (0, 0) if ids.ndim > 1 else None
    return in_region(plan, local, ids, stored_params(layer, ("embedding",)), x_feature=None, y_spec=y_spec, rows=rows)


def _attend(layer: Any, query: jax.Array, out_sharding: Any = None) -> jax.Array:
    """Return the logits of every id, [rows, ..., features] -> [rows, ..., vocabulary].

    Collectives: those of `contract` with features over `out_axis` and the vocabulary over `in_axis`.
    """
    plan = layer.axonn_plan

    def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
        x, cast = layer.promote_dtype((x, params["embedding"]), dtype=layer.dtype)
        table = gather_kernel(plan, params["embedding"], split, cast.dtype)
        return tied_logits(table, x, plan.in_axis or "", plan.out_axis or "")

    y_spec = spec_of(query.ndim, (-1, plan.in_axis))
    params = stored_params(layer, ("embedding",))
    return in_region(plan, local, query, params, x_feature=(-1, plan.out_axis), y_spec=y_spec)


def _norm(base: Any, norm: Callable[..., jax.Array], names: tuple[str, ...]) -> Callable[..., jax.Array]:
    """Return the call of a norm over features split over `in_axis`; the collectives are those of `norm`."""

    def call(layer: Any, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        plan, params = layer.axonn_plan, stored_params(layer, names)
        dtype = jnp.result_type(*(value.dtype for value in (x, *params.values()) if value is not None))
        # The sharded norms support neither masks nor 64 bits: leave those calls to Flax and XLA's partitioner.
        if mask is not None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize > 4:
            return base.__call__(layer, x, mask=mask)  # type: ignore[no-any-return]

        def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
            x, *cast = layer.promote_dtype((x, *(params[name] for name in names)), dtype=layer.dtype)
            # Norms compute in float32; strict dtype promotion needs explicit casts.
            wide = (None if param is None else param.astype(jnp.float32) for param in cast)
            return norm(x, *wide, layer.epsilon, plan.in_axis or "")

        feature = (-1, plan.in_axis)
        return in_region(plan, local, x, params, x_feature=feature, y_spec=spec_of(x.ndim, feature))

    return call


def _form(base: type[nnx.Module], weight: str | None, **methods: Callable[..., jax.Array]) -> type[nnx.Module]:
    """Return a type derived from a Flax layer whose methods follow the layer's plan."""
    read = {} if weight is None else {weight: OutsideRead()}
    return type(f"Sharded{base.__name__}", (base,), {"__module__": __name__, **read, **methods})


SHARDED: dict[type[nnx.Module], type[nnx.Module]] = {
    nnx.Linear: _form(nnx.Linear, "kernel", __call__=_linear),
    nnx.LinearGeneral: _form(nnx.LinearGeneral, "kernel", __call__=_linear_general),
    nnx.Einsum: _form(nnx.Einsum, "kernel", __call__=_einsum),
    nnx.Conv: _form(nnx.Conv, "kernel", __call__=_conv),
    nnx.ConvTranspose: _form(nnx.ConvTranspose, "kernel", __call__=_conv_transpose),
    nnx.Embed: _form(nnx.Embed, "embedding", __call__=_embed, attend=_attend),
    nnx.LayerNorm: _form(nnx.LayerNorm, None, __call__=_norm(nnx.LayerNorm, layer_norm, ("scale", "bias"))),
    nnx.RMSNorm: _form(nnx.RMSNorm, None, __call__=_norm(nnx.RMSNorm, rms_norm, ("scale",))),
}
"""Sharded forms of Flax layers."""


@functools.cache
def sharded(kind: type[nnx.Module]) -> type[nnx.Module]:
    """Return the sharded form of a layer type; for a derived type, one whose `super()` is the sharded Flax layer."""
    return in_place_of_base(kind, next(SHARDED[base] for base in kind.__mro__ if base in SHARDED), "Sharded")
