"""Batch rows: token ids, target masks, and packed rows of several documents that do not attend to each other."""

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.experts.router import Packing
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.tensor.attention import Documents
from axonn_jax.core.tensor.collectives import mark_varying

Words = TypeVar("Words", jax.Array, np.ndarray)

# Everything about a row is encoded in one int32 array, so that a batch stays a single array whatever reads it. An
# unpacked row holds token ids; negative ids and ids with the bit `IGNORED_TARGET` do not count as targets. A packed
# row holds words: the low 24 bits are the token's id, bit 30 marks a counted target, bit 31 the first token of a
# document.
IGNORED_TARGET = 1 << 29
"""Bit of an id that is an input but not a counted target."""
_ID, _COUNTED, _START = (1 << 24) - 1, 1 << 30, -(1 << 31)
_NO_TARGET = -1


class Residual(NamedTuple):
    """Residual stream together with the values that accompany it through the layers."""

    values: jax.Array
    documents: Documents | None
    """Documents of packed rows; None if rows are not packed."""
    balance: jax.Array | None
    """Balance losses of the layers so far, summed over local tokens, a float32 scalar; None without such losses."""
    packing: Packing | None = None
    """Text mask and target counts for experts; None in a dense model."""

    @property
    def dtype(self) -> jnp.dtype:
        """Dtype of the stream."""
        return self.values.dtype


Stream = jax.Array | Residual
"""Value passed from one layer to the next."""


def token_ids(words: Words) -> Words:
    """Return the token ids of packed words."""
    return words & _ID


def documents_of(words: jax.Array) -> Documents:
    """Return each token's document and position in it, for packed rows [batch, seq]; no collectives."""
    starts = (words < 0).astype(jnp.int32)
    place = lax.broadcasted_iota(jnp.int32, words.shape, 1)
    begins = lax.cummax(jnp.where(starts == 1, place, 0), axis=1)
    return Documents(jnp.cumsum(starts, axis=1), place - begins)


def packing_of(words: jax.Array, *, packed: bool) -> Packing:
    """Return the packing of rows [batch, seq + 1] for experts; no collectives.

    A document without a counted target is padding. An unpacked row is a single document that ends with its last
    nonnegative id.
    """
    targets = jnp.sum(counted_targets(words, packed=packed), axis=1, dtype=jnp.float32)
    if not packed:
        text = lax.cummax((words >= 0).astype(jnp.int32), axis=1, reverse=True) == 1
        return Packing(text[:, :-1] & (targets > 0)[:, None], targets)
    starts = words < 0
    counts = (words & _COUNTED != 0) & ~starts
    number = jnp.cumsum(starts.astype(jnp.int32), axis=1)
    rows = jnp.arange(words.shape[0])[:, None]
    # Documents are numbered from 1 (0: before the first start), so there may be one more than words in the row.
    trained = jnp.zeros((words.shape[0], words.shape[1] + 1), bool).at[rows, number].max(counts)
    text = jnp.take_along_axis(trained, number, axis=1)[:, :-1]
    return Packing(text, targets)


def inputs_of(model: Model, batch: jax.Array) -> jax.Array:
    """Return the input of `embed` for a batch [rows, seq + 1]: the batch if the model `reads_words`, else its ids."""
    return batch if model.reads_words else readable(batch)[:, :-1]


def counted_targets(batch: Words, *, packed: bool) -> Words:
    """Return the mask [..., seq] of counted targets of a batch [..., seq + 1].

    Negative ids do not count, such as -1, or -100 in PyTorch's convention. Neither does the first token of a document,
    whose predecessor belongs to another document.
    """
    targets = batch[..., 1:]
    return (targets >= 0) & ((targets & _COUNTED != 0) if packed else (targets & IGNORED_TARGET == 0))


def readable(batch: jax.Array) -> jax.Array:
    """Return the ids of a batch [rows, seq + 1], with 0 for negative ids and in rows without targets."""
    # No result may depend on rows without targets, and no lookup or loss may see an invalid id.
    counts = jnp.any(counted_targets(batch, packed=False), axis=1, keepdims=True)
    return jnp.where(counts, jnp.maximum(batch & ~IGNORED_TARGET, 0), 0)


