"""A Linen layer's NNX form computes what the layer does."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from axonn_jax.any_flax.parallelize.linen_layers import intercepted


def _sizes(module, *shape):
    return module, jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)


BF16 = jnp.bfloat16
LAYERS = [
    _sizes(nn.Dense(6, dtype=BF16), 2, 3, 4),
    _sizes(nn.DenseGeneral((2, 3), axis=(1, -1)), 2, 4, 5),
    _sizes(nn.DenseGeneral(6, axis=(-1, -2), use_bias=False), 2, 4, 5),
    _sizes(nn.Einsum((2, 4, 3), "bth,nhd->btnd"), 2, 3, 4),
    _sizes(nn.Conv(6, 3, padding="CAUSAL", kernel_dilation=2), 2, 5, 4),
    _sizes(nn.Conv(6, (3, 3), strides=(2, 1), padding="CIRCULAR", feature_group_count=2), 2, 5, 5, 4),
    _sizes(nn.ConvTranspose(6, (3, 3), strides=(2, 2), transpose_kernel=True), 2, 5, 5, 4),
    _sizes(nn.LayerNorm(dtype=BF16, epsilon=1e-3), 2, 3, 4),
    _sizes(nn.LayerNorm(use_bias=False, use_scale=False), 2, 3, 4),
    _sizes(nn.RMSNorm(param_dtype=BF16), 2, 3, 4),
    (nn.Embed(5, 4, dtype=BF16), jnp.array([[0, 1, -1], [4, 5, 2]])),
    _sizes(nn.Embed(5, 4, param_dtype=BF16), 2, 4),
]


@pytest.mark.parametrize(("layer", "x"), LAYERS, ids=lambda each: type(each).__name__)
def test_the_nnx_layer_computes_what_the_linen_layer_does(layer, x):
    seen = []

    def run(call):
        if isinstance(call.layer, str):
            return call.plain()
        seen.append(call.layer)
        return call.layer.run(call.layer.layer)

    with jax.numpy_dtype_promotion("standard"):  # as Flax's own norms need it
        method = "attend" if isinstance(layer, nn.Embed) and x.dtype == jnp.float32 else "__call__"
        params = layer.init(jax.random.key(0), x, method=method)
        params = jax.tree.map(lambda p: p + jnp.linspace(0, 1, p.size, dtype=p.dtype).reshape(p.shape), params)
        with intercepted(run, run):
            got = layer.apply(params, x, method=method)
        want = layer.apply(params, x, method=method)
    assert [call.base for call in seen] == [type(layer)]
    assert got.dtype == want.dtype
    np.testing.assert_allclose(got, want, rtol=float(jnp.finfo(want.dtype).eps), atol=1e-6)
