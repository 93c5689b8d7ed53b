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
# Of a block: our norms and projections, and theirs, of projections GPT-2's and the others'.
_NORMS: Mapping[str, Mapping[str, str]] = {
    "gpt2": {"attention_norm": "ln_1", "mlp_norm": "ln_2"},
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "pre and post": {
        "attention_norm": "input_layernorm", "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm", "mlp_post_norm": "post_feedforward_layernorm",
    },
}  # fmt: skip
_PROJECTIONS = {
    "attention.out": ("attn.c_proj", "self_attn.o_proj"), "mlp.gate": ("", "mlp.gate_proj"),
    "mlp.up": ("mlp.c_fc", "mlp.up_proj"), "mlp.down": ("mlp.c_proj", "mlp.down_proj"),
}  # fmt: skip
# Constants that older files carry along: causal masks, rotary frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def entries_of(shape: ModelShape) -> list[EntryMap]:
    """Every parameter of the model, in the order a token meets them; ``UserError`` for a shape of no family."""
    return list(_entries(shape, layout_of(shape)))


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
    by_full_name = {name if name.startswith(prefix) or name == HEAD else prefix + name: name for name in names}
    return {name: stored_name for name, stored_name in by_full_name.items() if not name.endswith(_BUFFERS)}


def check_tensors(sizes: Mapping[str, tuple[int, ...]], shape: ModelShape, field: str = "") -> list[EntryMap]:
    """The entries of a shape, whose tensors are all among those given (by their full names), in their sizes.

    Raises ``UserError`` for a tensor that is missing, unexpected or of the wrong size; `field` stands before its name.
    """
    entries, unmatched, prefix = [], set(sizes), f"{field}: " if field else ""
    for entry in _entries(shape, layout_of(shape)):
        for name, size in entry.theirs.items():
            if name not in sizes:
                raise UserError(f"{prefix}tensor {name}", None, f"an array of shape {size}")
            if tuple(sizes[name]) != size:
                raise UserError(f"{prefix}shape of {name}", tuple(sizes[name]), f"{size}")
            unmatched.discard(name)
        entries.append(entry)
    if shape.tied and HEAD in unmatched:  # torch lists the tied weight under both of its names
        if tuple(sizes[HEAD]) != (table := (shape.vocab, shape.hidden)):
            raise UserError(f"{prefix}shape of {HEAD}", tuple(sizes[HEAD]), f"{table}")
        unmatched.discard(HEAD)
    if unmatched:
        raise UserError(f"{prefix}checkpoint tensor", min(unmatched), "only those of a model of this config.json")
    return entries


def not_tied(field: str = "") -> UserError:
    """The refusal of a head that is not the embedding table, though the config says that it is."""
    prefix = f"{field}: " if field else ""
    return UserError(f"{prefix}tie_word_embeddings", True, f"false: {HEAD} is not the embedding table")


