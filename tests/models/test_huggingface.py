"""Models of every family give the logits, loss and gradients that Hugging Face transformers (PyTorch) gave."""

import functools
import json
import runpy
from dataclasses import replace
from functools import partial
from pathlib import Path

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax.errors import UserError
from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.inference.forward import logits
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface import from_huggingface, shape_from_config, to_huggingface
from axonn_jax.models.huggingface.families import config_from_shape
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.params import split_module
from axonn_jax.train.engines.program import StageProgram

ROOT = Path(__file__).resolve().parents[2]
DENSE = ("gpt2", "llama", "llama3", "mistral", "qwen2", "qwen3", "gemma", "arcee")
FAMILIES = (*DENSE, "mixtral", "qwen3_moe", "qwen3_moe_sparse")
ROUTED = FAMILIES[-3:]
UNBALANCED = MoeConfig(balance_weight=0.0)  # as transformers, whose loss is the tokens' alone
VARIANTS = {"llama_linear": "llama3", "llama_yarn": "llama3"}  # to the model that they are but for one option
ONE, ALL = GridShape(), GridShape(z=2, y=2, x=2)
EACH = [GridShape(y=2), GridShape(x=2), GridShape(z=2)]
DATA = [GridShape(data=2, y=2, x=2), GridShape(data=2, z=4), GridShape(data=2, z=2, y=2), GridShape(x=8)]
EXPERT = [GridShape(expert=2), GridShape(expert=2, y=2)]
QUICK = [("mixtral", ONE), ("qwen3_moe_sparse", EXPERT[1])]
PIPE = [GridShape(pipe=2), GridShape(pipe=2, z=2, y=2)]


def cases(every, *more, routed=QUICK):
    """Families on grids: all on those of `every`, `more` of them on each axis by itself too; the rest is slow.

    Of those with experts `routed` are compared, each on one grid.
    """
    made = []
    for family in FAMILIES:
        more_axes = DATA if family in ("gpt2", "llama") else EXPERT if family in ROUTED else []
        for axes in [ONE, ALL, *EACH, *more_axes]:
            usual = axes in every or (axes in (ALL, *EACH) and family in more)
            if family in ROUTED:
                usual = (family, axes) in routed
            marks = [] if usual else [pytest.mark.slow]
            made.append(pytest.param(family, axes, id=f"{family}-e{axes.expert}{grids.name(axes)}", marks=marks))
    return made


EPS = float(np.finfo(np.float32).eps)
# Both sides are float32 and each sums in an order of its own. An entry's error is that of a sum of n terms, which
# grows as sqrt(n) ulp of the partial sums (n eps at worst), behind some 20 roundings on the way through two blocks;
# relative to the largest entry of the tensor, since a small entry is a sum of large terms that cancel.
# Logits contract at most 48 features: 4 * sqrt(48) = 28 eps = 3.3e-6 (measured: 11 eps).
LOGITS_TOLERANCE = 28 * EPS
# A parameter's gradient sums over 8 sequences of 16 or 24 tokens: 4 * sqrt(128) = 45 eps = 5.4e-6 (measured: 28 eps).
GRADIENT_TOLERANCE = 45 * EPS
# With experts the stored float32 gradients are themselves up to 37 eps from the same model's in float64 (llama3's: 10):
# routers' scores are made large. So may ours be, and the two differ by both (measured: 57 eps).
ROUTED_TOLERANCE = 2 * 37 * EPS
# The loss is a mean over all tokens, in which the roundings of single tokens average out (measured: 1.5 eps).
LOSS_TOLERANCE = 4 * EPS


