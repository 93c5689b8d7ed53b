"""Entries: every parameter of a model with the Hugging Face tensors of the same numbers, and whole models both ways.

Both ways only move entries, so they hold for values and gradients alike and undo each other bit for bit.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from axonn_jax.errors import UserError
from axonn_jax.experts.shape import ExpertShape
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.families import Layout, layout_of
from axonn_jax.models.huggingface.tensor_map import Array, Bounds, EntryMap, ExpertMap, TensorMap

HEAD = "lm_head.weight"
TABLE = "embedding.table"
# Published GPT-2 files name the bare model's tensors, without the prefix that a language model's have.
_PREFIX: Mapping[Layout, str] = {"gpt2": "transformer."}
# Of a layer with experts: its name, and those of an expert's matmuls. Neither transformers 4 nor 5 saves them fused.
_EXPERTS: Mapping[Layout, tuple[str, tuple[str, str, str]]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
_NORMS = {"attention_norm": "input_", "mlp_norm": "post_attention_"}
_POST_NORMS = {
    "attention_norm": "input_",
    "attention_post_norm": "post_attention_",
    "mlp_norm": "pre_feedforward_",
    "mlp_post_norm": "post_feedforward_",
}
# Constants that older files carry along: causal masks, rotary frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def entries_of(shape: ModelShape) -> list[EntryMap]:
    """Every parameter of the model, in the order a token meets them; ``UserError`` for a shape of no family."""
    layout = layout_of(shape)
    return list(_entries(shape, layout))


def why_not_exported(shape: ModelShape, *, biases_move: bool) -> str:
    """Why a run of a model with experts could not become a Hugging Face model, or an empty text.

    With `biases_move` routers' biases do not stay 0.
    """
    try:
        lacking = [entry.ours for entry in entries_of(shape) if not entry.theirs]
    except UserError:
        return "no family of transformers that it writes has such experts"
    return "moe.balance_rate moves routers' biases, which its family has not" if lacking and biases_move else ""


def file_names(names: Sequence[str] | Mapping[str, Any], shape: ModelShape) -> dict[str, str]:
    """Map the names that `entries_of` uses to those in a file, which may lack the prefix; without known buffers."""
    prefix = _PREFIX.get(layout_of(shape), "model.")
    full = {name if name.startswith(prefix) or name == HEAD else prefix + name: name for name in names}
    return {name: given for name, given in full.items() if not name.endswith(_BUFFERS)}


def check_tensors(sizes: Mapping[str, tuple[int, ...]], shape: ModelShape, field: str = "") -> list[EntryMap]:
    """The entries of a shape, whose tensors are all among those given (by their full names), in their sizes.

    Raises ``UserError`` for a tensor that is missing, unexpected or of the wrong size; `field` stands before its name.
    """
    entries, left, before = [], set(sizes), f"{field}: " if field else ""
    expected = (entry for entry in _entries(shape, layout_of(shape)))
    for entry in expected:
        for name, size in entry.theirs.items():
            if name not in sizes:
                raise UserError(f"{before}tensor {name}", None, f"an array of shape {size}")
            if tuple(sizes[name]) != size:
                raise UserError(f"{before}shape of {name}", tuple(sizes[name]), f"{size}")
            left.discard(name)
        entries.append(entry)
    if shape.tied and HEAD in left:  # torch lists the tied weight under both of its names
        if tuple(sizes[HEAD]) != (table := (shape.vocab, shape.hidden)):
            raise UserError(f"{before}shape of {HEAD}", tuple(sizes[HEAD]), f"{table}")
        left.discard(HEAD)
    if left:
        raise UserError(f"{before}checkpoint tensor", min(left), "only those of a model of this config.json")
    return entries


def not_tied(field: str = "") -> UserError:
    """The refusal of a head that is not the embedding table, though the config says that it is."""
    before = f"{field}: " if field else ""
    return UserError(f"{before}tie_word_embeddings", True, f"false: {HEAD} is not the embedding table")


def from_huggingface(state: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Return a Hugging Face state dict's tensors (or their gradients) as this package's parameters.

    Each tensor is read once, and one whose layout is the same is passed on, not copied. Raises ``UserError`` for a
    shape that no family has, and for a tensor that is missing, unexpected or of the wrong size.
    """
    names = file_names(state, shape)
    entries = check_tensors({name: state[given].shape for name, given in names.items()}, shape)

    def part(name: str, bounds: Bounds) -> Array:
        return np.asarray(state[names[name]])[tuple(slice(*ends) for ends in bounds)]  # a jax array, too

    if shape.tied and HEAD in names:
        full = tuple((0, size) for size in (shape.vocab, shape.hidden))
        if not np.array_equal(part(HEAD, full), part(next(iter(entries[0].theirs)), full)):
            raise not_tied()
    made = {}
    dtype = np.dtype(np.float32)
    for entry in entries:
        if entry.theirs:  # what they lack is as the tensor before it
            dtype = np.asarray(state[names[next(iter(entry.theirs))]]).dtype
        made[entry.ours] = entry.read(tuple((0, size) for size in entry.size), part, dtype)
    return made


