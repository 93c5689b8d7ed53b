"""The compiled programs of generation: a chunk of a prompt into the cache, and so many tokens of every slot at once."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES
from axonn_jax.inference.attend import FullAttention, Seen, attend_chunk
from axonn_jax.inference.cache import LayerCache, insert, positions, tokens_to_write
from axonn_jax.inference.sampling import SamplingForm, choose, log_probabilities, mark_seen
from axonn_jax.tensor.attention import causal_attention
from axonn_jax.tensor.collectives import live
from axonn_jax.tensor.kernel_choice import EVERY_TOKEN, AttentionRule
from axonn_jax.tensor.loss import masked
from axonn_jax.tensor.params import Params, SplitModule
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.tensor.weight_gather import gather_weights

NO_TOKEN = -2
"""Token id of a decode for an ended slot; -1 is a token from logits that are not finite."""

ROWS: Any = P(BATCH_AXES)
Array = Any
"""Array of jax, or of numpy before the transfer."""


class Slots(NamedTuple):
    """State of the slots, [slots] each, over `data`."""

    last: Array
    """The newest token, which is not in the cache yet."""
    counts: Array
    """Tokens in the cache."""
    left: Array
    """Tokens still to come; 0: the slot is free, or the text has ended."""
    keys: Array
    """[slots, 2] of `Sampling.key`."""
    seen: Any = None
    """[slots, vocab/Gy]: the tokens of the slot's text; None without a reader."""


class Chunk(NamedTuple):
    """A part of a prompt for one slot of each device along `data`, [devices] each."""

    tokens: Array
    """[devices, chunk]."""
    slot: Array
    """Number of the slot among the device's own."""
    start: Array
    """Number of the prompt's tokens before the chunk."""
    valid: Array
    """Number of valid tokens; 0: this device has nothing to do."""


class Copy(NamedTuple):
    """A slot's cache for another slot of the same device along `data`, [devices] each; equal: nothing to do."""

    source: Array
    target: Array