def from_huggingface(state: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Return a Hugging Face state dict's tensors (or their gradients) as this package's parameters.

    Each tensor is read once, and one whose layout is the same is passed on, not copied. Raises ``UserError`` for a
    shape that no family has, and for a tensor that is missing, unexpected or of the wrong size.
    """
    names = file_names(state, shape)
    entries = check_tensors({name: state[stored_name].shape for name, stored_name in names.items()}, shape)

    def part(name: str, bounds: Bounds) -> Array:
        return np.asarray(state[names[name]])[tuple(slice(*ends) for ends in bounds)]  # a jax array, too

    if shape.tied and HEAD in names:
        full = tuple((0, size) for size in (shape.vocab, shape.hidden))
        if not np.array_equal(part(HEAD, full), part(next(iter(entries[0].theirs)), full)):
            raise not_tied()
    params = {}
    dtype = np.dtype(np.float32)
    for entry in entries:
        if entry.theirs:  # what they lack is as the tensor before it
            dtype = np.asarray(state[names[next(iter(entry.theirs))]]).dtype
        params[entry.ours] = entry.read(tuple((0, size) for size in entry.size), part, dtype)
    return params


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
        value = params[entry.ours]
        if entry.ours in (TABLE, "head.kernel"):  # without what a grid has beyond the vocabulary
            value = value[: entry.size[0], : entry.size[1]]
        if value.shape != entry.size:
            raise UserError(f"shape of {entry.ours}", value.shape, f"{entry.size}")
        state |= zip(entry.theirs, entry.split(np.asarray(value)), strict=True)
    return state


def _entries(shape: ModelShape, layout: Layout) -> Iterator[EntryMap]:
    gpt2, table = layout == "gpt2", (shape.vocab, shape.hidden)
    yield TensorMap(TABLE, table, {"transformer.wte.weight" if gpt2 else "model.embed_tokens.weight": table})
    if gpt2:
        yield _same("positions.table", "transformer.wpe.weight", (shape.seq_len, shape.hidden))
    for index in range(shape.layers):
        yield from _block(shape, index, layout)
    yield from _norm("norm", "transformer.ln_f" if gpt2 else "model.norm", shape)
    if not shape.tied:
        yield TensorMap("head.kernel", table[::-1], {HEAD: table}, transposed=True)


def _same(ours: str, theirs: str, size: tuple[int, ...]) -> TensorMap:
    return TensorMap(ours, size, {theirs: size})


def _norm(ours: str, theirs: str, shape: ModelShape) -> Iterator[TensorMap]:
    yield _same(f"{ours}.scale", f"{theirs}.weight", (shape.hidden,))
    if shape.norm == "layernorm":
        yield _same(f"{ours}.shift", f"{theirs}.bias", (shape.hidden,))


def _block(shape: ModelShape, index: int, layout: Layout) -> Iterator[EntryMap]:
    gpt2, hidden, moe = layout == "gpt2", shape.hidden, shape.experts_of(index)
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    ours, theirs = f"blocks.{index}", f"{'transformer.h' if gpt2 else 'model.layers'}.{index}"

    def linear(
        our: str, widths: Mapping[str, int], rows: int, *, bias: bool, heads: tuple[int, int, int] | None = None
    ) -> Iterator[TensorMap]:
        """Yield the kernel of the columns of their layers, and the bias; Conv1D keeps weights [in, out], as we do."""
        columns = sum(widths.values())
        kernels = {
            f"{theirs}.{name}.weight": (rows, out_features) if gpt2 else (out_features, rows)
            for name, out_features in widths.items()
        }
        yield TensorMap(f"{ours}.{our}.kernel", (rows, columns), kernels, transposed=not gpt2, heads=heads)
        if bias:
            biases = {f"{theirs}.{name}.bias": (out_features,) for name, out_features in widths.items()}
            yield TensorMap(f"{ours}.{our}.bias", (columns,), biases, heads=heads)

    for our, their in _NORMS["gpt2" if gpt2 else "pre and post" if shape.post_norms else "pre"].items():
        yield from _norm(f"{ours}.{our}", f"{theirs}.{their}", shape)
    separate_widths = {"self_attn.q_proj": queries, "self_attn.k_proj": keys, "self_attn.v_proj": keys}
    heads = (shape.kv_heads, shape.heads // shape.kv_heads, shape.head_dim)
    widths = {"attn.c_attn": shape.qkv_width} if gpt2 else separate_widths
    yield from linear("attention.qkv", widths, hidden, bias=shape.bias != "none", heads=heads)
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():
        yield _same(f"{ours}.attention.{name}.scale", f"{theirs}.self_attn.{name}.weight", (shape.head_dim,))
    wide = dict.fromkeys(("gate", "up")[2 - shape.mlp_inputs :], (hidden, shape.ffn))
    mlp = {f"mlp.{name}": size for name, size in (wide | {"down": (shape.ffn, hidden)}).items()}
    for our, (rows, columns) in {"attention.out": (queries, hidden), **({} if moe else mlp)}.items():
        yield from linear(our, {_PROJECTIONS[our][not gpt2]: columns}, rows, bias=shape.bias == "all")
    if moe is not None:
        folder, names = _EXPERTS[layout]
        yield from _experts(f"{ours}.mlp", f"{theirs}.{folder}", names, hidden, moe)


def _experts(ours: str, theirs: str, names: Sequence[str], hidden: int, moe: ExpertShape) -> Iterator[EntryMap]:
    scores = (hidden, moe.experts)
    yield TensorMap(f"{ours}.router.kernel", scores, {f"{theirs}.gate.weight": scores[::-1]}, transposed=True)
    yield ExpertMap(f"{ours}.router.bias", scores[1:], {})
    for our, their in zip(("gate", "up", "down"), names, strict=True):
        size = (moe.ffn, hidden) if our == "down" else (hidden, moe.ffn)
        expert_tensors = {f"{theirs}.experts.{number}.{their}.weight": size[::-1] for number in range(moe.experts)}
        yield ExpertMap(f"{ours}.experts.{our}.kernel", (moe.experts, *size), expert_tensors)
