"""The layers of `flax.nnx`, 4D-sharded: same attributes, same parameters, same results; a plan says how they lie."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.tensor.embedding import lookup, scores
from axonn_jax.tensor.norm import layer_norm, rms_norm
from axonn_jax.tensor.wrap.plan import LayerPlan, place
from axonn_jax.tensor.wrap.run import contract, in_region, whole_weight


class ShardedLinear(nnx.Linear):
    """`nnx.Linear` by the 4D algorithm: [..., in] -> [..., out]; collectives as in `run.contract`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """As the Flax layer; the layout is the plan's, `out_sharding` is not looked at."""

        def flat(layer: Any, x: jax.Array) -> jax.Array:
            # 2-D: batched operands cost the CPU backend a tenth of a step
            y = nnx.Linear.__call__(layer, x.reshape(-1, x.shape[-1]))
            return y.reshape(*x.shape[:-1], y.shape[-1])

        return contract(self, self.axonn_plan, inputs, flat)


class ShardedLinearGeneral(nnx.LinearGeneral):
    """`nnx.LinearGeneral` by the 4D algorithm, heads or the like split; collectives as in `run.contract`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """As the Flax layer; the layout is the plan's, `out_sharding` is not looked at."""
        return contract(self, self.axonn_plan, inputs, nnx.LinearGeneral.__call__)


class ShardedEinsum(nnx.Einsum):
    """`nnx.Einsum` by the 4D algorithm; collectives as in `run.contract`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array, einsum_str: str | None = None, out_sharding: Any = None) -> jax.Array:
        """As the Flax layer; the layout is the plan's, `out_sharding` is not looked at."""
        if einsum_str is not None:  # the plan was made for the string of the constructor: Flax says what is wrong
            return super().__call__(inputs, einsum_str)
        return contract(self, self.axonn_plan, inputs, nnx.Einsum.__call__)


class ShardedConv(nnx.Conv):
    """`nnx.Conv` with channels split as features are, or whole groups of them, space whole; as in `run.contract`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """As the Flax layer; the layout is the plan's, `out_sharding` is not looked at."""
        plan = self.axonn_plan
        if inputs.ndim < len(self.kernel_size) + 2:  # one example without a batch dim
            return self(inputs[None])[0]
        if self.feature_group_count == 1:
            return contract(self, plan, inputs, nnx.Conv.__call__)
        parts = plan.size(plan.in_axis)
        groups, features = self.feature_group_count // parts, self.in_features // parts
        return contract(self, plan, inputs, nnx.Conv.__call__, feature_group_count=groups, in_features=features)


