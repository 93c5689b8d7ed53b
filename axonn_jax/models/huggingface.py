"""Hugging Face GPT-2 and Llama checkpoints: their configs as `ModelShape`, their tensors under this package's names.

Only numpy: a tensor is at most transposed, and the columns of queries, keys and values are regrouped. Both maps are
linear and only move entries, so they hold for values and gradients alike and undo each other bit for bit.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape

Array = NDArray[Any]
"""Any dtype; it is kept."""

Family = Literal["gpt2", "llama"]

# What each Hugging Face architecture fixes in a `ModelShape`.
_TRAITS: dict[Family, dict[str, object]] = {
    "gpt2": {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": True},
    "llama": {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": False},
}
# Published GPT-2 files name the bare model's tensors, without the prefix that a language model's have.
_PREFIX: dict[Family, str] = {"gpt2": "transformer.", "llama": "model."}
# Constants that older files carry along: causal masks, rotary frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_HEAD = "lm_head.weight"


def from_huggingface(state: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Returns a Hugging Face state dict's tensors (or their gradients) as this package's parameters.

    Each tensor is read once, and one whose layout is the same is passed on, not copied. Raises ``UserError`` for a
    shape that is neither GPT-2 nor Llama, and for a tensor that is missing, unexpected or of the wrong size.
    """
    prefix = _PREFIX[family := _family(shape)]
    # maps the names in use here to those of the file, which may lack the prefix
    keys = {key if key.startswith(prefix) or key == _HEAD else prefix + key: key for key in state}
    params = {}
    for entry in _entries(shape, family):
        arrays = []
        for name, size in entry.theirs.items():
            if name not in keys:
                raise UserError(f"tensor {name}", None, f"an array of shape {size}")
            arrays.append(_sized(name, state[keys.pop(name)], size))
        params[entry.ours] = entry.join(arrays)
    if shape.tied and _HEAD in keys:  # torch lists the tied weight under both of its names
        table = params["embedding.table"]
        head = _sized(_HEAD, state[keys.pop(_HEAD)], table.shape)
        if not np.array_equal(head, table):
            raise UserError("tie_word_embeddings", True, f"false: {_HEAD} is not the embedding table")
    extra = [name for name in keys if not name.endswith(_BUFFERS)]
    if extra:
        raise UserError("checkpoint tensor", min(extra), f"only those of a {family} model of this shape")
    return params