@functools.cache
def stored(family: str) -> dict[str, np.ndarray]:
    with np.load(ROOT / f"tests/fixtures/huggingface_{family}.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def fixture(family: str) -> dict[str, np.ndarray]:
    """What is stored; a variant's weights and tokens are those of the model that it is a variant of."""
    return (stored(VARIANTS[family]) if family in VARIANTS else {}) | stored(family)


def config(family: str) -> dict:
    return json.loads(str(fixture(family)["config"]))


def under(family: str, prefix: str) -> dict[str, np.ndarray]:
    return {key.removeprefix(prefix): a for key, a in fixture(family).items() if key.startswith(prefix)}


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference, relative to the largest entry."""
    assert got.shape == want.shape
    assert got.dtype == want.dtype
    return float(np.max(np.abs(got.astype(np.float64) - want)) / np.max(np.abs(want)))


def build(family: str, axes: GridShape) -> tuple[StageProgram, dict[str, jax.Array], ModelShape]:
    """The program on a grid, and Hugging Face's weights laid out over it."""
    shape, grid = shape_from_config(config(family)), grids.lay(axes)
    shape.check_grid(axes)
    with jax.set_mesh(grid.mesh):
        parts = split_module(Transformer(shape, rngs=nnx.Rngs(0), moe=UNBALANCED))
    program = StageProgram(parts, grid, jnp.dtype("float32"))
    weights = from_huggingface(under(family, "weights/"), shape)
    assert weights.keys() == parts.params.keys()
    assert {k: a.shape for k, a in weights.items()} == {k: a.shape for k, a in parts.params.items()}
    return program, jax.device_put(weights, program.shardings()), shape


def check_logits(family, axes):
    program, params, _ = build(family, axes)
    scores = jax.jit(partial(logits, program.parts, program.grid.mesh))(params, fixture(family)["tokens"][:, :-1])
    assert error(np.asarray(scores), fixture(family)["logits"]) <= LOGITS_TOLERANCE


@pytest.mark.parametrize(("family", "axes"), cases((ONE,), "qwen3", routed=QUICK[:1]))
def test_logits(family, axes):
    check_logits(family, axes)


@pytest.mark.parametrize("family", VARIANTS)
def test_logits_of_variants(family):
    check_logits(family, ONE)


def check_gradients(family, shape, grads, loss, norm):
    """Compares with the fixture; `grads` are numpy arrays by this package's names."""
    want = under(family, "gradients/")
    want_loss = float(fixture(family)["loss"])
    want_norm = sum(float(np.sum(g.astype(np.float64) ** 2)) for g in want.values()) ** 0.5
    assert abs(float(loss) - want_loss) <= LOSS_TOLERANCE * want_loss
    assert abs(float(norm) - want_norm) <= GRADIENT_TOLERANCE * want_norm
    got = to_huggingface({name: g * (not grids.is_load(name)) for name, g in grads.items()}, shape)
    assert got.keys() == want.keys()
    tolerance = ROUTED_TOLERANCE if family in ROUTED else GRADIENT_TOLERANCE
    for name, g in got.items():
        assert error(g, want[name]) <= tolerance, f"{name}: {error(g, want[name]) / EPS:.0f} eps"


@pytest.mark.parametrize(("family", "axes"), cases((ONE, ALL), "llama", "qwen3"))
def test_loss_and_every_gradient(family, axes):
    program, params, shape = build(family, axes)
    tokens = fixture(family)["tokens"]
    microbatches = 2 if axes.batch_shards <= 4 else 1
    batch = jax.device_put(tokens.reshape(microbatches, -1, tokens.shape[1]), program.batch_sharding())
    grads, loss, norm = jax.jit(program.gradients)(params, batch, None)
    check_gradients(family, shape, {name: np.asarray(g) for name, g in grads.items()}, loss, norm)


@pytest.mark.parametrize(
    ("family", "axes"),
    [
        pytest.param(family, axes, id=f"{family}-pipe{axes.pipe}{grids.name(axes)}", marks=marks)
        for axes in PIPE
        for family in FAMILIES
        for marks in [[] if axes == PIPE[0] and family in ("mistral", "qwen3", "gemma") else [pytest.mark.slow]]
    ],
)
def test_pipeline(family, axes):
    """The optimizer keeps the gradients as its state and changes no weight."""
    shape, grid = shape_from_config(config(family)), grids.lay(axes)
    parts = split_module(nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), moe=UNBALANCED)))
    model = parts.merge({k: jnp.asarray(a) for k, a in from_huggingface(under(family, "weights/"), shape).items()})
    keep = optax.chain(optax.trace(decay=0.0), optax.scale(1e-30))
    trainer = make_trainer(model, keep, grid, microbatches=2)
    metrics = trainer.step(fixture(family)["tokens"])
    grads = {}
    for state in trainer.engine.opt_state.values():
        grads |= {name: np.asarray(g) for name, g in state[0].trace.items()}
    trainer.close()
    check_gradients(family, shape, grads, metrics["loss"], metrics["grad_norm"])