def targets_of(model: Model, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the targets of a batch [rows, seq + 1] and their loss weights, [rows, seq] int32 and float32."""
    ids = token_ids(batch) if model.packed else readable(batch)
    return ids[:, 1:], target_weights(batch, model.vocab, packed=model.packed)


def target_weights(batch: jax.Array, vocab: int | None, *, packed: bool) -> jax.Array:
    """Return the loss weight of each target of a batch [rows, seq + 1], [rows, seq] float32; no collectives.

    Counted targets have weight 1, or NaN in a row with an id beyond the vocabulary `vocab` (None: unbounded).
    """
    # NaN makes the loss NaN on every grid, whatever the layers compute from such an id.
    ids = token_ids(batch) if packed else batch & ~IGNORED_TARGET
    in_vocabulary = jnp.bool_(True) if vocab is None else jnp.all(ids < vocab, axis=1, keepdims=True)
    counts = counted_targets(batch, packed=packed)
    return jnp.where(counts, jnp.where(in_vocabulary, 1.0, jnp.nan), 0.0).astype(jnp.float32)


def ids_of(words: jax.Array, *, packed: bool) -> tuple[jax.Array, jax.Array | None]:
    """Return the ids to embed of rows [batch, seq + 1], and positions in their documents if rows are packed."""
    if packed:
        return token_ids(words[:, :-1]), documents_of(words[:, :-1]).positions
    return readable(words)[:, :-1], None


def stream_of(values: jax.Array, words: jax.Array, *, packed: bool, experts: bool, balanced: bool) -> Residual:
    """Return the first layer's input: embedded values, and what layers need to know of rows [batch, seq + 1]."""
    balance = mark_varying(jnp.zeros((), jnp.float32), BATCH_AXES) if balanced else None
    packing = packing_of(words, packed=packed) if experts else None
    return Residual(values, documents_of(words[:, :-1]) if packed else None, balance, packing)


def values_of(x: Stream) -> jax.Array:
    """Return the residual stream without the accompanying values."""
    return x.values if isinstance(x, Residual) else x


def balance_of(x: Stream) -> jax.Array | None:
    """Return the balance losses so far; None if the model has none."""
    return x.balance if isinstance(x, Residual) else None


def places_of(words: np.ndarray, *, packed: bool) -> np.ndarray:
    """Return each token's position in its document, for rows [batch, seq + 1]; an unpacked row is one document."""
    place = np.broadcast_to(np.arange(words.shape[1]), words.shape)
    begins = np.where(words < 0, place, 0) if packed else np.zeros_like(place)
    return place - np.maximum.accumulate(begins, axis=1)


def leave_out(words: np.ndarray, which: np.ndarray, *, packed: bool) -> np.ndarray:
    """Return rows [batch, seq + 1] in which tokens selected by the mask `which` stay inputs but are not targets."""
    if packed:
        return np.where(which, words & ~np.int32(_COUNTED), words)
    return np.where(which & (words >= 0), words | np.int32(IGNORED_TARGET), words)


def pad_batch(batch: np.ndarray, rows: int) -> np.ndarray:
    """Return the batch padded to `rows` rows with rows that have no targets."""
    filling = np.zeros((rows - len(batch), *batch.shape[1:]), batch.dtype)
    return np.concatenate([batch, without_targets(filling, np.ones(len(filling), bool))])


def without_targets(batch: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """Return the batch with all targets removed from the rows selected by the mask `rows`."""
    targets = np.where(rows[:, None], np.array(_NO_TARGET, batch.dtype), batch[:, 1:])
    return np.concatenate([batch[:, :1], targets], axis=1)


def _token_ids(number: int, document: Sequence[int] | np.ndarray) -> NDArray[np.int64]:
    try:
        words = np.asarray(document)
    except ValueError:  # lists of several lengths
        words = np.array(None)
    # Checked before the cast, which would cut fractions off and read a text's digits.
    whole_numbers = words.ndim == 1 and words.dtype.kind in "iu" and words.size > 0
    if not whole_numbers or words.min() < 0 or words.max() > _ID:
        shown = list(document)[:8] if words.ndim == 1 else document
        raise UserError(f"document {number}", shown, f"ids from 0 to {_ID:,}, at least one")
    return words.astype(np.int64)


@typed_arguments
def pack(
    documents: Sequence[Sequence[int] | np.ndarray],
    width: int,
    targets: Sequence[Sequence[bool] | np.ndarray] | None = None,
) -> NDArray[np.int32]:
    """Pack documents one after another into a row of `width` words, [width] int32.

    Args:
        documents: Token ids of each document.
        width: Number of words in the row.
        targets: Masks of the tokens that count as targets, one for each document; by default all tokens count.

    Raises:
        UserError: The documents do not fit, a mask has the wrong length, or an id has more than 24 bits.
    """
    ids = [_token_ids(number, document) for number, document in enumerate(documents)]
    lengths = [len(words) for words in ids]
    if targets is not None and (target_lengths := [np.size(counts) for counts in targets]) != lengths:
        raise UserError("lengths of targets", target_lengths[:8], f"those of the documents, a list each: {lengths[:8]}")
    if sum(lengths) > integer("width", width, 1):
        raise UserError("documents", sum(lengths), f"at most {width} tokens, the width of a row")
    row = np.zeros(width, np.int32)
    at = 0
    for number, words in enumerate(ids):
        counts = np.ones(len(words), bool) if targets is None else np.asarray(targets[number], bool)
        row[at : at + len(words)] = words | np.where(counts, _COUNTED, 0)
        row[at] |= _START
        at += len(words)
    # Whatever remains of the row is a document of its own without targets: padding.
    if at < width:
        row[at] |= _START
    return row
