"""Goldfish loss: targets chosen by a hash of the tokens before them do not count, so no text is learned by heart."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.options import Count, CountOrZero, Settings

_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


@dataclass(frozen=True)
class GoldfishConfig(Settings):
    """Targets left out of the training loss, so that documents which are often repeated are not memorised."""

    table = "goldfish"

    k: CountOrZero = 0
    """Share of the targets that does not count: one of k, chosen by a hash, the same in every epoch; 0: none."""
    h: Count = 13
    """Tokens before a target that its hash is of; the first h of a row or of a packed document count."""

    def check(self) -> None:
        """Raise ``UserError`` for settings that leave no target or contradict each other."""
        if self.k == 1:
            raise UserError("goldfish.k", 1, "0 (every target counts), or from 2 on: one target of k is left out")
        if not self.k and self != GoldfishConfig():
            raise UserError("goldfish.k", 0, "from 2 on where goldfish.h is given")


@typed_arguments
def goldfish(batch: object, k: int, h: int = 13, *, packed: bool = False) -> NDArray[np.int32]:
    """Return a batch in which about one target of `k` does not count.

    A target is left out if the hash of the `h` tokens before it is a multiple of `k`: so of a passage that is repeated
    anywhere in the data the same tokens are never trained. All inputs stay. Source: Hans et al., "Be like a Goldfish,
    Don't Memorize!" (2024), the hash mask; the hash is a polynomial of the ids in 64 bits, mixed as splitmix64 does.

    Args:
        batch: Token ids [rows, seq + 1], or rows of `models.pack`.
        k: Targets of which one is left out, from 2.
        h: Length of the hashed context, in tokens.
        packed: True for rows of `models.pack`, where no context reaches into the document before.

    Returns:
        The batch, int32 of the same shape, for `Trainer.step`.

    Raises:
        UserError: `k` or `h` is out of range, or the batch is not one of whole numbers.
    """
    from axonn_jax.core.models.packed import leave_out, places_of, token_ids  # imports jax, which no other reader needs

    k, h = integer("goldfish.k", k, 2), integer("goldfish.h", h, 1)
    try:
        words = np.asarray(batch)
    except ValueError as error:  # lists of several lengths
        raise UserError("batch", type(batch).__name__, "token ids [rows, seq + 1]") from error
    if words.ndim != 2 or words.dtype.kind not in "iu":
        raise UserError("batch", f"{words.dtype} {list(words.shape)}", "token ids [rows, seq + 1]")
    words = words.astype(np.int32)
    ids = (token_ids(words) if packed else words).astype(np.uint64)
    targets = max(words.shape[1] - h, 0)
    key = np.zeros((len(words), targets), np.uint64)
    # Polynomial of the h ids before each target, computed for all targets at once.
    for place in range(h):
        key = key * _FACTOR + ids[:, place : place + targets] + np.uint64(1)
    # The low bits of the polynomial only depend on the low bits of the ids, so mix before taking the residue.
    for shift, factor in _MIX:
        key = (key ^ (key >> np.uint64(shift))) * np.uint64(factor)
    dropped = np.zeros(words.shape, bool)
    dropped[:, h:] = (key % np.uint64(k) == 0) & (places_of(words, packed=packed)[:, h:] >= h)
    return leave_out(words, dropped, packed=packed)