class ShardedConvTranspose(nnx.ConvTranspose):
    """`nnx.ConvTranspose` with channels split as features are, space whole; collectives as in `run.contract`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """As the Flax layer."""
        if inputs.ndim < len(self.kernel_size) + 2:  # one example without a batch dim
            return self(inputs[None])[0]
        return contract(self, self.axonn_plan, inputs, nnx.ConvTranspose.__call__)


class ShardedEmbed(nnx.Embed):
    """`nnx.Embed` with the vocabulary over `in_axis` and `z`, features over `out_axis`."""

    axonn_plan: LayerPlan

    def __call__(self, inputs: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Ids [rows, ...] -> [rows, ..., features].

        Collectives: all-gather of the table over `z`, all-reduce of the result over `in_axis`; backward a
        reduce-scatter of the table's gradient over `z`, an all-reduce over `data`. Ids of one dim are taken for
        positions, which all rows share, and not split.
        """
        if not jnp.issubdtype(inputs.dtype, jnp.integer):
            raise ValueError("Input type must be an integer or unsigned integer.")
        plan, total = self.axonn_plan, self.num_embeddings

        def local(ids: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
            (cast,) = self.promote_dtype((params["embedding"],), dtype=self.dtype, inexact=False)
            table = whole_weight(plan, params["embedding"], split, cast.dtype)
            ids = jnp.where(ids < 0, ids + total, ids)
            rows = lookup(table, ids, plan.in_axis or "")
            # As jnp.take: what is outside the table is NaN, not a neighbour's row.
            inside = (ids >= 0) & (ids < total)
            return jnp.where(inside[..., None], rows, jnp.full((), jnp.nan, rows.dtype))

        ids = inputs.astype(jnp.int32)
        y_spec = place(ids.ndim + 1, (-1, plan.out_axis))
        rows = (0, 0) if ids.ndim > 1 else None
        return in_region(plan, local, ids, {"embedding": self.embedding[...]}, x_feature=None, y_spec=y_spec, rows=rows)

    def attend(self, query: jax.Array, out_sharding: Any = None) -> jax.Array:
        """Scores of every id, [rows, ..., features] -> [rows, ..., vocabulary].

        Collectives: those of `run.contract` with features over `out_axis` and the vocabulary over `in_axis`.
        """
        plan = self.axonn_plan

        def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
            x, cast = self.promote_dtype((x, params["embedding"]), dtype=self.dtype)
            table = whole_weight(plan, params["embedding"], split, cast.dtype)
            return scores(table, x, plan.in_axis or "", plan.out_axis or "")

        y_spec = place(query.ndim, (-1, plan.in_axis))
        params = {"embedding": self.embedding[...]}
        return in_region(plan, local, query, params, x_feature=(-1, plan.out_axis), y_spec=y_spec)


class ShardedLayerNorm(nnx.LayerNorm):
    """`nnx.LayerNorm` over features split over `in_axis`; collectives as in `tensor.norm.layer_norm`."""

    axonn_plan: LayerPlan

    def __call__(self, x: jax.Array, *, mask: jax.Array | None = None) -> jax.Array:
        """As the Flax layer, the variance by two passes; with a mask it is the Flax layer, laid out by XLA."""
        if mask is not None:
            return super().__call__(x, mask=mask)
        plan = self.axonn_plan

        def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
            x, scale, bias = self.promote_dtype((x, params["scale"], params["bias"]), dtype=self.dtype)
            return layer_norm(x, _wide(scale), _wide(bias), self.epsilon, plan.in_axis or "")

        params = {name: None if p is None else p[...] for name, p in (("scale", self.scale), ("bias", self.bias))}
        feature = (-1, plan.in_axis)
        return in_region(plan, local, x, params, x_feature=feature, y_spec=place(x.ndim, feature))


class ShardedRMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` over features split over `in_axis`; collectives as in `tensor.norm.rms_norm`."""

    axonn_plan: LayerPlan

    def __call__(self, x: jax.Array, mask: jax.Array | None = None) -> jax.Array:
        """As the Flax layer; with a mask it is the Flax layer, laid out by XLA."""
        if mask is not None:
            return super().__call__(x, mask=mask)
        plan = self.axonn_plan

        def local(x: jax.Array, params: dict[str, Any], split: bool) -> jax.Array:
            x, scale = self.promote_dtype((x, params["scale"]), dtype=self.dtype)
            return rms_norm(x, _wide(scale), self.epsilon, plan.in_axis or "")

        scale = None if self.scale is None else self.scale[...]
        feature = (-1, plan.in_axis)
        return in_region(plan, local, x, {"scale": scale}, x_feature=feature, y_spec=place(x.ndim, feature))


def _wide(param: jax.Array | None) -> jax.Array | None:
    """Norms compute in float32; strict dtype promotion wants it said."""
    return None if param is None else param.astype(jnp.float32)


SHARDED: dict[type[nnx.Module], type[nnx.Module]] = {
    nnx.Linear: ShardedLinear,
    nnx.LinearGeneral: ShardedLinearGeneral,
    nnx.Einsum: ShardedEinsum,
    nnx.Conv: ShardedConv,
    nnx.ConvTranspose: ShardedConvTranspose,
    nnx.Embed: ShardedEmbed,
    nnx.LayerNorm: ShardedLayerNorm,
    nnx.RMSNorm: ShardedRMSNorm,
}
"""The sharded form of each Flax layer that has one."""
