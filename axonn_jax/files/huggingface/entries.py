"""Correspondence of a model's parameters to Hugging Face tensors, and conversion of full models in both directions."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.shape import ExpertShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.huggingface.families import Layout, layout_of
from axonn_jax.files.huggingface.tensor_map import Array, Bounds, EntryMap, ExpertMap, TensorMap

# Both directions only move entries, so they apply to values and gradients alike and are exact inverses.

HEAD = "lm_head.weight"
TABLE = "embedding.table"
# Published GPT-2 files hold the bare model, whose tensor names lack the prefix of the language model.
_PREFIX: Mapping[Layout, str] = {"gpt2": "transformer."}
# Module of a layer's experts, and an expert's projections. Neither transformers 4 nor 5 saves them fused.
_EXPERTS: Mapping[Layout, tuple[str, tuple[str, str, str]]] = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}
# A block's norms and projections, ours to theirs; for projections, GPT-2's name and that of all other families.
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
# Buffers that older files contain: causal masks and rotary frequencies, which are constants.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")


def entries_of(shape: ModelShape) -> list[EntryMap]:
    """Return the map of every parameter in forward order; raises ``UserError`` for a shape of no known family."""
    return list(_entries(shape, layout_of(shape)))


def why_not_exported(shape: ModelShape, *, biases_move: bool) -> str:
    """Return why a model with experts cannot be exported to Hugging Face, or an empty string.

    `biases_move` is True if training changes the routers' biases from 0.
    """
    try:
        lacking = [entry.ours for entry in entries_of(shape) if not entry.theirs]
    except UserError:
        return "no family of transformers that it writes has such experts"
    return "moe.balance_rate moves routers' biases, which its family has not" if lacking and biases_move else ""


def file_names(names: Sequence[str] | Mapping[str, object], shape: ModelShape) -> dict[str, str]:
    """Map the names that `entries_of` uses to those in a file, which may lack the prefix; omits known buffers."""
    prefix = _PREFIX.get(layout_of(shape), "model.")
    by_full_name = {name if name.startswith(prefix) or name == HEAD else prefix + name: name for name in names}
    return {name: stored_name for name, stored_name in by_full_name.items() if not name.endswith(_BUFFERS)}


def check_tensors(sizes: Mapping[str, tuple[int, ...]], shape: ModelShape, field: str = "") -> list[EntryMap]:
    """Return the entries of a shape after checking that their tensors are exactly those in `sizes`.

    Raises:
        UserError: A tensor is missing, unexpected or of the wrong size; `field` prefixes the message.
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
    # A torch state dict lists a tied weight under both of its names.
    if shape.tied and HEAD in unmatched:
        if tuple(sizes[HEAD]) != (table := (shape.vocab, shape.hidden)):
            raise UserError(f"{prefix}shape of {HEAD}", tuple(sizes[HEAD]), f"{table}")
        unmatched.discard(HEAD)
    if unmatched:
        raise UserError(f"{prefix}checkpoint tensor", min(unmatched), "only those of a model of this config.json")
    return entries


def not_tied(field: str = "") -> UserError:
    """Return the error for a head that differs from the embedding table although the config ties them."""
    prefix = f"{field}: " if field else ""
    return UserError(f"{prefix}tie_word_embeddings", True, f"false: {HEAD} is not the embedding table")


def from_huggingface(state: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Convert a Hugging Face state dict (or its gradients) to this package's parameters.

    Each tensor is read once, and is not copied if its layout is the same.

    Args:
        state: Tensors by name.
        shape: Sizes of the model.

    Raises:
        UserError: The shape belongs to no family, or a tensor is missing, unexpected or of the wrong size.
    """
    names = file_names(state, shape)
    entries = check_tensors({name: state[stored_name].shape for name, stored_name in names.items()}, shape)

    def part(name: str, bounds: Bounds) -> Array:
        # `asarray`: the state may hold jax arrays too.
        return np.asarray(state[names[name]])[tuple(slice(*ends) for ends in bounds)]

    if shape.tied and HEAD in names:
        full = tuple((0, size) for size in (shape.vocab, shape.hidden))
        if not np.array_equal(part(HEAD, full), part(next(iter(entries[0].theirs)), full)):
            raise not_tied()
    params = {}
    dtype = np.dtype(np.float32)
    for entry in entries:
        if entry.theirs:  # a parameter that they lack takes the dtype of the previous tensor
            dtype = np.asarray(state[names[next(iter(entry.theirs))]]).dtype
        params[entry.ours] = entry.read(tuple((0, size) for size in entry.size), part, dtype)
    return params


def to_huggingface(params: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Convert this package's parameters (or gradients) to a Hugging Face state dict; inverse of `from_huggingface`.

    A tied projection is listed once, under the embedding's name, as in safetensors files.

    Args:
        params: Parameters by name; a padded vocabulary is cut to its size.
        shape: Sizes of the model.

    Raises:
        UserError: The shape belongs to no family; a parameter is missing, unexpected or of the wrong size; or it is
            nonzero and Hugging Face's model lacks it.
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
        if entry.ours in (TABLE, "head.kernel"):  # remove the padding of a vocabulary that the grid did not divide
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
        # Their layers hold our columns side by side. GPT-2's Conv1D stores weights [in, out], as we do.
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
