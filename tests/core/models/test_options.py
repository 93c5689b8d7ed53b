"""Options that published families add to a block: counted, priced and computed alike on every grid."""

from dataclasses import replace

import grids
import numpy as np
import pytest
from flax import nnx

from axonn_jax import GridShape, UserError
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.rope import amplitude, frequencies
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import ModelShape, Transformer

QWEN2 = replace(grids.LLAMA, bias="qkv", tied=True)
QWEN3 = replace(grids.LLAMA, heads=8, kv_heads=8, head_dim=12, qk_norm=True)
LLAMA3 = replace(
    grids.LLAMA, kv_heads=16, rope_scaling="llama3", rope_factor=8.0, rope_original_seq_len=8, rope_theta=100.0
)
GEMMA = replace(
    grids.LLAMA, heads=8, kv_heads=8, head_dim=16, norm="rmsnorm_1p", mlp="geglu", embedding_scale=True, tied=True
)
# Caps are as small as the scores and logits of weights that no training has made large.
GEMMA2 = replace(GEMMA, window=5, window_period=2, attention_cap=0.02, logits_cap=0.1, score_dim=24, post_norms=True)
FAMILIES = {
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "llama3": LLAMA3,
    "gemma": GEMMA,
    "gemma2": GEMMA2,
    "arcee": replace(grids.LLAMA, mlp="relu2"),
}
GRIDS = [GridShape(z=2, y=2, x=2), *(pytest.param(GridShape(**{axis: 2}), marks=pytest.mark.slow) for axis in "zyx")]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_by_formula_are_those_of_the_model(family):
    shape = FAMILIES[family]
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    sizes = {name: p.size for name, p in split_module(model).params.items()}
    assert shape.params() == sum(sizes.values())
    halves = [segment for segment in model.segments if segment.layer == "blocks.0"]
    block = sum(size for name, size in sizes.items() if name.startswith("blocks.0."))
    assert sum(segment.params for segment in halves) == block
    matmuls = [size for name, size in sizes.items() if name.startswith("blocks.0.") and name.endswith("kernel")]
    scores = 4 * shape.seq_len**2 * shape.heads * shape.head_dim
    assert sum(segment.flops for segment in halves) == 2 * sum(matmuls) * shape.seq_len + scores
    assert sum(segment.params for segment in model.segments) == shape.params()