def to_huggingface(params: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Returns this package's parameters (or their gradients) as a Hugging Face state dict; undoes `from_huggingface`.

    A tied projection is listed once, under the embedding's name, as in safetensors files. Raises ``UserError`` for
    a shape that is neither GPT-2 nor Llama, and for a parameter that is missing, unexpected or of the wrong size.
    """
    entries = list(_entries(shape, _family(shape)))
    extra = params.keys() - {entry.ours for entry in entries}
    if extra:
        raise UserError("parameter", min(extra), "only those of a model of this shape")
    state: dict[str, Array] = {}
    for entry in entries:
        if entry.ours not in params:
            raise UserError(f"parameter {entry.ours}", None, f"an array of shape {entry.size}")
        own = params[entry.ours]
        if entry.ours in ("embedding.table", "head.kernel"):  # without what a grid has beyond the vocabulary
            own = own[: entry.size[0], : entry.size[1]]
        state |= zip(entry.theirs, entry.split(_sized(entry.ours, own, entry.size)), strict=True)
    return state


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """Returns the sizes that a Hugging Face ``config.json`` of model type gpt2 or llama describes.

    Dropout stays 0: it is a choice of the training run, not of the model. Raises ``UserError``, naming field and
    value, for whatever this package's transformer does not compute.
    """
    family = config.get("model_type")
    if family not in ("gpt2", "llama"):
        raise UserError("config.model_type", family, "one of " + ", ".join(_TRAITS))
    _only(config, "quantization_config", None)
    return _gpt2_shape(config) if family == "gpt2" else _llama_shape(config)


def _gpt2_shape(config: Mapping[str, Any]) -> ModelShape:
    _only(config, "activation_function", "gelu_new")
    _only(config, "scale_attn_weights", True)
    _only(config, "scale_attn_by_inverse_layer_idx", False)
    _only(config, "add_cross_attention", False)
    hidden, heads = _size(config, "n_embd"), _size(config, "n_head")
    return ModelShape(
        layers=_size(config, "n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=_size(config, "n_inner", 4 * hidden),
        vocab=_size(config, "vocab_size"),
        seq_len=_size(config, "n_positions"),
        tied=_flag(config, "tie_word_embeddings", True),
        norm_eps=_number(config, "layer_norm_epsilon", 1e-5),
        init_std=_number(config, "initializer_range", 0.02),
        **_TRAITS["gpt2"],  # type: ignore[arg-type]
    )


def _llama_shape(config: Mapping[str, Any]) -> ModelShape:
    _only(config, "hidden_act", "silu")
    _only(config, "attention_bias", False)
    _only(config, "mlp_bias", False)
    shape = ModelShape(
        layers=_size(config, "num_hidden_layers"),
        hidden=_size(config, "hidden_size"),
        heads=_size(config, "num_attention_heads"),
        kv_heads=_size(config, "num_key_value_heads", config["num_attention_heads"]),
        ffn=_size(config, "intermediate_size"),
        vocab=_size(config, "vocab_size"),
        seq_len=_size(config, "max_position_embeddings"),
        tied=_flag(config, "tie_word_embeddings", False),
        norm_eps=_number(config, "rms_norm_eps", 1e-6),
        init_std=_number(config, "initializer_range", 0.02),
        rope_theta=_rope_theta(config),
        **_TRAITS["llama"],  # type: ignore[arg-type]
    )
    head_dim = _size(config, "head_dim", shape.head_dim)
    if head_dim != shape.head_dim:
        raise UserError("config.head_dim", head_dim, f"hidden_size / num_attention_heads = {shape.head_dim}")
    return shape


def _rope_theta(config: Mapping[str, Any]) -> float:
    """The base of plain rotary positions, from transformers 5's `rope_parameters` or the older pair of fields."""
    _only(config, "partial_rotary_factor", 1.0)
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"  # of two, transformers takes the older
    rope = config.get(key) or {}
    if not isinstance(rope, Mapping):
        raise UserError(f"config.{key}", rope, "an object")
    supported = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    for name in [*supported, *sorted(rope.keys() - supported.keys() - {"rope_theta"})]:  # the kind before its factors
        _only(rope, name, supported.get(name), of=f"config.{key}")
    return _number(rope, "rope_theta", _number(config, "rope_theta", 10_000.0), of=f"config.{key}")


def _only(config: Mapping[str, Any], key: str, value: object, of: str = "config") -> None:
    """Raises ``UserError`` unless the field is absent or has the one value that is supported."""
    given = config.get(key)  # null is how many files say "the default", which is the supported value
    if given is not None and given != value:
        raise UserError(f"{of}.{key}", given, f"{'absent' if value is None else value}; nothing else is supported")


def _size(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UserError(f"config.{key}", value, "an integer of at least 1")
    return value


def _number(config: Mapping[str, Any], key: str, default: float, of: str = "config") -> float:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise UserError(f"{of}.{key}", value, "a number above 0")
    return float(value)


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key, default)
    if not isinstance(value, bool):
        raise UserError(f"config.{key}", value, "true or false")
    return value


def _family(shape: ModelShape) -> Family:
    for family, traits in _TRAITS.items():
        if all(getattr(shape, trait) == value for trait, value in traits.items()):
            if family == "gpt2" and shape.kv_heads != shape.heads:
                raise UserError("model.kv_heads", shape.kv_heads, f"heads = {shape.heads} for a GPT-2")
            return family
    given = " ".join(f"{k}={getattr(shape, k)}" for k in _TRAITS["gpt2"])
    accepted = " or ".join(" ".join(f"{k}={v}" for k, v in traits.items()) for traits in _TRAITS.values())
    raise UserError("model", given, accepted)


def _sized(name: str, array: Array, size: tuple[int, ...]) -> Array:
    if array.shape != size:
        raise UserError(f"shape of {name}", array.shape, f"{size}")
    return np.asarray(array)  # a jax array, too


@dataclass(frozen=True)
class _Entry:
    """One of our parameters and the Hugging Face tensors that hold the same numbers.

    All of theirs are [out, in] where `transposed`; several hold its columns side by side. With `heads` (KV heads,
    queries of each, features of a head) the columns are queries, keys and values, which ours groups by KV head.
    """

    ours: str
    size: tuple[int, ...]
    theirs: dict[str, tuple[int, ...]]
    transposed: bool = False
    heads: tuple[int, int, int] | None = None

    def join(self, arrays: list[Array]) -> Array:
        arrays = [a.T for a in arrays] if self.transposed else arrays
        if self.heads is None:
            return np.ascontiguousarray(arrays[0])
        kv_heads, group, head_dim = self.heads
        keys, values = kv_heads * group * head_dim, kv_heads * (group + 1) * head_dim
        thirds = np.split(np.concatenate(arrays, -1), (keys, values), -1)
        by_head = [a.reshape(*self.size[:-1], kv_heads, -1, head_dim) for a in thirds]
        # contiguous at the end only: numpy lays the joined columns out like its inputs, which may be transposed
        return np.ascontiguousarray(np.concatenate(by_head, -2).reshape(self.size))

    def split(self, array: Array) -> list[Array]:
        arrays = [array]
        if self.heads is not None:
            kv_heads, group, head_dim = self.heads
            by_head = array.reshape(*self.size[:-1], kv_heads, group + 2, head_dim)
            arrays = [a.reshape(*self.size[:-1], -1) for a in np.split(by_head, (group, group + 1), -2)]
            if len(self.theirs) == 1:
                arrays = [np.concatenate(arrays, -1)]
        return [np.ascontiguousarray(a.T if self.transposed else a) for a in arrays]


def _entries(shape: ModelShape, family: Family) -> Iterator[_Entry]:
    """Every parameter of the model, in the order a token meets them."""
    hidden, table = shape.hidden, (shape.vocab, shape.hidden)
    if family == "gpt2":
        positions = (shape.seq_len, hidden)
        yield _Entry("embedding.table", table, {"transformer.wte.weight": table})
        yield _Entry("positions.table", positions, {"transformer.wpe.weight": positions})
        for i in range(shape.layers):
            yield from _gpt2_block(shape, i)
        yield from _layer_norm("norm", "transformer.ln_f", hidden)
    else:
        yield _Entry("embedding.table", table, {"model.embed_tokens.weight": table})
        for i in range(shape.layers):
            yield from _llama_block(shape, i)
        yield _Entry("norm.scale", (hidden,), {"model.norm.weight": (hidden,)})
    if not shape.tied:
        yield _Entry("head.kernel", table[::-1], {_HEAD: table}, transposed=True)


def _layer_norm(ours: str, theirs: str, hidden: int) -> Iterator[_Entry]:
    yield _Entry(f"{ours}.scale", (hidden,), {f"{theirs}.weight": (hidden,)})
    yield _Entry(f"{ours}.shift", (hidden,), {f"{theirs}.bias": (hidden,)})


def _heads(shape: ModelShape) -> tuple[int, int, int]:
    return shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim


def _gpt2_block(shape: ModelShape, index: int) -> Iterator[_Entry]:
    ours, theirs, hidden = f"blocks.{index}", f"transformer.h.{index}", shape.hidden
    # Conv1D keeps its weights [in, out], as we do; queries, keys and values are already one tensor.
    layers = (
        ("attention.qkv", "attn.c_attn", (hidden, shape.qkv_width), _heads(shape)),
        ("attention.out", "attn.c_proj", (hidden, hidden), None),
        ("mlp.up", "mlp.c_fc", (hidden, shape.ffn), None),
        ("mlp.down", "mlp.c_proj", (shape.ffn, hidden), None),
    )
    yield from _layer_norm(f"{ours}.attention_norm", f"{theirs}.ln_1", hidden)
    yield from _layer_norm(f"{ours}.mlp_norm", f"{theirs}.ln_2", hidden)
    for our, their, size, heads in layers:
        yield _Entry(f"{ours}.{our}.kernel", size, {f"{theirs}.{their}.weight": size}, heads=heads)
        yield _Entry(f"{ours}.{our}.bias", size[1:], {f"{theirs}.{their}.bias": size[1:]}, heads=heads)


def _llama_block(shape: ModelShape, index: int) -> Iterator[_Entry]:
    ours, theirs, hidden, ffn = f"blocks.{index}", f"model.layers.{index}", shape.hidden, shape.ffn
    keys = shape.kv_heads * shape.head_dim
    attention = {"q_proj": (hidden, hidden), "k_proj": (keys, hidden), "v_proj": (keys, hidden)}
    yield _Entry(f"{ours}.attention_norm.scale", (hidden,), {f"{theirs}.input_layernorm.weight": (hidden,)})
    yield _Entry(f"{ours}.mlp_norm.scale", (hidden,), {f"{theirs}.post_attention_layernorm.weight": (hidden,)})
    yield _Entry(
        f"{ours}.attention.qkv.kernel",
        (hidden, shape.qkv_width),
        {f"{theirs}.self_attn.{name}.weight": size for name, size in attention.items()},
        transposed=True,
        heads=_heads(shape),
    )
    for our, their, size in (
        ("attention.out", "self_attn.o_proj", (hidden, hidden)),
        ("mlp.gate", "mlp.gate_proj", (hidden, ffn)),
        ("mlp.up", "mlp.up_proj", (hidden, ffn)),
        ("mlp.down", "mlp.down_proj", (ffn, hidden)),
    ):
        yield _Entry(f"{ours}.{our}.kernel", size, {f"{theirs}.{their}.weight": size[::-1]}, transposed=True)
