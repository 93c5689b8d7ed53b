"""Entries: each parameter of this package beside the Hugging Face tensors that hold the same numbers, and the way over.

Only numpy: a tensor is at most transposed, and the columns of queries, keys and values are regrouped. Both maps only
move entries, so they hold for values and gradients alike and undo each other bit for bit. Any part of a parameter is
made of the parts of tensors that it consists of: nobody has to hold more than that.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.families import Layout, layout_of

Array = NDArray[Any]
"""Any dtype; it is kept."""
Bounds = tuple[tuple[int, int], ...]
"""First entry, and the one behind the last, along each dim."""
ReadPart = Callable[[str, Bounds], Array]
"""Gives a part of the tensor of a name."""

HEAD = "lm_head.weight"
TABLE = "embedding.table"
# Published GPT-2 files name the bare model's tensors, without the prefix that a language model's have.
_PREFIX: Mapping[Layout, str] = {"gpt2": "transformer.", "llama": "model."}
# Constants that older files carry along: causal masks, rotary frequencies.
_BUFFERS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
_CHUNK = 32 << 20


@dataclass(frozen=True)
class TensorMap:
    """One of our parameters and the Hugging Face tensors that hold the same numbers.

    All of theirs are [out, in] where `transposed`; several hold its columns side by side. With `heads` (KV heads,
    queries of each, features of a head) the columns are queries, keys and values, which ours groups by KV head.
    """

    ours: str
    size: tuple[int, ...]
    theirs: Mapping[str, tuple[int, ...]]
    transposed: bool = False
    heads: tuple[int, int, int] | None = None

    def read(self, bounds: Bounds, part: ReadPart, dtype: np.dtype[Any]) -> Array:
        """A part of our parameter in `dtype`; zero beyond its size, which a padded vocabulary has."""
        *rows, (start, stop) = [(min(a, size), min(b, size)) for (a, b), size in zip(bounds, self.size, strict=True)]
        shape = tuple(b - a for a, b in bounds)
        runs = list(self._runs(start, stop))
        exact = (stop - start, *(b - a for a, b in rows)) == (shape[-1], *shape[:-1])
        if len(runs) == 1 and exact:
            ((name, first, last),) = runs
            return np.ascontiguousarray(self._part(name, (*rows, (first, last)), part).astype(dtype, copy=False))
        made, at = (np.empty if exact else np.zeros)(shape, dtype), 0
        inside = tuple(slice(b - a) for a, b in rows)
        for name, first, last in runs:
            made[(*inside, slice(at, at + last - first))] = self._part(name, (*rows, (first, last)), part)
            at += last - first
        return made

    def _part(self, name: str, bounds: Bounds, part: ReadPart) -> Array:
        return part(name, bounds[::-1]).T if self.transposed else part(name, bounds)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[str, int, int]]:
        """Our columns from `start` to `stop` as runs of theirs: the tensor, its first and its last but one column."""
        names = list(self.theirs)
        if self.heads is None:
            yield names[0], start, stop
            return
        kv_heads, group, head_dim = self.heads
        widths = (group * head_dim, head_dim, head_dim)
        begins = (0, widths[0], widths[0] + head_dim)  # of each kind in our group of a KV head
        fused = (0, kv_heads * widths[0], kv_heads * begins[2])  # of each kind in one tensor of all three
        while start < stop:
            head, within = divmod(start, sum(widths))
            kind = sum(within >= begin for begin in begins) - 1
            count = min(stop - start, begins[kind] + widths[kind] - within)
            first = head * widths[kind] + within - begins[kind] + (fused[kind] if len(names) == 1 else 0)
            yield names[kind if len(names) > 1 else 0], first, first + count
            start += count

    def split(self, array: Array) -> list[Array]:
        """Theirs, of the whole of ours."""

        def part(bounds: Bounds) -> Array:
            return array[tuple(slice(*ends) for ends in bounds)]

        return [np.concatenate(list(self.chunks(at, part, array.itemsize))) for at in range(len(self.theirs))]

    def chunks(self, number: int, part: Callable[[Bounds], Array], itemsize: int) -> Iterator[Array]:
        """One of theirs in pieces along its first dim, made of parts of ours."""
        rest: Bounds = tuple((0, size) for size in self.size)
        nbytes = math.prod(self.size) * itemsize
        if self.heads is None or (len(self.theirs) == 1 and len(self.size) == 2):
            along = len(self.size) - 1 if self.transposed else 0
            for ends in _ranges(self.size[along], nbytes):
                piece = part((*rest[:along], ends, *rest[along + 1 :]))
                if self.heads is not None:
                    piece = np.concatenate([kind.reshape(len(piece), -1) for kind in self._kinds(piece)], -1)
                yield np.ascontiguousarray(piece.T if self.transposed else piece)
            return
        group = self.size[-1] // self.heads[0]  # columns of a KV head's queries, key and value
        for first, last in _ranges(self.heads[0], nbytes):
            kinds = self._kinds(part((*rest[:-1], (first * group, last * group))))
            chosen = kinds if len(self.theirs) == 1 else [kinds[number]]
            piece = np.concatenate([kind.reshape(*kind.shape[:-3], -1) for kind in chosen], -1)
            yield np.ascontiguousarray(piece.T if self.transposed else piece)

    def _kinds(self, array: Array) -> list[Array]:
        """Queries, keys and values of whole KV heads: [..., KV heads, heads of each, features]."""
        assert self.heads is not None
        _, group, head_dim = self.heads
        by_head = array.reshape(*array.shape[:-1], -1, group + 2, head_dim)
        return np.split(by_head, (group, group + 1), -2)


def _ranges(count: int, nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, count * _CHUNK // max(nbytes, 1))
    return ((at, min(at + step, count)) for at in range(0, count, step))


def entries_of(shape: ModelShape) -> list[TensorMap]:
    """Every parameter of the model, in the order a token meets them; ``UserError`` for a shape of no family."""
    layout = layout_of(shape)
    return list(_entries(shape, layout))


def file_names(names: Sequence[str] | Mapping[str, Any], shape: ModelShape) -> dict[str, str]:
    """Maps the names that `entries_of` uses to those in a file, which may lack the prefix; without known buffers."""
    prefix = _PREFIX[layout_of(shape)]
    full = {name if name.startswith(prefix) or name == HEAD else prefix + name: name for name in names}
    return {name: given for name, given in full.items() if not name.endswith(_BUFFERS)}


def check_tensors(sizes: Mapping[str, tuple[int, ...]], shape: ModelShape, field: str = "") -> list[TensorMap]:
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
    """Returns a Hugging Face state dict's tensors (or their gradients) as this package's parameters.

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
    for entry in entries:
        dtype = np.asarray(state[names[next(iter(entry.theirs))]]).dtype
        made[entry.ours] = entry.read(tuple((0, size) for size in entry.size), part, dtype)
    return made