@pytest.mark.parametrize("family", FAMILIES)
def test_fixture_feels_every_parameter(family):
    """No parameter at a value that would hide it, no gradient so small that a wrong one would pass."""
    weights, gradients = under(family, "weights/"), under(family, "gradients/")
    assert weights.keys() == gradients.keys()
    shape = shape_from_config(config(family))
    biases = 0 if shape.moe is None else shape.experts * shape.moe.routed_layers(shape.layers)  # of routers: not theirs
    assert sum(a.size for a in weights.values()) == shape.params() - biases
    for name, value in weights.items():
        assert value.dtype == gradients[name].dtype == np.float32
        neutral = 1.0 if value.ndim == 1 and name.endswith("weight") and family != "gemma" else 0.0
        assert np.sqrt(np.mean((value - neutral) ** 2)) > 0.1, name
        assert np.max(np.abs(gradients[name])) > 0.01, name


@pytest.mark.parametrize("kind", ["weights/", "gradients/"])
@pytest.mark.parametrize("family", FAMILIES)
def test_round_trip_is_bitwise(family, kind):
    shape, theirs = shape_from_config(config(family)), under(family, kind)
    ours = from_huggingface(theirs, shape)
    back = to_huggingface(ours, shape)
    assert back.keys() == theirs.keys()
    again = from_huggingface(back, shape)
    assert list(again) == list(ours)
    for want, got in ((theirs, back), (ours, again)):
        for name in want:
            assert got[name].dtype == want[name].dtype, name
            assert got[name].shape == want[name].shape, name
            assert got[name].flags.c_contiguous, name
            assert got[name].tobytes() == want[name].tobytes(), name


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_dtype_is_kept(dtype):
    theirs = {name: a.astype(jnp.dtype(dtype)) for name, a in under("llama", "weights/").items()}
    ours = from_huggingface(theirs, shape_from_config(config("llama")))
    assert {a.dtype for a in ours.values()} == {jnp.dtype(dtype)}


def test_queries_keys_and_values_are_grouped_by_kv_head():
    """Each column is labelled 100 * kind + head * head_dim + feature, so the order can be read off."""
    shape = shape_from_config(config("llama"))
    kinds = {"q_proj": (0, shape.heads), "k_proj": (100, shape.kv_heads), "v_proj": (200, shape.kv_heads)}
    state = under("llama", "weights/")
    for name, (base, heads) in kinds.items():
        labels = base + np.arange(heads * shape.head_dim, dtype=np.float32)
        state[f"model.layers.0.self_attn.{name}.weight"] = np.repeat(labels[:, None], shape.hidden, 1)
    first_row = from_huggingface(state, shape)["blocks.0.attention.qkv.kernel"][0]
    group0 = [*range(24), *range(100, 108), *range(200, 208)]
    group1 = [*range(24, 48), *range(108, 116), *range(208, 216)]
    assert first_row.tolist() == [*group0, *group1]


def test_files_without_prefix_and_with_buffers_and_the_tied_head_are_read():
    shape, theirs = shape_from_config(config("gpt2")), under("gpt2", "weights/")
    bare = {name.removeprefix("transformer."): a for name, a in theirs.items()}
    bare["h.0.attn.bias"] = np.ones((1, 1, 16, 16), bool)
    bare["h.1.attn.masked_bias"] = np.float32(-1e4)
    bare["lm_head.weight"] = bare["wte.weight"].copy()
    want, got = from_huggingface(theirs, shape), from_huggingface(bare, shape)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], want[name]) for name in want)


