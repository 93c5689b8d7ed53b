"""Attention kernels against softmax written out in float64."""

import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as jaxs

from axonn_jax import UserError
from axonn_jax.core import compat
from axonn_jax.core.hardware import AttentionDevice
from axonn_jax.core.tensor.attention import Rotation, angles, blocked_attention, causal_attention, rotary
from axonn_jax.core.tensor.kernel_choice import AttentionRule, Tiles, against_cudnn, choose_form, tiles

EPS = float(np.finfo(np.float32).eps)


def seen(seq, window=0):
    distance = np.arange(seq)[:, None] - np.arange(seq)
    return (distance >= 0) & (distance < (window or seq))


def plain(q, k, v, window=0, cap=0.0):
    group = q.shape[2] // k.shape[2]
    k, v = jnp.repeat(k, group, 2), jnp.repeat(v, group, 2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / q.shape[-1] ** 0.5
    scores = cap * jnp.tanh(scores / cap) if cap else scores
    weights = jax.nn.softmax(jnp.where(seen(q.shape[1], window), scores, -jnp.inf), -1)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


@jax.enable_x64(True)
def exact(qkv, direction, window, cap=0.0):
    """Values and gradients in float64."""
    values, pull = jax.vjp(lambda *qkv: plain(*qkv, window, cap), *(jnp.asarray(a, jnp.float64) for a in qkv))
    return [np.asarray(one) for one in (values, *pull(jnp.asarray(direction)))]


def check(got, want, largest=0.0):
    """Sums over up to seq = 300 terms: sqrt(300) = 17 eps of the largest entry, twice for a gradient's two matmuls."""
    np.testing.assert_allclose(got[0], want[0], atol=16 * EPS * np.abs(want[0]).max())
    for one, wanted in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(one, wanted, atol=34 * EPS * max(np.abs(wanted).max(), largest))


def inputs(batch, seq, heads, kv_heads, head_dim):
    draw = np.random.default_rng(seq)
    return [draw.standard_normal((batch, seq, h, head_dim)) for h in (heads, kv_heads, kv_heads, heads)]


# One query block, several, a last one that is not full; chunks of heads that do and do not fill the cache.
SHAPES = [(2, 1, 2, 2, 8), (2, 16, 4, 2, 8), (1, 128, 3, 3, 16), (3, 200, 4, 1, 8), (2, 300, 6, 2, 16)]


# Windows within a block, across blocks, and larger than the sequence; blocks of which only the last keys are seen.
WINDOWS = [((2, 16, 4, 2, 8), 1), ((1, 128, 3, 3, 16), 20), ((3, 200, 4, 1, 8), 130), ((1, 300, 2, 2, 8), 10)]
WINDOWS += [((2, 16, 4, 2, 8), 99)]


@pytest.mark.parametrize(("shape", "window"), [*((shape, 0) for shape in SHAPES), *WINDOWS], ids=str)
@pytest.mark.parametrize("kernel", ["blocked", "xla"])
def test_values_and_gradients(kernel, shape, window):
    *qkv, direction = inputs(*shape)
    got = of_kernel(qkv, direction, kernel, AttentionRule(window))
    want = exact(qkv, direction, window)
    # With one token gradients of queries and keys are differences of equal terms, as large as the gradient of values.
    check(got, want, np.abs(want[3]).max() if 1 in (shape[1], window) else 0.0)


def of_kernel(qkv, direction, kernel, rule):
    out, pull = jax.vjp(lambda *a: causal_attention(*a, kernel, rule), *(jnp.asarray(a, jnp.float32) for a in qkv))
    return out, *pull(jnp.asarray(direction, jnp.float32))


@pytest.mark.parametrize(
    "shape", [SHAPES[3], *(pytest.param(shape, marks=pytest.mark.slow) for shape in (SHAPES[2], SHAPES[4]))], ids=str
)
def test_capped_scores(shape):
    """Of a cap below the largest scores, in windows."""
    *qkv, direction = inputs(*shape)
    want = exact(qkv, direction, 70, 0.7)
    check(of_kernel(qkv, direction, "auto", AttentionRule(70, 0.7)), want)
    assert np.abs(want[0] - exact(qkv, direction, 70)[0]).max() > 0.05 * np.abs(want[0]).max()


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
    rotation = Rotation(tuple(10_000.0 ** -(np.arange(8) / 8)))
    turned = rotary(jnp.broadcast_to(x, (1, 50, 1, 16)), angles(rotation, 50))[0, :, 0]
    np.testing.assert_allclose(jnp.linalg.norm(turned, axis=-1), jnp.linalg.norm(x), rtol=8 * EPS)
    dots = turned @ turned.T
    np.testing.assert_allclose(dots[0, 10], dots[37, 47], rtol=64 * EPS)


H100 = AttentionDevice("cuda", (9, 0), cudnn=91000)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0), (10, 3)], ids=str)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_cudnn_is_taken_where_the_checks_of_jax_take_it(monkeypatch, capability, dtype):
    """The checks themselves, told that the GPU is another."""
    monkeypatch.setattr(jaxs, "check_compute_capability", lambda least: capability >= version(least))
    monkeypatch.setattr(jaxs, "is_cuda_compute_capability_equal", lambda one: capability == version(one))
    for head_dim in (*range(4, 300, 4), 512):
        for cudnn in (91000, 91100):
            try:
                layout = jaxs.AttentionLayout.BTNH
                one = jax.ShapeDtypeStruct((1, 64, 2, head_dim), jnp.dtype(dtype))
                jaxs.check_layout(one, one, one, None, None, None, None, None, None, None, layout)
                jaxs.check_is_flash_attention(one, one, one, layout.value, cudnn, False, True)
                accepted = True
            except NotImplementedError:
                accepted = False
            assert (not against_cudnn(AttentionDevice("cuda", capability, cudnn), dtype, head_dim)) == accepted


