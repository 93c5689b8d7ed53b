"""Packing of rows for experts: tokens of text, and the number of targets in each row."""

from typing import NamedTuple

import jax
from jax import lax

from axonn_jax.tensor.collectives import SEQUENCE_AXIS, axis_index, axis_size


class Packing(NamedTuple):
    """Text and targets of a device's rows; every device along `y` has whole rows."""

    text: jax.Array
    """True for tokens of documents of which any token is trained on, [rows, seq]; all else is padding."""
    targets: jax.Array
    """Return the number of counted targets of each row, [rows] float32."""

    def here(self, *, sequence_split: bool) -> jax.Array:
        """`text` of the tokens of this device, [rows, seq/Gy] where the sequence is split; no collectives."""
        if not sequence_split:
            return self.text
        size = self.text.shape[1] // axis_size(SEQUENCE_AXIS)
        return lax.dynamic_slice_in_dim(self.text, axis_index(SEQUENCE_AXIS) * size, size, 1)
