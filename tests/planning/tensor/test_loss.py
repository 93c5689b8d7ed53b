"""The loss in parts of the tokens: the same as of all logits at once, which are never there."""

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.program import arrays, parse

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.tensor import kernel_choice
from axonn_jax.core.tensor.kernel_choice import loss_chunk
from axonn_jax.core.tensor.loss import Projection, cross_entropy, total_loss


@pytest.fixture
def three_parts(monkeypatch):
    """Of a device's 64 tokens with 32 logits each: two of 22 and one of 20."""
    monkeypatch.setattr(kernel_choice, "LOGITS_BYTES", 3000)
    assert loss_chunk(64, 32) == 22


def test_few_logits_are_one_part_and_many_are_equal_ones():
    assert loss_chunk(4096, 4096) == 4096
    assert loss_chunk(8192, 128_256) == 2048
    assert loss_chunk(32_768, 128_256) == 2048


@pytest.mark.parametrize(
    ("model", "axes", "options"),  # a tied table, and a head of its own
    [
        ("gpt", GridShape(1, 1, 2, 2, 2), {}),
        ("llama", GridShape(1, 1, 2, 2, 2), {"layout": {"comm": BlockComm(sequence_split=True)}, "ordered": True}),
        pytest.param(
            "gpt", GridShape(1, 2, 1, 2, 1), {"sub_batches": 2, "reshard_after": "step"}, marks=pytest.mark.slow
        ),
    ],
    ids=["zyx", "split-ordered", "sub-batches"],
)
def test_gradients_of_parts_are_those_of_the_plain_model(three_parts, model, axes, options):
    grids.check_gradients(grids.gradients(grids.MODELS[model], axes, **options), grids.reference(model))


def whole(rows, weight, targets, weights, cap):
    logits = rows @ weight
    return jnp.sum(cross_entropy(cap * jnp.tanh(logits / cap) if cap else logits, targets) * weights)


@pytest.mark.parametrize("cap", [0.0, 3.0])
def test_a_target_counts_as_its_weight_says_and_half_precision_is_summed_in_float32(three_parts, cap):
    draw = np.random.default_rng(0)
    rows, weight = (jnp.asarray(draw.standard_normal(size), jnp.bfloat16) for size in ((64, 16), (16, 32)))
    targets, weights = draw.integers(0, 32, 64, dtype=np.int32), draw.integers(0, 3, 64).astype(np.float32)

    def parts(rows, weight):
        return total_loss(rows, Projection(weight, cap=cap), targets, jnp.asarray(weights)) / 3

    loss, (d_rows, d_weight) = jax.value_and_grad(parts, (0, 1))(rows, weight)
    wide = [jnp.asarray(a, jnp.float32) for a in (rows, weight)]
    want, (want_rows, want_weight) = jax.value_and_grad(whole, (0, 1))(*wide, targets, weights, cap)
    # Logits and their gradients are rounded to bfloat16: half a unit of 2**-8 each, of sums of 16 and 32 terms.
    np.testing.assert_allclose(loss, want / 3, rtol=2**-8)
    for got, exact in ((d_rows, want_rows / 3), (d_weight, want_weight / 3)):
        assert got.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(got, np.float32), exact, atol=2**-6 * float(jnp.abs(exact).max()))


def test_no_array_of_all_logits_is_in_the_compiled_program(three_parts):
    """Neither with gradients nor without."""
    rows, weight = jax.ShapeDtypeStruct((64, 16), jnp.float32), jax.ShapeDtypeStruct((16, 32), jnp.float32)
    targets = jax.ShapeDtypeStruct((64,), jnp.int32)

    def loss(rows, weight, targets):
        return total_loss(rows, Projection(weight), targets)

    for run in (loss, jax.grad(loss, (0, 1))):
        module = parse(jax.jit(run).lower(rows, weight, targets).compile().as_text())
        sizes = [a.elements for c in module.computations.values() for i in c.instructions for a in arrays(i.shape)]
        assert max(sizes) < 64 * 32