def version(text):
    return tuple(map(int, text.split(".")))


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "said"),
    [
        (H100, "bfloat16", 188, "not cudnn: it needs a head_dim that is a multiple of 8 and at most 256"),  # gpt-12b
        (H100, "bfloat16", 156, "this is 156"),  # gpt-100b
        (AttentionDevice("cuda", (8, 0), 91000), "bfloat16", 136, "at most 128 on compute capability 8.0"),  # gpt-50b
        (AttentionDevice("cuda", (7, 0), 91000), "float16", 128, "needs compute capability 8.0, this is 7.0"),
        (AttentionDevice("cuda", (9, 0)), "bfloat16", 128, "jax finds no cuDNN"),
        (H100, "float32", 128, "it needs bf16 or fp16, this is float32"),
        (AttentionDevice("rocm"), "bfloat16", 128, "it needs an NVIDIA GPU"),
        (AttentionDevice("tpu"), "bfloat16", 128, "not splash: it needs tokamax, which is not installed"),
        (AttentionDevice("tpu", tokamax=True, single_device=False), "bfloat16", 128, "where a stage has one device"),
    ],
)
def test_auto_falls_back_to_blocks_and_says_why(device, dtype, head_dim, said):
    form = choose_form("auto", device, dtype, head_dim, 512)
    assert form.kernel == "blocked"
    assert said in str(form)


def test_auto_takes_the_fused_form_where_it_can_be_had():
    assert str(choose_form("auto", H100, "bfloat16", 128, 512)) == "attention: cudnn"
    tpu = AttentionDevice("tpu", tokamax=True)
    assert str(choose_form("auto", tpu, "bfloat16", 128, 512)) == "attention: splash"
    assert choose_form("auto", tpu, "bfloat16", 128, 500).kernel == "blocked"


def test_what_is_forced_and_cannot_be_had_is_one_line():
    with pytest.raises(UserError, match=r"model.attention = 'cudnn': auto, blocked or xla: .* multiple of 8 .* is 188"):
        choose_form("cudnn", H100, "bfloat16", 188, 512)
    with pytest.raises(UserError, match=r"model.attention = 'splash': .* needs a TPU"):
        causal_attention(*(jnp.zeros((1, 128, 2, 8)) for _ in "qkv"), "splash")


@pytest.mark.parametrize("device", [H100, AttentionDevice("tpu", tokamax=True)], ids=["gpu", "tpu"])
def test_capped_scores_are_blocked_or_refused(device):
    rule, fused = AttentionRule(cap=50.0), "splash" if device.platform == "tpu" else "cudnn"
    assert str(choose_form("auto", device, "bfloat16", 128, 512, rule)) == (
        f"attention: blocked (not {fused}: it has no cap on scores here)"
    )
    for wanted in (fused, "xla"):
        with pytest.raises(UserError) as error:
            choose_form(wanted, device, "bfloat16", 128, 512, rule)
        assert str(error.value) == f"model.attention = '{wanted}': auto or blocked: it has no cap on scores here"


def test_the_form_taken_is_the_one_that_runs(monkeypatch):
    """A GPU in all that the choice asks for; then a TPU with a tokamax that is told what to compute."""
    q, k, v, _ = (jnp.asarray(a, jnp.bfloat16) for a in inputs(1, 128, 2, 2, 188))
    monkeypatch.setattr(compat, "attention_device", lambda device, *, single_device: H100)
    text = str(jax.make_jaxpr(causal_attention)(q, k, v))
    assert "custom_vjp_call" in text  # the blocked form; jax's raises for this head_dim, or stands as its own primitive
    assert "dot_product_attention" not in text
    asked = []

    def fake(q, k, v, **options):
        asked.append(options)
        return q

    monkeypatch.setitem(sys.modules, "tokamax", SimpleNamespace(dot_product_attention=fake))
    tpu = AttentionDevice("tpu", tokamax=True)
    monkeypatch.setattr(compat, "attention_device", lambda device, *, single_device: tpu)
    causal_attention(q, k, v)
    assert asked == [{"is_causal": True, "implementation": "mosaic_tpu"}]


def test_tiles_of_another_size_give_the_same():
    *qkv, direction = (jnp.asarray(a, jnp.float32) for a in inputs(2, 300, 6, 2, 16))
    want, pull_want = jax.vjp(lambda *qkv: causal_attention(*qkv, "blocked"), *qkv)
    out, pull = jax.vjp(lambda *qkv: causal_attention(*qkv, Tiles(170, 170 * 300 * 4)), *qkv)
    for got, exact in zip((out, *pull(direction)), (want, *pull_want(direction)), strict=True):
        np.testing.assert_allclose(got, exact, atol=34 * EPS * float(jnp.abs(exact).max()))


def test_no_blocked_array_of_a_long_sequence_has_all_its_scores():
    """Forward and backward at 8,192 tokens: the plain form has 32 * 8192**2 scores, 32 times as many."""
    one = jax.ShapeDtypeStruct((32, 8192, 128), jnp.bfloat16)
    sizes = tiles("cuda", 8192)
    closed = jax.make_jaxpr(jax.grad(lambda *qkv: blocked_attention(*qkv, sizes).astype(jnp.float32).sum(), (0, 1, 2)))
    assert max(v.aval.size for v in variables(closed(one, one, one).jaxpr)) <= max(sizes.scores, 32 * 8192 * 128)


def variables(jaxpr):
    for eqn in jaxpr.eqns:
        yield from eqn.outvars
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from variables(inner)
