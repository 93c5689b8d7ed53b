"""Rows of a batch: their ids, the targets that count, and packed rows of several documents, none of which sees another.

A row is one of token ids, of which negative ones and those with the bit `LEFT_OUT` are no targets that count. A packed
row is one of words: the low 24 bits are a token's id, bit 30 says that it counts as a target, bit 31 that a
document begins with it. So a batch stays one array of integers, whatever reads it.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from axonn_jax.errors import UserError, integer, typed_arguments
from axonn_jax.experts.router import Packing
from axonn_jax.grid import BATCH_AXES
from axonn_jax.models.protocol import Model
from axonn_jax.tensor.attention import Documents
from axonn_jax.tensor.collectives import mark_varying

LEFT_OUT = 1 << 29
"""Bit of an id that is an input and no target that counts."""
_ID, _COUNTED, _START = (1 << 24) - 1, 1 << 30, -(1 << 31)
_NO_TARGET = -1


class Residual(NamedTuple):
    """Residual stream, with the values that travel through the layers beside it."""

    values: jax.Array
    documents: Documents | None
    """Documents of packed rows, else None."""
    balance: jax.Array | None
    """Sum of the losses that even out the loads of experts, of local tokens so far, a float32 scalar."""
    packing: Packing | None = None
    """Text and targets of the rows, for experts; None in a model without them."""

    @property
    def dtype(self) -> Any:
        """That of the stream."""
        return self.values.dtype


Stream = jax.Array | Residual
"""Value that one layer hands to the next."""


def token_ids(words: Any) -> Any:
    """The ids of packed words."""
    return words & _ID


def documents_of(words: jax.Array) -> Documents:
    """The documents in packed rows [batch, seq]: which one a token is in, and its place there; no collectives."""
    starts = (words < 0).astype(jnp.int32)
    place = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    begins = lax.cummax(jnp.where(starts == 1, place, 0), axis=1)
    return Documents(jnp.cumsum(starts, axis=1), place - begins)


def packing_of(words: jax.Array, *, packed: bool) -> Packing:
    """Packing of rows [batch, seq + 1] as experts see it; no collectives.

    A document without a target that counts, as the rest of a row is, is padding. A row that is not `packed` is one
    document, and behind its last id that is not negative the rest.
    """
    targets = jnp.sum(counted_targets(words, packed=packed), axis=1, dtype=jnp.float32)
    if not packed:
        text = lax.cummax((words >= 0).astype(jnp.int32), axis=1, reverse=True) == 1
        return Packing(text[:, :-1] & (targets > 0)[:, None], targets)
    starts = words < 0
    counts = (words & _COUNTED != 0) & ~starts
    number = jnp.cumsum(starts.astype(jnp.int32), axis=1)
    rows = jnp.arange(words.shape[0])[:, None]
    trained = jnp.zeros((words.shape[0], words.shape[1] + 1), bool).at[rows, number].max(counts)
    text = jnp.take_along_axis(trained, number, axis=1)[:, :-1]
    return Packing(text, targets)


def inputs_of(model: Model, batch: jax.Array) -> jax.Array:
    """Input of `embed`, of a batch [rows, seq + 1]: all of it if the model `reads_words`, else ids but the last."""
    return batch if model.reads_words else readable(batch)[:, :-1]


def counted_targets(batch: Any, *, packed: bool) -> Any:
    """True for each word or id of a batch [..., seq + 1] behind the first that is a target that counts, [..., seq].

    A negative id is none: -1, and -100 as PyTorch has it; nor is a document's first token, as the token before it is of
    another document.
    """
    targets = batch[..., 1:]
    return (targets >= 0) & ((targets & _COUNTED != 0) if packed else (targets & LEFT_OUT == 0))


def readable(batch: jax.Array) -> jax.Array:
    """The ids of a batch [rows, seq + 1] as layers may read them: 0 for a negative one, and in rows without targets.

    So no result depends on such rows, and no lookup or loss ever meets an id that is none.
    """
    counts = jnp.any(counted_targets(batch, packed=False), axis=1, keepdims=True)
    return jnp.where(counts, jnp.maximum(batch & ~LEFT_OUT, 0), 0)


def targets_of(model: Model, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Targets of a batch [rows, seq + 1] and their weights in a sum of losses, [rows, seq] int32 and float32."""
    ids = token_ids(batch) if model.packed else readable(batch)
    return ids[:, 1:], target_weights(batch, model.vocab, packed=model.packed)