def to_huggingface(params: Mapping[str, Array], shape: ModelShape) -> dict[str, Array]:
    """Returns this package's parameters (or their gradients) as a Hugging Face state dict; undoes `from_huggingface`.

    A tied projection is listed once, under the embedding's name, as in safetensors files. Raises ``UserError`` for
    a shape that no family has, and for a parameter that is missing, unexpected or of the wrong size.
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


def _entries(shape: ModelShape, layout: Layout) -> Iterator[TensorMap]:
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
            yield from _llama_block(shape, i)
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


def _llama_block(shape: ModelShape, index: int) -> Iterator[TensorMap]:
    ours, theirs, hidden, ffn = f"blocks.{index}", f"model.layers.{index}", shape.hidden, shape.ffn
    attention, queries, keys = f"{theirs}.self_attn", shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    yield _same(f"{ours}.attention_norm.scale", f"{theirs}.input_layernorm.weight", (hidden,))
    yield _same(f"{ours}.mlp_norm.scale", f"{theirs}.post_attention_layernorm.weight", (hidden,))
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
    for our, their, size in (
        ("attention.out", "self_attn.o_proj", (queries, hidden)),
        ("mlp.gate", "mlp.gate_proj", (hidden, ffn)),
        ("mlp.up", "mlp.up_proj", (hidden, ffn)),
        ("mlp.down", "mlp.down_proj", (ffn, hidden)),
    ):
        yield TensorMap(f"{ours}.{our}.kernel", size, {f"{theirs}.{their}.weight": size[::-1]}, transposed=True)
        if shape.bias == "all":
            yield _same(f"{ours}.{our}.bias", f"{theirs}.{their}.bias", size[1:])
