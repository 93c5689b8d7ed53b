"""Configs and states of Hugging Face: the way there and back, and what is refused."""

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_fixtures import FAMILIES, config, under

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.entries import from_huggingface, to_huggingface
from axonn_jax.files.huggingface.families import config_from_shape, shape_from_config


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


def test_settings_of_attention_in_gemma2():
    sizes, tags = config("gemma2"), ["sliding_attention", "full_attention"]
    shape = shape_from_config(sizes)
    assert shape_from_config(config_from_shape(shape, "float32", 0)) == shape
    short = {key: value for key, value in sizes.items() if "capping" not in key and key != "query_pre_attn_scalar"}
    want = replace(shape, attention_cap=50.0, logits_cap=30.0, score_dim=256)
    assert shape_from_config(short) == want
    assert shape_from_config(sizes | {"final_logit_softcapping": None, "layer_types": None}).logits_cap == 0.0
    for field, value in (
        ("layer_types", tags[::-1]),
        ("layer_types", tags[:1] * 2),
        ("sliding_window", None),
        ("attn_logit_softcapping", -1.0),
        ("query_pre_attn_scalar", 0),
    ):
        assert refusal(shape_from_config, sizes | {field: value}).field == f"config.{field}"
    for changes in ({"window_period": 3}, {"window_period": 0}, {"post_norms": False}, {"embedding_scale": False}):
        assert refusal(config_from_shape, replace(shape, **changes), "float32", 0).field == "model"
    gemma = shape_from_config(config("gemma"))
    for changes in ({"attention_cap": 1.0}, {"logits_cap": 1.0}, {"score_dim": 18}):
        assert refusal(config_from_shape, replace(gemma, **changes), "float32", 0).field == "model"


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
    gemma = replace(wide, norm="rmsnorm_1p", mlp="geglu", embedding_scale=True, tied=True)
    caps = {"attention_cap": 1.0, "logits_cap": 2.0}
    want = {
        "llama3": replace(long, rope_scaling="llama3", rope_low_freq_factor=0.5, rope_high_freq_factor=2.0),
        "llama_linear": replace(scaled, rope_scaling="linear"),
        "llama_yarn": replace(long, rope_scaling="yarn", rope_beta_fast=2.0, rope_beta_slow=0.2),
        "mistral": replace(small, hidden=28, heads=6, head_dim=8, window=6),
        "qwen2": replace(small, bias="qkv", tied=True),
        "qwen3": replace(wide, qk_norm=True),
        "gemma": gemma,
        "gemma2": replace(gemma, post_norms=True, window=6, window_period=2, score_dim=18, **caps),
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
        ("qwen3_moe", {"num_hidden_layers": 10**12, "mlp_only_layers": [0]}, "model.layers", 10**12),
        ("gemma2", {"num_hidden_layers": 10**12, "layer_types": None}, "model.layers", 10**12),
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