def target_weights(batch: jax.Array, vocab: int | None, *, packed: bool) -> jax.Array:
    """Weight of each target of a batch [rows, seq + 1] in a sum of losses, [rows, seq] float32; no collectives.

    In a row with an id beyond the vocabulary (None: there is no end to it) every target that counts counts NaN, and so
    the sum is NaN on every grid, whatever the layers make of such an id.
    """
    ids = token_ids(batch) if packed else batch & ~LEFT_OUT
    known = jnp.bool_(True) if vocab is None else jnp.all(ids < vocab, axis=1, keepdims=True)
    counts = counted_targets(batch, packed=packed)
    return jnp.where(counts, jnp.where(known, 1.0, jnp.nan), 0.0).astype(jnp.float32)


def ids_of(words: jax.Array, *, packed: bool) -> tuple[jax.Array, jax.Array | None]:
    """The ids to embed of rows [batch, seq + 1], and the places in their documents where these are `packed`."""
    if packed:
        return token_ids(words[:, :-1]), documents_of(words[:, :-1]).positions
    return readable(words)[:, :-1], None


def stream_of(values: jax.Array, words: jax.Array, *, packed: bool, experts: bool, balanced: bool) -> Residual:
    """First layer's input: embedded values, and the facts of rows [batch, seq + 1] that later layers need."""
    balance = mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES) if balanced else None
    packing = packing_of(words, packed=packed) if experts else None
    return Residual(values, documents_of(words[:, :-1]) if packed else None, balance, packing)


def values_of(x: Stream) -> jax.Array:
    """The residual stream alone."""
    return x.values if isinstance(x, Residual) else x


def balance_of(x: Stream) -> jax.Array | None:
    """The losses that even out loads so far, if there are such."""
    return x.balance if isinstance(x, Residual) else None


def places_of(words: np.ndarray, *, packed: bool) -> np.ndarray:
    """Place of each token of rows [batch, seq + 1] in its document; a row that is not `packed` is one document."""
    place = np.broadcast_to(np.arange(words.shape[1]), words.shape)
    begins = np.where(words < 0, place, 0) if packed else np.zeros_like(place)
    return place - np.maximum.accumulate(begins, axis=1)


def leave_out(words: np.ndarray, which: np.ndarray, *, packed: bool) -> np.ndarray:
    """Return rows [batch, seq + 1] in which the targets of a mask of that shape do not count; they stay inputs."""
    if packed:
        return np.where(which, words & ~np.int32(_COUNTED), words)
    return np.where(which & (words >= 0), words | np.int32(LEFT_OUT), words)


def pad_batch(batch: np.ndarray, rows: int) -> np.ndarray:
    """Return the batch with rows added at the end that do not count."""
    filling = np.zeros((rows - len(batch), *batch.shape[1:]), batch.dtype)
    return np.concatenate([batch, without_targets(filling, np.ones(len(filling), bool))])


def without_targets(batch: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """The batch, of which some rows, a mask, no longer count."""
    targets = np.where(rows[:, None], np.array(_NO_TARGET, batch.dtype), batch[:, 1:])
    return np.concatenate([batch[:, :1], targets], axis=1)


@typed_arguments
def pack(
    documents: Sequence[Sequence[int]], width: int, targets: Sequence[Sequence[bool]] | None = None
) -> np.ndarray[Any, np.dtype[np.int32]]:
    """One packed row of `width` words that holds documents one behind another, [width] int32.

    `targets` mark the tokens that count (default: all); the rest of the row is a document that does not. Raises
    ``UserError`` where they do not fit, or an id has more than 24 bits.
    """
    lengths = [np.size(ids) for ids in documents]
    if targets is not None and (given := [np.size(counts) for counts in targets]) != lengths:
        raise UserError("lengths of targets", given[:8], f"those of the documents, a list each: {lengths[:8]}")
    row = np.zeros(integer("width", width, 1), np.int32)
    at = 0
    for number, ids in enumerate(documents):
        words = np.asarray(ids, np.int64)
        if len(words) == 0 or words.min() < 0 or words.max() > _ID:
            raise UserError(f"document {number}", list(ids)[:8], f"ids from 0 to {_ID:,}, at least one")
        if at + len(words) > width:
            raise UserError("documents", sum(lengths), f"at most {width} tokens, the width of a row")
        counts = np.ones(len(words), bool) if targets is None else np.asarray(targets[number], bool)
        row[at : at + len(words)] = words | np.where(counts, _COUNTED, 0)
        row[at] |= _START
        at += len(words)
    if at < width:
        row[at] |= _START
    return row
