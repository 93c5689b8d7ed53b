"""Runs one layer in a manual region of its own: rows over `data` and `z`, features over `x` and `y`."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.tensor.collectives import gather_weight, reduce_sum, vary
from axonn_jax.tensor.region import manual
from axonn_jax.tensor.wrap.plan import LayerPlan, place, without_z


class LocalLayer:
    """Stands in for a layer as `self` of its own Flax method: some attributes replaced, all others the layer's."""

    def __init__(self, layer: Any, **replaced: Any):
        self._layer = layer
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)


Local = Callable[[jax.Array, dict[str, Any], bool], jax.Array]
"""A layer on local shards: its input, its parameters by name (None for one it lacks), whether rows are split."""


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
    """Runs `local` on local shards of an input [rows, ..., features] and of the layer's parameters.

    `x_feature` is the input's dim of features (None: it has none, as ids) and the axis that splits it, `y_spec` the
    layout of the output's features, `rows` the batch dim of input and of output. Rows are split over `data` and `z`
    if they divide; a weight gathered over `z` is then not kept for the backward pass but gathered again, as DESIGN
    section 4 has it. Where they do not, every device of `data` and `z` computes the same, and the parameters come in
    whole along `z` (XLA gathers them).
    """
    x_spec = place(x.ndim) if x_feature is None else place(x.ndim, x_feature)
    is_row = rows is not None and x.ndim > 0 and (x_feature is None or rows[0] != x_feature[0] % x.ndim)
    split = is_row and rows is not None and x.shape[rows[0]] % plan.size(*BATCH_AXES) == 0
    if split and rows is not None:
        x_spec = P(*(BATCH_AXES if dim == rows[0] else axis for dim, axis in enumerate(x_spec)))
        y_spec = P(*(BATCH_AXES if dim == rows[1] else axis for dim, axis in enumerate(y_spec)))
    held = {name: value for name, value in params.items() if value is not None}
    specs = {name: plan.spec(name) if split else without_z(plan.spec(name)) for name in held}

    def run(x: jax.Array, held: dict[str, jax.Array]) -> jax.Array:
        return local(x, {**dict.fromkeys(params), **held}, split)

    if split and plan.z_dim is not None and plan.size("z") > 1:
        run = jax.checkpoint(run)  # nothing but the gather: the rest of the forward pass is dead code in the backward
    return manual(run, plan.mesh, (x_spec, specs), y_spec, among_others=True)(x, held)  # type: ignore[no-any-return]


def whole_weight(plan: LayerPlan, kernel: jax.Array, split: bool, dtype: jnp.dtype) -> jax.Array:
    """The kernel gathered over `z` in `dtype`; one that `z` does not split is cast to it.

    It is made to vary over `data` before it is gathered: autodiff then scatters its gradient over `z` first and
    reduces over `data` what is left, a `Gz`-th.
    """
    if not split or plan.z_dim is None:
        return kernel.astype(dtype)
    return gather_weight(vary(kernel, ("data",)), dtype, dim=plan.z_dim)


def contract(
    layer: Any, plan: LayerPlan, x: jax.Array, flax_call: Callable[[Any, jax.Array], jax.Array], **replaced: Any
) -> jax.Array:
    """A layer `Y = X W + b` (matmul, einsum or convolution) by the 4D algorithm, on global arrays.

    `flax_call(stand_in, x)` is the layer's own Flax code; it runs on local shards, with all its options but those that
    are `replaced`. Where one axis splits both sides, each shard is a layer by itself. Collectives else as in
    `tensor.linear.matmul_4d`: forward all-gather of W over `z`, all-reduce of Y over `in_axis`; backward
    all-gather of W over `z` again, all-reduce of dX over `out_axis`, reduce-scatter of dW over `z`, all-reduce of
    what is left over `data` (bytes: DESIGN section 4).
    """
    dims = plan.dims

    def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
        kernel, bias = params["kernel"], params["bias"]
        if split:  # before they are cast, so that gradients are summed over devices in the parameters' own dtype
            kernel = vary(kernel, BATCH_AXES if plan.z_dim is None else ("data",))
            bias = None if bias is None else vary(bias, BATCH_AXES)
        x, cast, bias = layer.promote_dtype((x, kernel, bias), dtype=layer.dtype)
        kernel = whole_weight(plan, kernel, split, cast.dtype)
        if plan.out_axis is not None:
            x = vary(x, (plan.out_axis,))
        y = flax_call(LocalLayer(layer, kernel=kernel, bias=None, use_bias=False, **replaced), x)
        y = y if plan.in_axis in (None, plan.out_axis) else reduce_sum(y, plan.in_axis)
        if bias is None:
            return y
        shape = [1] * y.ndim
        for size, dim in zip(bias.shape, dims.bias, strict=True):
            shape[dim] = size
        return y + bias.reshape(shape)

    bias = None if layer.bias is None else layer.bias[...]
    y_spec = place(x.ndim + dims.rank, (dims.y, plan.out_axis))
    params = {"kernel": layer.kernel[...], "bias": bias}
    return in_region(plan, local, x, params, x_feature=(dims.x, plan.in_axis), y_spec=y_spec, rows=dims.rows)
