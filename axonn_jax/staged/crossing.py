"""Messages between stages: the values that cross a cut, in one array."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from axonn_jax.staged.loss_trace import Replicas


@dataclass(frozen=True)
class Crossing:
    """Form of all messages across one cut: a channel carries one array of a fixed form, both ways.

    A single value of a floating-point type crosses as it is. Anything else crosses as the bytes of its values, row by
    row, so that each device sends the rows that it has.
    """

    replicas: Replicas
    rows: int
    """Rows of a microbatch on one replica."""
    trees: tuple[tuple[Any, ...], ...]
    """Shapes and dtypes of the values of each kind of message: activations, their gradients, those of evaluations."""

    @property
    def plain(self) -> bool:
        """True if every message is one floating-point array of the same form."""
        first = [_form(aval) for aval in self.trees[0]]
        same = all([_form(aval) for aval in tree] == first for tree in self.trees)
        return same and len(first) == 1 and jnp.issubdtype(self.trees[0][0].dtype, jnp.floating)

    @property
    def struct(self) -> jax.ShapeDtypeStruct:
        """Shape and layout of the array, [replicas, rows, ...]."""
        if self.plain:
            aval = self.trees[0][0]
        else:
            width = max(sum(self._width(aval) for aval in tree) for tree in self.trees)
            aval = jax.ShapeDtypeStruct((self.rows, max(1, width)), jnp.uint8)
        over = self.replicas.row_axes(self.rows) if aval.shape[:1] == (self.rows,) else None
        return self.replicas.by_replica(aval, P(over) if over else P())

    def pack(self, values: Sequence[jax.Array]) -> jax.Array:
        """Return one replica's array of some values, inside a program."""
        if self.plain:
            return values[0]
        parts = [self._to_bytes(value) for value in values]
        padding = self.struct.shape[2] - sum(part.shape[1] for part in parts)
        return jnp.concatenate([*parts, jnp.zeros((self.rows, padding), jnp.uint8)], 1)

    def unpack(self, message: jax.Array, tree: Sequence[Any]) -> list[jax.Array]:
        """Return the values of one replica's array, given their shapes and dtypes."""
        if self.plain:
            return [message]
        values, at = [], 0
        for aval in tree:
            width = self._width(aval)
            values.append(_from_bytes(message[:, at : at + width], aval))
            at += width
        return values

    def _width(self, aval: Any) -> int:
        """Return the bytes a row of a value; one that has no rows is spread over all of them."""
        words = _words(aval)
        return -(-prod(words.shape) * words.dtype.itemsize // self.rows)

    def _to_bytes(self, value: jax.Array) -> jax.Array:
        value = jax.random.key_data(value) if _is_key(value) else value
        value = value.astype(jnp.uint8) if value.dtype == jnp.bool_ else value
        words = lax.bitcast_convert_type(value, jnp.uint8)
        if value.shape[:1] == (self.rows,):  # so that rows stay on their devices
            return words.reshape(self.rows, -1)
        words = words.reshape(-1)
        return jnp.pad(words, (0, -words.size % self.rows)).reshape(self.rows, -1)


def _from_bytes(words: jax.Array, aval: Any) -> jax.Array:
    stored = _words(aval)
    tail = (stored.dtype.itemsize,) if stored.dtype.itemsize > 1 else ()
    rows = stored.shape[:1] == words.shape[:1]
    if rows:
        shaped = words.reshape(*stored.shape, *tail)
    else:
        shaped = words.reshape(-1)[: prod(stored.shape) * stored.dtype.itemsize].reshape(*stored.shape, *tail)
    value = lax.bitcast_convert_type(shaped, stored.dtype)
    if _is_key(aval):
        return jax.random.wrap_key_data(value, impl=str(jax.random.key_impl(jax.random.key(0))))
    return value.astype(aval.dtype)


def _words(aval: Any) -> Any:
    """Return the form of a value's bits."""
    if _is_key(aval):
        return jax.eval_shape(jax.random.key_data, aval)
    return jax.ShapeDtypeStruct(aval.shape, jnp.uint8 if aval.dtype == jnp.bool_ else aval.dtype)


def _form(aval: Any) -> tuple[Any, ...]:
    return tuple(aval.shape), str(aval.dtype)


def _is_key(value: Any) -> bool:
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))