class Programs:
    """Programs of a model on a mesh, each compiled once for a capacity.

    All take (params, extras, caches, ...), use the caches up and give them back first. Only tokens below `limit` are
    drawn; one of `stops` ends a text.
    """

    def __init__(
        self, parts: SplitModule, mesh: Mesh, attention: FullAttention, dtype: Any, stops: tuple[int, ...], limit: int
    ):
        self.parts, self.mesh, self.attention, self.dtype = parts, mesh, attention, jnp.dtype(dtype)
        self.stops, self._limit = stops, limit
        model: Any = parts.merge(parts.params)
        heads, rule = model.blocks[0].attention.qkv.comm, model.blocks[0].attention.rule
        if attention.calibrated and rule._replace(window=0) != EVERY_TOKEN:
            raise UserError("attention", attention.name, f"full for a model with {rule}")
        self.cache_spec = P(BATCH_AXES, ("y", "x") if heads == "gather" else "y")
        self.extra_spec = P(*self.cache_spec[1:])
        self._made: dict[Any, Callable[..., Any]] = {}

    def decode(self, form: SamplingForm, steps: int, *, logs: bool) -> Callable[..., Any]:
        """(..., slots, numbers) -> (caches, tokens [steps, slots], their log-probabilities, zeros without `logs`)."""
        seen: Any = P(BATCH_AXES, "y") if form.penalty else None
        slots = Slots(ROWS, ROWS, ROWS, ROWS, seen)
        local = partial(self._decode, form, steps, logs)
        return self._program((form, steps, logs), local, (slots, P()), (P(), P()))

    def follow(self, steps: int) -> Callable[..., Any]:
        """(..., slots, tokens [steps, slots]) -> (caches, log-probabilities [steps, slots] of these tokens)."""
        given = (Slots(ROWS, ROWS, ROWS, ROWS), P(None, BATCH_AXES))
        return self._program(("follow", steps), partial(self._follow, steps), given, (P(),))

    def prefill(self, *, first: bool) -> Callable[..., Any]:
        """(..., chunk) -> (caches,); a `first` chunk has no tokens before."""
        return self._program(("prefill", first), partial(self._prefill, first), (ROWS,), ())

    def score(self, *, first: bool) -> Callable[..., Any]:
        """(..., chunk, targets) -> (caches, log-probabilities of the targets [devices, chunk])."""
        return self._program(("score", first), partial(self._score, first), (ROWS, ROWS), (P(),))

    def copy(self) -> Callable[..., Any]:
        """(..., copy) -> (caches,)."""
        return self._program("copy", _copied, (ROWS,), ())

    def _program(self, key: Any, local: Callable[..., Any], given: Any, results: Any) -> Callable[..., Any]:
        if key not in self._made:
            specs = (self.parts.specs, self.extra_spec, self.cache_spec, *given)
            region = shard_mapped(local, self.mesh, specs, (self.cache_spec, *results), differentiated=False)
            # As the caches come, or the next call, which gets them back, would be compiled for another layout.
            layouts = (NamedSharding(self.mesh, self.cache_spec), *(None for _ in results))
            self._made[key] = jax.jit(region, donate_argnums=2, out_shardings=layouts)
        return self._made[key]

    def _decode(
        self,
        form: SamplingForm,
        steps: int,
        logs: bool,
        params: Any,
        extras: Any,
        caches: Any,
        slots: Slots,
        numbers: Any,
    ) -> tuple[Any, ...]:
        model = self.parts.merge(params)

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            at, caches, slots, drawn, scores, _ = carry
            logits, caches = self._token(model, extras, caches, slots)
            chosen = choose(logits, form, numbers, slots.keys, slots.counts + 1, slots.seen)
            active = slots.left > 0
            drawn = lax.dynamic_update_index_in_dim(drawn, jnp.where(active, chosen, NO_TOKEN), at, 0)
            if logs:
                scores = lax.dynamic_update_index_in_dim(scores, log_probabilities(logits, chosen), at, 0)
            ended = jnp.isin(chosen, jnp.array((-1, *self.stops)))
            slots = _advanced(slots, chosen, active)
            slots = slots._replace(left=jnp.where(ended, 0, slots.left))
            if slots.seen is not None:
                slots = slots._replace(seen=mark_seen(slots.seen, chosen[:, None], active[:, None]))
            busy, over = slots.left > 0, live(BATCH_AXES)
            goes_on = lax.psum(jnp.sum(busy, dtype=jnp.int32), over) > 0 if over else jnp.any(busy)
            return at + 1, caches, slots, drawn, scores, goes_on

        rows = slots.last.shape[0]
        drawn, scores = jnp.full((steps, rows), NO_TOKEN, jnp.int32), jnp.zeros((steps, rows), jnp.float32)
        carry = (jnp.int32(0), caches, slots, drawn, scores, jnp.bool_(True))
        _, caches, _, drawn, scores, _ = lax.while_loop(lambda c: (c[0] < steps) & c[-1], step, carry)
        return caches, _gathered(drawn, 1), _gathered(scores, 1)

    def _follow(
        self, steps: int, params: Any, extras: Any, caches: Any, slots: Slots, tokens: jax.Array
    ) -> tuple[Any, ...]:
        model = self.parts.merge(params)

        def step(at: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            caches, slots, scores = carry
            logits, caches = self._token(model, extras, caches, slots)
            given = lax.dynamic_index_in_dim(tokens, at, keepdims=False)
            scores = lax.dynamic_update_index_in_dim(scores, log_probabilities(logits, given), at, 0)
            return caches, _advanced(slots, given, slots.left > 0), scores

        carry = (caches, slots, jnp.zeros(tokens.shape, jnp.float32))
        caches, _, scores = lax.fori_loop(0, steps, step, carry)
        return caches, _gathered(scores, 1)

    def _token(self, model: Any, extras: Any, caches: Any, slots: Slots) -> tuple[jax.Array, Any]:
        """The newest token of every slot through all layers: logits [slots, vocab/Gy]."""
        here = positions(slots.counts + 1, caches[0][0].shape[2])

        @cache
        def seen_by(rule: AttentionRule) -> Seen:
            valid = here >= 0
            if rule.window:
                valid &= here > slots.counts[:, None] - rule.window
            tokens = jnp.where(slots.left > 0, jnp.sum(valid, -1, dtype=jnp.int32), 0)
            return Seen(valid, slots.counts % here.shape[1], tokens, rule)

        def attend(
            arrays: LayerCache, extra: Any, q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule
        ) -> Any:
            seen = seen_by(rule)
            k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            new = tokens_to_write(arrays, self.attention.stored(k, v, extra), seen.newest, slots.left > 0)
            out, arrays = self.attention.step(grouped, new, arrays, seen, extra)
            return out.reshape(q.shape), arrays

        x, caches = self._layers(model, slots.last[:, None], slots.counts[:, None], extras, caches, attend)
        return self._logits(model, x)[:, 0], caches

    def _prefill(self, first: bool, params: Any, extras: Any, caches: Any, chunk: Chunk) -> tuple[Any, ...]:
        return (self._chunk(self.parts.merge(params), extras, caches, chunk, first=first)[1],)

    def _score(
        self, first: bool, params: Any, extras: Any, caches: Any, chunk: Chunk, targets: jax.Array
    ) -> tuple[Any, ...]:
        model = self.parts.merge(params)
        x, caches = self._chunk(model, extras, caches, chunk, first=first)
        return caches, _gathered(log_probabilities(self._logits(model, x)[0], targets[0])[None], 0)

    def _chunk(self, model: Any, extras: Any, caches: Any, chunk: Chunk, *, first: bool) -> tuple[jax.Array, Any]:
        """A chunk of a prompt through all layers, [1, chunk, hidden/Gx], its keys and values written down."""
        slot, start, valid = chunk.slot[0], chunk.start[0], chunk.valid[0]

        def attend(
            arrays: LayerCache, extra: Any, q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule
        ) -> Any:
            own = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
            if first:
                out = causal_attention(q, k, v, rule=rule)
            else:
                old = tuple(lax.dynamic_slice_in_dim(a, slot, 1, 0) for a in arrays)
                out = attend_chunk(q, own, self.attention.held(old, extra), start, rule)
            return out, insert(arrays, self.attention.stored(*own, extra), slot, start, valid)

        places = start + jnp.arange(chunk.tokens.shape[1])
        places = jnp.minimum(places, model.shape.seq_len - 1)  # behind the prompt's end anything may stand
        return self._layers(model, chunk.tokens, places[None], extras, caches, attend)

    def _layers(
        self, model: Any, tokens: jax.Array, places: jax.Array, extras: Any, caches: Any, attend: Callable[..., Any]
    ) -> tuple[jax.Array, list[LayerCache]]:
        x, by = model.embed_at(tokens, places, self.dtype)
        new = []
        for block, arrays, extra in zip(model.blocks, caches, extras, strict=True):
            x, arrays = block.attend_by(partial(attend, arrays, extra), x, by)
            x = block.feed_forward(x)
            new.append(arrays)
        return x, new

    def _logits(self, model: Any, x: jax.Array) -> jax.Array:
        return masked(model.logits(x), self._limit)


def _advanced(slots: Slots, token: jax.Array, active: jax.Array) -> Slots:
    """Return the slots with every active one a token further."""
    step = active.astype(jnp.int32)
    last = jnp.where(active, jnp.maximum(token, 0), slots.last)
    return slots._replace(last=last, counts=slots.counts + step, left=slots.left - step)


def _copied(params: Any, extras: Any, caches: list[LayerCache], copy: Copy) -> tuple[list[LayerCache]]:
    def one(array: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(array, copy.source[0], 1, 0)
        return lax.dynamic_update_slice_in_dim(array, row, copy.target[0], 0)

    return ([tuple(one(array) for array in arrays) for arrays in caches],)


def _gathered(x: jax.Array, dim: int) -> jax.Array:
    over = live(BATCH_AXES)
    return x if not over else lax.all_gather(x, over, axis=dim, tiled=True)


def logits(parts: SplitModule, mesh: Mesh, params: Params, tokens: jax.Array) -> jax.Array:
    """Float32 logits [sequences, seq, vocab] of [sequences, seq] tokens, laid out over `data`, `z` and `y`.

    All at once: the reference for generation with a cache.
    """

    def local(params: Params, tokens: jax.Array) -> jax.Array:
        model: Any = parts.merge(params)
        dtype = jnp.dtype("float32")
        return gather_weights(model, dtype, skip=model.layer_list)(tokens, dtype=dtype)  # type: ignore[no-any-return]

    region = shard_mapped(local, mesh, (parts.specs, P(BATCH_AXES)), P(BATCH_AXES, None, "y"))
    return region(params, tokens)  # type: ignore[no-any-return]