def test_untied_gpt2_and_tied_llama():
    gpt2, llama = shape_from_config(config("gpt2")), shape_from_config(config("llama"))
    head = np.ones((gpt2.vocab, gpt2.hidden), np.float32)
    untied = from_huggingface(under("gpt2", "weights/") | {"lm_head.weight": head}, replace(gpt2, tied=False))
    assert untied["head.kernel"].shape == (gpt2.hidden, gpt2.vocab)
    state = under("llama", "weights/")
    del state["lm_head.weight"]
    assert "head.kernel" not in from_huggingface(state, replace(llama, tied=True))


def refusal(call, *arguments) -> UserError:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return caught.value


def test_bad_states_are_refused():
    shape, theirs = shape_from_config(config("gpt2")), under("gpt2", "weights/")
    ours = from_huggingface(theirs, shape)
    wpe = theirs["transformer.wpe.weight"]

    missing = {name: a for name, a in theirs.items() if name != "transformer.wpe.weight"}
    assert refusal(from_huggingface, missing, shape).field == "tensor transformer.wpe.weight"
    short = refusal(from_huggingface, theirs | {"transformer.wpe.weight": wpe[:8]}, shape)
    assert (short.field, short.value, short.accepted) == ("shape of transformer.wpe.weight", (8, 32), "(16, 32)")
    extra = refusal(from_huggingface, theirs | {"transformer.h.2.ln_1.bias": wpe[0]}, shape)
    assert extra.value == "transformer.h.2.ln_1.bias"
    head = refusal(from_huggingface, theirs | {"lm_head.weight": 2 * theirs["transformer.wte.weight"]}, shape)
    assert head.field == "tie_word_embeddings"

    assert refusal(to_huggingface, ours | {"blocks.2.mlp.up.bias": wpe[0]}, shape).value == "blocks.2.mlp.up.bias"
    assert refusal(to_huggingface, {}, shape).field == "parameter embedding.table"
    assert refusal(to_huggingface, ours | {"norm.shift": wpe}, shape).field == "shape of norm.shift"


@pytest.mark.parametrize(
    ("changes", "field"),
    [({"norm": "rmsnorm"}, "model"), ({"bias": False}, "model"), ({"kv_heads": 2}, "model.kv_heads")],
)
def test_shapes_of_neither_family_are_refused(changes, field):
    shape = replace(shape_from_config(config("gpt2")), **changes)
    assert refusal(to_huggingface, {}, shape).field == field
    assert refusal(from_huggingface, {}, shape).field == field


def test_layers_with_experts_both_ways():
    """Layers that `decoder_sparse_step` cannot say are those that `mlp_only_layers` leaves."""
    base = config("qwen3_moe") | {"num_hidden_layers": 6}
    for fields, want in (
        ({"decoder_sparse_step": 2}, (2, 1)),
        ({"mlp_only_layers": [1, 3, 5]}, (2, 0)),
        ({"mlp_only_layers": [0, 2, 3, 5]}, (3, 1)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [1, 5]}, (6, 3)),
        ({"mlp_only_layers": [0]}, (1, 1)),
        ({"mlp_only_layers": [0, 1, 3, 5]}, (2, 2)),
    ):
        shape = shape_from_config(base | fields)
        assert (shape.moe_every, shape.moe_first) == want
        assert shape_from_config(config_from_shape(shape, "float32", 0)) == shape


def test_what_no_family_with_experts_has_is_refused():
    shape = shape_from_config(config("mixtral"))
    for changes in (
        {"shared_experts": 1},
        {"router": "sigmoid"},
        {"router_norm": False},
        {"moe_every": 2},
        {"mlp": "gelu"},
        {"router_scale": 2.0},
    ):
        assert refusal(config_from_shape, replace(shape, **changes), "float32", 0).field == "model"
    own = replace(shape, ffn=64, expert_ffn=24)  # of layers that are not there
    assert config_from_shape(own, "float32", 0)["intermediate_size"] == shape.expert_ffn
    ours = from_huggingface(under("mixtral", "weights/"), shape)
    moved = ours | {"blocks.1.mlp.router.bias": np.ones(shape.experts, np.float32)}
    caught = refusal(to_huggingface, moved, shape)
    assert (caught.field, caught.value) == ("parameter blocks.1.mlp.router.bias", "not 0")