@pytest.mark.parametrize("axes", GRIDS, ids=grids.name)
@pytest.mark.parametrize("family", ["qwen3", "gemma", "qwen2", "arcee", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_gradients_are_those_of_one_device(family, axes):
    shape = replace(FAMILIES[family], layers=FAMILIES[family].layer_period)
    grids.check_gradients(grids.gradients(shape, axes), grids.one_device(shape))


@pytest.mark.parametrize(
    ("layout", "options"),
    [
        ({"comm": BlockComm(attention=True, mlp=True)}, {}),
        ({"comm": BlockComm(sequence_split=True)}, {"activations": "full"}),
        ({}, {"activations": "save_collectives", "scanned": True}),
    ],
    ids=["gather", "sequence", "scanned"],
)
def test_norms_of_heads_in_every_layout(layout, options):
    shape = replace(QWEN3, layers=2 if options.get("scanned") else 1)
    got = grids.gradients(shape, GridShape(data=2, y=2, x=2), layout=layout, **options)
    grids.check_gradients(got, grids.one_device(shape))


@pytest.mark.parametrize(
    ("axes", "layout", "options"),
    [
        pytest.param(
            GridShape(y=2, x=2),
            {"comm": BlockComm(attention=True, mlp=True)},
            {"activations": "save_collectives"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            GridShape(data=2, y=2),
            {"comm": BlockComm(sequence_split=True)},
            {"activations": "dots"},
            marks=pytest.mark.slow,
        ),
        (GridShape(z=2, y=2), {}, {"activations": "full", "scanned": True}),
    ],
    ids=["gather", "sequence", "scanned"],
)
def test_caps_and_windows_by_layer_in_every_layout(axes, layout, options):
    shape = replace(GEMMA2, layers=4 if options.get("scanned") else 2)
    got = grids.gradients(shape, axes, layout=layout, **options)
    grids.check_gradients(got, grids.one_device(shape))


# Of transformers' ROPE_INIT_FUNCTIONS for head_dim 16 and theta 10,000, whose tables are float32.
SLOW = [0.00125, 0.00039528473, 0.00012500001, 3.9528473e-05]
TABLES = {
    "linear": (
        {"rope_scaling": "linear", "rope_factor": 4.0},
        [0.25, 0.079056941, 0.025, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
        1.0,
    ),
    "llama3": (
        {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_seq_len": 64},
        [1.0, 0.24438459, 0.013042256, 0.0039528473, *SLOW],
        1.0,
    ),
    "yarn": (
        {"rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_seq_len": 64},
        [1.0, 0.23717082, 0.049999997, 0.0079056947, 0.0024999999, 0.00079056947, 0.00025000001, 7.9056947e-05],
        1.138629436111989,
    ),
}


@pytest.mark.parametrize("scaling", TABLES)
def test_frequencies_are_those_of_transformers(scaling):
    rope, table, factor = TABLES[scaling]
    shape = replace(grids.LLAMA, head_dim=16, **rope)
    np.testing.assert_allclose(frequencies(shape), table, rtol=2 * grids.EPS)
    assert amplitude(shape) == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"head_dim": 5}, "model.head_dim = 5: an even number"),
        ({"head_dim": 0}, "model.head_dim = 0: an integer of at least 1"),
        ({"bias": "some"}, "model.bias = 'some': one of all, qkv, none"),
        ({"rope_scaling": "dynamic"}, "model.rope_scaling = 'dynamic': one of none, linear, llama3, yarn"),
        ({"rope_scaling": "linear", "rope_factor": -1.0}, "model.rope_factor = -1.0: a finite number above 0"),
        ({"rope_scaling": "llama3", "rope_factor": 8.0}, "model.rope_original_seq_len = 0: the tokens of"),
        (
            {"rope_scaling": "llama3", "rope_original_seq_len": 8, "rope_high_freq_factor": 1.0},
            "model.rope_high_freq_factor = 1.0: a number above model.rope_low_freq_factor = 1.0",
        ),
        (
            {"rope_scaling": "yarn", "rope_original_seq_len": 8, "rope_beta_fast": 0.5},
            "model.rope_beta_fast = 0.5: a number above model.rope_beta_slow = 1.0",
        ),
        ({"window_period": 2}, "model.window_period = 2: at least 2, with model.window above 0"),
        ({"window_period": 1, "window": 4}, "model.window_period = 1: at least 2"),
        ({"attention_cap": -1.0}, "model.attention_cap = -1.0: a finite number of at least 0"),
        ({"logits_cap": float("nan")}, "model.logits_cap = nan: a finite number of at least 0"),
        ({"score_dim": 0}, "model.score_dim = 0: an integer of at least 1"),
        ({"score_dim": 5, "positions": "learned"}, "model.score_dim = 5: left out where positions are learned"),
        ({"post_norms": True, "experts": 4}, "model.post_norms = True: false in a model with model.experts"),
        ({"rope_scaling": "linear", "positions": "learned"}, "model.rope_scaling = 'linear': none where positions are"),
    ],
)
def test_what_contradicts_itself_is_one_line(given, fault):
    with pytest.raises(UserError) as error:
        replace(grids.LLAMA, **given)
    assert str(error.value).startswith(fault)
    assert "\n" not in str(error.value)


def test_a_head_dim_that_is_left_out_follows_the_other_sizes():
    assert replace(grids.LLAMA, heads=8, kv_heads=8).head_dim == 8
    assert replace(QWEN3, hidden=128).head_dim == 12
    assert ModelShape(1, 30, 4, 2, 8, 8, 8, head_dim=6, positions="rope").qkv_width == 48