def to_huggingface(params: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Return this package's parameters (or their gradients) as a Hugging Face state dict; undoes `from_huggingface`.

    A tied projection is listed once, under the embedding's name, as in safetensors files. Raises ``UserError`` for
    a shape that no family has, and for a parameter that is missing, unexpected, of the wrong size, or lacking there
    and not 0.
    """
    entries = entries_of(shape)
    extra = params.keys() - {entry.ours for entry in entries}
    if extra:
        raise UserError("parameter", min(extra), "only those of a model of this shape")
    state: dict[str, Array] = {}
    for entry in entries:
        if entry.ours not in params:
            raise UserError(f"parameter {entry.ours}", None, f"an array of shape {entry.size}")
        own = params[entry.ours]
        if entry.ours in (TABLE, "head.kernel"):  # without what a grid has beyond the vocabulary
            own = own[: entry.size[0], : entry.size[1]]
        if own.shape != entry.size:
            raise UserError(f"shape of {entry.ours}", own.shape, f"{entry.size}")
        state |= zip(entry.theirs, entry.split(np.asarray(own)), strict=True)
    return state


def _entries(shape: ModelShape, layout: Layout) -> Iterator[EntryMap]:
    hidden, table = shape.hidden, (shape.vocab, shape.hidden)
    if layout == "gpt2":
        positions = (shape.seq_len, hidden)
        yield TensorMap(TABLE, table, {"transformer.wte.weight": table})
        yield TensorMap("positions.table", positions, {"transformer.wpe.weight": positions})
        for i in range(shape.layers):
            yield from _gpt2_block(shape, i)
        yield from _layer_norm("norm", "transformer.ln_f", hidden)
    else:
        yield TensorMap(TABLE, table, {"model.embed_tokens.weight": table})
        for i in range(shape.layers):
            yield from _llama_block(shape, i, layout)
        yield _same("norm.scale", "model.norm.weight", (hidden,))
    if not shape.tied:
        yield TensorMap("head.kernel", table[::-1], {HEAD: table}, transposed=True)


def _same(ours: str, theirs: str, size: tuple[int, ...]) -> TensorMap:
    return TensorMap(ours, size, {theirs: size})


def _layer_norm(ours: str, theirs: str, hidden: int) -> Iterator[TensorMap]:
    yield _same(f"{ours}.scale", f"{theirs}.weight", (hidden,))
    yield _same(f"{ours}.shift", f"{theirs}.bias", (hidden,))


def _heads(shape: ModelShape) -> tuple[int, int, int]:
    return shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim


def _gpt2_block(shape: ModelShape, index: int) -> Iterator[TensorMap]:
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
        yield TensorMap(f"{ours}.{our}.kernel", size, {f"{theirs}.{their}.weight": size}, heads=heads)
        yield TensorMap(f"{ours}.{our}.bias", size[1:], {f"{theirs}.{their}.bias": size[1:]}, heads=heads)


def _llama_block(shape: ModelShape, index: int, layout: Layout) -> Iterator[EntryMap]:
    ours, theirs, hidden, ffn = f"blocks.{index}", f"model.layers.{index}", shape.hidden, shape.ffn
    attention, queries, keys = f"{theirs}.self_attn", shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    for our, their in (_POST_NORMS if shape.post_norms else _NORMS).items():
        yield _same(f"{ours}.{our}.scale", f"{theirs}.{their}layernorm.weight", (hidden,))
    yield TensorMap(
        f"{ours}.attention.qkv.kernel",
        (hidden, shape.qkv_width),
        {f"{attention}.{name}.weight": (width, hidden) for name, width in widths.items()},
        transposed=True,
        heads=_heads(shape),
    )
    if shape.bias != "none":
        biases = {f"{attention}.{name}.bias": (width,) for name, width in widths.items()}
        yield TensorMap(f"{ours}.attention.qkv.bias", (shape.qkv_width,), biases, heads=_heads(shape))
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():
        yield _same(f"{ours}.attention.{name}.scale", f"{attention}.{name}.weight", (shape.head_dim,))
    moe = shape.moe if shape.moe is not None and shape.moe.is_routed(index) else None
    for our, their, size in (
        ("attention.out", "self_attn.o_proj", (queries, hidden)),
        *([("mlp.gate", "mlp.gate_proj", (hidden, ffn))] if shape.mlp_inputs == 2 else []),
        ("mlp.up", "mlp.up_proj", (hidden, ffn)),
        ("mlp.down", "mlp.down_proj", (ffn, hidden)),
    ):
        if moe is not None and our.startswith("mlp."):
            continue
        yield TensorMap(f"{ours}.{our}.kernel", size, {f"{theirs}.{their}.weight": size[::-1]}, transposed=True)
        if shape.bias == "all":
            yield _same(f"{ours}.{our}.bias", f"{theirs}.{their}.bias", size[1:])
    if moe is not None:
        folder, names = _EXPERTS[layout]
        yield from _experts(f"{ours}.mlp", f"{theirs}.{folder}", names, hidden, moe)


def _experts(ours: str, theirs: str, names: Sequence[str], hidden: int, moe: ExpertShape) -> Iterator[EntryMap]:
    scores = (hidden, moe.experts)
    yield TensorMap(f"{ours}.router.kernel", scores, {f"{theirs}.gate.weight": scores[::-1]}, transposed=True)
    yield ExpertMap(f"{ours}.router.bias", scores[1:], {})
    for our, their in zip(("gate", "up", "down"), names, strict=True):
        size = (moe.ffn, hidden) if our == "down" else (hidden, moe.ffn)
        each = {f"{theirs}.experts.{number}.{their}.weight": size[::-1] for number in range(moe.experts)}
        yield ExpertMap(f"{ours}.experts.{our}.kernel", (moe.experts, *size), each)