def test_shapes_of_the_fixtures():
    assert shape_from_config(config("gpt2")) == ModelShape(2, 32, 4, 4, 48, 56, 16, norm_eps=1e-3)
    llama = ModelShape(
        2, 48, 6, 2, 40, 56, 16,
        positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False, norm_eps=1e-3, rope_theta=100.0,
    )  # fmt: skip
    assert shape_from_config(config("llama")) == llama
    small = replace(llama, hidden=32, heads=4, ffn=36, vocab=40, seq_len=24)
    wide = replace(small, hidden=28, head_dim=12)
    scaled = replace(small, rope_factor=4.0)
    long = replace(scaled, rope_original_seq_len=16)
    want = {
        "llama3": replace(long, rope_scaling="llama3", rope_low_freq_factor=0.5, rope_high_freq_factor=2.0),
        "llama_linear": replace(scaled, rope_scaling="linear"),
        "llama_yarn": replace(long, rope_scaling="yarn", rope_beta_fast=2.0, rope_beta_slow=0.2),
        "mistral": replace(small, hidden=28, heads=6, head_dim=8, window=6),
        "qwen2": replace(small, bias="qkv", tied=True),
        "qwen3": replace(wide, qk_norm=True),
        "gemma": replace(wide, norm="rmsnorm_1p", mlp="geglu", embedding_scale=True, tied=True),
        "arcee": replace(small, mlp="relu2"),
        "mixtral": replace(small, hidden=28, heads=6, head_dim=8, ffn=24, expert_ffn=24, window=6, experts=4),
        "qwen3_moe": replace(wide, qk_norm=True, experts=4, expert_ffn=24),
        "qwen3_moe_sparse": replace(
            wide,
            qk_norm=True,
            experts=6,
            experts_per_token=3,
            expert_ffn=16,
            moe_every=2,
            moe_first=1,
            router_norm=False,
        ),
    }
    for family, shape in want.items():
        assert shape_from_config(config(family)) == shape, family


