"""Attention kernels against softmax written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from axonn_jax.tensor.attention import causal_attention, rotary

EPS = float(np.finfo(np.float32).eps)


def plain(q, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = np.repeat(k, group, 2), np.repeat(v, group, 2)
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = np.where(np.tril(np.ones(scores.shape[-2:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v)


def inputs(batch, seq, heads, kv_heads, head_dim):
    draw = np.random.default_rng(seq)
    return [draw.standard_normal((batch, seq, h, head_dim)) for h in (heads, kv_heads, kv_heads, heads)]


# One query block, several, a last one that is not full; chunks of heads that do and do not fill the cache.
SHAPES = [(2, 1, 2, 2, 8), (2, 16, 4, 2, 8), (1, 128, 3, 3, 16), (3, 200, 4, 1, 8), (2, 300, 6, 2, 16)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", ["blocked", "xla"])
def test_values_and_gradients(kernel, shape):
    *qkv, direction = inputs(*shape)
    narrow = [jnp.asarray(a, jnp.float32) for a in qkv]
    out, pull = jax.vjp(lambda q, k, v: causal_attention(q, k, v, kernel), *narrow)
    np.testing.assert_allclose(out, plain(*qkv), atol=16 * EPS * np.abs(plain(*qkv)).max())
    with jax.enable_x64(True):
        wide = [jnp.asarray(a, jnp.float64) for a in qkv]
        want = jax.vjp(lambda q, k, v: _plain_jax(q, k, v), *wide)[1](jnp.asarray(direction))
    for got, exact in zip(pull(jnp.asarray(direction, jnp.float32)), want, strict=True):
        # Sums over up to seq = 300 terms: sqrt(300) = 17 eps of the largest entry, twice for the two matmuls. With one
        # token gradients of queries and keys are differences of equal terms, as large as the gradient of values.
        largest = max(float(np.abs(one).max()) for one in (exact, *(want[2:] if shape[1] == 1 else ())))
        np.testing.assert_allclose(got, exact, atol=34 * EPS * largest)


def _plain_jax(q, k, v):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    weights = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def test_bfloat16_stays_bfloat16():
    qkv = [jnp.asarray(a, jnp.bfloat16) for a in inputs(2, 150, 4, 2, 8)[:3]]
    out = causal_attention(*qkv, "blocked")
    assert out.dtype == jnp.bfloat16
    want = plain(*[np.asarray(a, np.float64) for a in qkv])
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=2**-7 * np.abs(want).max())


def test_no_token_sees_a_later_one():
    q, k, v, _ = (jnp.asarray(a, jnp.float32) for a in inputs(1, 200, 2, 2, 8))
    before = causal_attention(q, k, v, "blocked")[:, :150]
    after = causal_attention(q, k.at[:, 150:].set(9.0), v.at[:, 150:].set(9.0), "blocked")[:, :150]
    np.testing.assert_array_equal(before, after)


def test_rotary_keeps_lengths_and_depends_on_distance_only():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 1, 1, 16)), jnp.float32)
    turned = rotary(jnp.broadcast_to(x, (1, 50, 1, 16)), 10_000.0)[0, :, 0]
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x), rtol=8 * EPS)
    dots = turned @ turned.T
    np.testing.assert_allclose(dots[0, 10], dots[37, 47], rtol=64 * EPS)
