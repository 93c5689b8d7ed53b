"""Sizes by formula against counting: parameters of the real model, FLOPs of its traced program, published figures."""

import re
from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.declared.transformer import describe_single_device
from axonn_jax.core.ops.costs import forward_flops, parameters
from axonn_jax.core.options import DERIVED
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import Transformer, preset, preset_names


def abstract(shape):
    return split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))).params


@pytest.mark.parametrize("name", preset_names())
def test_parameters_of_every_preset_equal_counting_without_allocating(name):
    shape = preset(name)
    # The first two blocks are all kinds that there are; the deepest presets are counted from them.
    shallow = preset(name, layers=2)
    params = abstract(shallow)
    assert all(isinstance(p, jax.ShapeDtypeStruct) for p in params.values())
    assert sum(p.size for p in params.values()) == shallow.params()
    blocks = sum(p.size for key, p in params.items() if key.startswith("blocks."))
    assert 2 * shape.params() == 2 * shallow.params() + (shape.layers - 2) * blocks


def test_a_5b_preset_is_initialised_abstractly_in_full():
    params = abstract(preset("gpt-5b"))
    assert sum(p.size for p in params.values()) == preset("gpt-5b").params() == 5_051_228_160


PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3-405b": 405_853_388_800,
    "gemma2-2b": 2_614_341_888,
    "gemma2-9b": 9_241_705_984,
    "gemma2-27b": 27_227_128_320,
    "mixtral-8x7b": 46_702_792_704 + 32 * 8,  # and the bias of every router, which the published model has not
    "qwen3-30b-a3b": 30_532_122_624 + 48 * 128,
    "qwen3-235b-a22b": 235_093_634_560 + 94 * 128,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_equal_the_published_count(name):
    assert preset(name).params() == PUBLISHED[name]


@pytest.mark.parametrize(
    ("name", "active"), [("mixtral-8x7b", 12.88e9), ("qwen3-30b-a3b", 3.353e9), ("qwen3-235b-a22b", 22.19e9)]
)
def test_active_parameters_equal_the_published_count(name, active):
    assert preset(name).params(active=True) == pytest.approx(active, rel=5e-4)


@pytest.mark.parametrize("size", ["1.3b", "2.7b", "6.7b", "13b"])
def test_blocks_with_16_experts_are_six_times_the_base(size):
    """TED section 3: (2/3 + E/3) times the parameters, without biases, norms and routers, below 0.05% together."""
    shape = preset(f"ted-{size}-16e")
    blocks = sum(layer.count * parameters(layer) for layer in describe_single_device(shape) if layer.in_block)
    assert blocks == pytest.approx((2 / 3 + 16 / 3) * 12 * shape.layers * shape.hidden**2, rel=5e-4)


@pytest.mark.parametrize(("name", "flops"), [("gpt-5b", 7.237e17), ("gpt-20b", 2.811e18), ("gpt-80b", 1.056e19)])
def test_flops_equal_the_published_formula(name, flops):
    """SC 24: B=8192, S=2048, V=51200, recomputation included; four published digits."""
    assert preset(name).step_flops(8192, recompute=True) == pytest.approx(flops, rel=5e-4)
    s = preset(name)
    b, n, h, layers, v = 8192, s.seq_len, s.hidden, s.layers, s.vocab
    formula = 96 * b * n * layers * h**2 * (1 + n / (6 * h) + v / (16 * layers * h))
    assert s.step_flops(8192, recompute=True) == pytest.approx(formula, rel=1e-12)


def matmul_flops(jaxpr):
    """FLOPs of every dot_general of a traced program, scans multiplied out."""
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params.get("length", 1) if eqn.primitive.name == "scan" else 1
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                total += times * matmul_flops(inner)
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            left = eqn.invars[0].aval.shape
            depth = 1
            for dim in contracted:
                depth *= left[dim]
            total += 2 * eqn.outvars[0].aval.size * depth
    return total


@pytest.mark.parametrize("model", grids.MODELS)
def test_flops_equal_counting_the_traced_program(model):
    shape = grids.MODELS[model]
    # The plain kernel: the blocked one leaves out masked scores and computes the others twice.
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), attention="xla")))
    batch = jax.ShapeDtypeStruct((3, shape.seq_len + 1), jnp.int32)

    def loss(params, tokens):
        return parts.merge(params).loss(tokens[:, :-1], tokens[:, 1:])

    forward = matmul_flops(jax.make_jaxpr(loss)(parts.params, batch).jaxpr)
    step = matmul_flops(jax.make_jaxpr(jax.grad(loss))(parts.params, batch).jaxpr)
    declared = sum(layer.count * forward_flops(layer, shape.seq_len) for layer in describe_single_device(shape))
    assert forward == 3 * declared
    assert step == shape.step_flops(3)


@pytest.mark.parametrize("axis", ["z", "y", "x"])
@pytest.mark.parametrize("shape", [*grids.MODELS.values(), grids.SPARSE, replace(grids.GPT, ffn=44)])
def test_sizes_of_an_axis_that_an_error_names_are_accepted(shape, axis):
    with pytest.raises(UserError, match="; or ") as error:
        shape.check_grid(GridShape(**{axis: 31}))
    for size in str(error.value).rpartition(" one of ")[2].split(", "):
        shape.check_grid(GridShape(**{axis: int(size)}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, r"model.heads = 5: a divisor of hidden \(32\); the nearest is 4"),
        ({"kv_heads": 3}, r"model.kv_heads = 3: a divisor of heads \(8\); the nearest is 2"),
        ({"layers": 0}, "model.layers = 0: an integer of at least 1"),
        ({"dropout": 1.0}, "model.dropout = 1.0"),
        ({"hidden": "64", "head_dim": DERIVED}, "model.hidden = '64': an integer"),
        ({"ffn": None, "expert_ffn": DERIVED}, "model.ffn = None: an integer"),
        ({"vocab": np.ones(3)}, r"model.vocab = \[1. 1. 1.\]: an integer"),
        ({"norm": np.ones(3)}, r"model.norm = \[1. 1. 1.\]: one of"),
        (
            {"layers": 1, "experts": 4, "moe_every": 2, "moe_first": 1},
            "model.moe_first = 1: an integer below model.layers = 1",
        ),
        ({"norm": "batchnorm"}, "model.norm = 'batchnorm': one of layernorm, rmsnorm"),
        ({"heads": 32, "kv_heads": 32, "positions": "rope"}, "model.heads = 32: rotary"),
    ],
)
def test_impossible_sizes_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(grids.GPT, **change)


def test_an_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match=re.escape("did you mean 'gpt-80b'?")):
        preset("gpt-80")


def test_a_wrong_type_is_one_line():
    for says, make in {
        "name = None: a text": lambda: preset(None),
        "rngs = 0: an instance of Rngs": lambda: Transformer(grids.GPT, rngs=0),
        "shape = 'gpt2': an ax.models.ModelShape": lambda: Transformer("gpt2", rngs=nnx.Rngs(0)),
        "moe = None: an ax.MoeConfig": lambda: Transformer(grids.GPT, rngs=nnx.Rngs(0), moe=None),
        "attention = 'cudn': .*'cudnn'?": lambda: Transformer(grids.GPT, rngs=nnx.Rngs(0), attention="cudn"),
    }.items():
        with pytest.raises(UserError, match=f"^{says}"):
            make()