def test_fields_left_out_take_the_defaults_of_transformers():
    sizes = {"n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 16, "n_positions": 4}
    assert shape_from_config({"model_type": "gpt2", **sizes, "n_inner": None}) == ModelShape(1, 8, 2, 2, 32, 16, 4)
    llama = {
        "model_type": "llama", "num_hidden_layers": 1, "hidden_size": 8, "num_attention_heads": 2,
        "intermediate_size": 12, "vocab_size": 16, "max_position_embeddings": 4,
    }  # fmt: skip
    want = ModelShape(
        1, 8, 2, 2, 12, 16, 4,
        positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False, norm_eps=1e-6,
    )  # fmt: skip
    assert shape_from_config(llama) == want
    # transformers 4 wrote the base beside an empty rope_scaling
    old = llama | {"rope_theta": 5e5, "rope_scaling": None}
    assert shape_from_config(old) == replace(want, rope_theta=5e5)


@pytest.mark.parametrize(
    ("family", "changes", "field", "value"),
    [
        ("gpt2", {"model_type": "gpt_neox"}, "config.model_type", "gpt_neox"),
        ("gpt2", {"model_type": None}, "config.model_type", None),
        ("gpt2", {"activation_function": "relu"}, "config.activation_function", "relu"),
        ("gpt2", {"activation_function": "gelu"}, "config.activation_function", "gelu"),
        ("gpt2", {"scale_attn_weights": False}, "config.scale_attn_weights", False),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "config.scale_attn_by_inverse_layer_idx", True),
        ("gpt2", {"add_cross_attention": True}, "config.add_cross_attention", True),
        ("gpt2", {"quantization_config": {"bits": 4}}, "config.quantization_config", {"bits": 4}),
        ("gpt2", {"n_layer": None}, "config.n_layer", None),
        ("gpt2", {"n_embd": "32"}, "config.n_embd", "32"),
        ("gpt2", {"n_head": True}, "config.n_head", True),
        ("gpt2", {"n_head": 5}, "model.heads", 5),
        ("gpt2", {"layer_norm_epsilon": 0}, "config.layer_norm_epsilon", 0),
        ("gpt2", {"tie_word_embeddings": "yes"}, "config.tie_word_embeddings", "yes"),
        ("llama", {"hidden_act": "gelu_new"}, "config.hidden_act", "gelu_new"),
        ("llama", {"attention_bias": True}, "config.attention_bias", True),
        ("llama", {"mlp_bias": True}, "config.mlp_bias", True),
        ("llama", {"head_dim": 15}, "model.head_dim", 15),
        ("llama", {"num_attention_heads": None}, "config.num_attention_heads", None),
        ("llama", {"num_key_value_heads": 4}, "model.kv_heads", 4),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "config.rope_scaling.type", "dynamic"),
        ("llama", {"rope_scaling": {"rope_type": "default", "factor": 2.0}}, "config.rope_scaling.factor", 2.0),
        ("llama", {"rope_scaling": {"rope_type": "llama3"}}, "config.rope_scaling.factor", None),
        ("llama", {"rope_scaling": "linear"}, "config.rope_scaling", "linear"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "config.rope_parameters.rope_type", "longrope"),
        (
            "llama",
            {"rope_parameters": {"partial_rotary_factor": 0.5}},
            "config.rope_parameters.partial_rotary_factor",
            0.5,
        ),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, "config.rope_parameters.rope_theta", -1.0),
        ("llama", {"partial_rotary_factor": 0.5}, "config.partial_rotary_factor", 0.5),
        ("llama", {"num_experts": 4}, "config.num_experts", 4),
        ("mixtral", {"router_jitter_noise": 0.1}, "config.router_jitter_noise", 0.1),
        ("mixtral", {"num_experts": 8}, "config.num_experts", 8),
        ("mixtral", {"num_local_experts": 0}, "config.num_local_experts", 0),
        ("mixtral", {"num_experts_per_tok": 5}, "model.experts_per_token", 5),
        ("qwen3_moe", {"decoder_sparse_step": 3}, "config.decoder_sparse_step", 3),
        ("qwen3_moe", {"mlp_only_layers": [0, 1]}, "config.mlp_only_layers", [0, 1]),
        ("qwen3_moe", {"num_hidden_layers": 4, "mlp_only_layers": [2]}, "config.mlp_only_layers", [2]),
        ("qwen3_moe", {"mlp_only_layers": "0"}, "config.mlp_only_layers", "0"),
        ("qwen3_moe", {"norm_topk_prob": 1}, "config.norm_topk_prob", 1),
        ("qwen3_moe", {"attention_bias": True}, "config.attention_bias", True),
        (
            "qwen3_moe",
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "config.max_window_layers",
            1,
        ),
    ],
)
def test_unsupported_configs_are_refused(family, changes, field, value):
    caught = refusal(shape_from_config, config(family) | changes)
    assert (caught.field, caught.value) == (field, value)


@pytest.mark.filterwarnings("ignore")  # torch's and transformers' own
@pytest.mark.parametrize("family", [*FAMILIES, *VARIANTS])
def test_the_script_makes_the_fixture_again(family):
    for module in ("torch", "transformers"):
        pytest.importorskip(module, reason=f"{module} is not installed; scripts/oracle/huggingface needs it")
    made = runpy.run_path(str(ROOT / "scripts/oracle/huggingface"))["make"](family)
    assert made.keys() == stored(family).keys()
    changing = {"versions", "config"}  # transformers may add fields to a config
    assert shape_from_config(json.loads(str(made["config"]))) == shape_from_config(config(family))
    for name in made.keys() - changing:
        if name == "tokens" or name.startswith("weights/"):
            np.testing.assert_array_equal(made[name], stored(family)[name], err_msg=name)
        else:  # another CPU or torch sums in another order
            assert error(made[name], stored(family)[name]) <= GRADIENT_TOLERANCE, name
