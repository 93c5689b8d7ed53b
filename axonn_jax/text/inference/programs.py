"""Compiled programs of generation: prefill of a prompt's chunk, and decoding of several tokens in every slot."""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.tensor.attention import causal_attention
from axonn_jax.core.tensor.collectives import live
from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN, AttentionRule
from axonn_jax.core.tensor.loss import masked
from axonn_jax.core.tensor.params import Params, SplitModule
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import gather_weights
from axonn_jax.text.inference.attend import Attended, Extras, FullAttention, Seen, attend_chunk
from axonn_jax.text.inference.cache import Caches, LayerCache, insert, positions, tokens_to_write
from axonn_jax.text.inference.sampling import SamplingForm, choose, log_probabilities, mark_seen

NO_TOKEN = -2
"""Token id that decoding returns for a finished slot; -1 marks logits that are not finite."""

ROWS = P(BATCH_AXES)
Program = Callable[..., tuple[Caches, *tuple[jax.Array, ...]]]
"""Compiled function of `Programs`, to the new caches and other results."""
Attend = Callable[..., Attended]
Array = Any
"""jax array, or numpy array before the transfer."""


class Slots(NamedTuple):
    """State of the slots, [slots] each, sharded over `data`."""

    last: Array
    """The newest token, which is not in the cache yet."""
    counts: Array
    """Number of tokens in the cache."""
    remaining: Array
    """Number of tokens still to generate; 0 if the slot is free or its text has ended."""
    keys: Array
    """[slots, 2] of `Sampling.key`."""
    seen: Any = None
    """[slots, vocab/Gy]: mask of the tokens in the slot's text; None if sampling does not need it."""


class Chunk(NamedTuple):
    """Part of a prompt, for one slot on each device along `data`; [devices] each."""

    tokens: Array
    """[devices, chunk]."""
    slot: Array
    """Index of the slot on its device."""
    start: Array
    """Number of the prompt's tokens before the chunk."""
    valid: Array
    """Number of valid tokens; 0 if the device has nothing to do."""


class Copy(NamedTuple):
    """Copy of a slot's cache to another slot of its device along `data`, [devices] each; nothing to do if equal."""

    source: Array
    target: Array


class Programs:
    """Programs of a model on a mesh, each compiled once per cache capacity.

    All take (params, extras, caches, ...), donate the caches and return the new ones as their first result.

    Args:
        parts: The model, with abstract parameters.
        mesh: Mesh with axes `data`, `y` and `x`.
        attention: Attention to the cache.
        dtype: Dtype of activations and cache.
        stops: Tokens that end a text.
        limit: Only tokens below are drawn.

    Raises:
        UserError: The attention needs calibration, and the model's attention has a rule that it does not support.
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
        self._compiled: dict[object, Program] = {}

    def decode(self, form: SamplingForm, steps: int, *, logs: bool) -> Program:
        """Return (..., slots, numbers) -> (caches, tokens [steps, slots], log-probabilities; zeros without `logs`).

        Collectives: those of the layers and of `sampling.choose`, and a 4-byte all-reduce over `data`, per token.
        """
        seen = P(BATCH_AXES, "y") if form.penalty else None
        slots = Slots(ROWS, ROWS, ROWS, ROWS, seen)
        local = partial(self._decode, form, steps, logs)
        return self._program((form, steps, logs), local, (slots, P()), (P(), P()))

    def follow(self, steps: int) -> Program:
        """Return (..., slots, tokens [steps, slots]) -> (caches, the tokens' log-probabilities [steps, slots])."""
        specs = (Slots(ROWS, ROWS, ROWS, ROWS), P(None, BATCH_AXES))
        return self._program(("follow", steps), partial(self._follow, steps), specs, (P(),))

    def prefill(self, *, first: bool) -> Program:
        """Return (..., chunk) -> (caches,); `first` for chunks that start their prompts."""
        return self._program(("prefill", first), partial(self._prefill, first), (ROWS,), ())

    def score(self, *, first: bool) -> Program:
        """Return (..., chunk, targets) -> (caches, the targets' log-probabilities [devices, chunk])."""
        return self._program(("score", first), partial(self._score, first), (ROWS, ROWS), (P(),))

    def copy(self) -> Program:
        """Return (..., copy) -> (caches,)."""
        return self._program("copy", _copied, (ROWS,), ())

    def _program(
        self, key: object, local: Callable[..., Any], inputs: Sequence[object], results: Sequence[object]
    ) -> Program:
        if key not in self._compiled:
            specs = (self.parts.specs, self.extra_spec, self.cache_spec, *inputs)
            region = shard_mapped(local, self.mesh, specs, (self.cache_spec, *results), differentiated=False)
            # Pin the caches to their input layout: the next call takes them, and would compile again for another one.
            layouts = (NamedSharding(self.mesh, self.cache_spec), *(None for _ in results))
            self._compiled[key] = jax.jit(region, donate_argnums=2, out_shardings=layouts)
        return self._compiled[key]

    def _decode(
        self,
        form: SamplingForm,
        steps: int,
        logs: bool,
        params: Params,
        extras: Extras,
        caches: Caches,
        slots: Slots,
        numbers: jax.Array,
    ) -> tuple[Caches, jax.Array, jax.Array]:
        model = self.parts.merge(params)

        def step(carry: tuple[Any, ...]) -> tuple[Any, ...]:
            at, caches, slots, drawn, scores, _ = carry
            logits, caches = self._token(model, extras, caches, slots)
            token = choose(logits, form, numbers, slots.keys, slots.counts + 1, slots.seen)
            active = slots.remaining > 0
            drawn = lax.dynamic_update_index_in_dim(drawn, jnp.where(active, token, NO_TOKEN), at, 0)
            if logs:
                scores = lax.dynamic_update_index_in_dim(scores, log_probabilities(logits, token), at, 0)
            ended = jnp.isin(token, jnp.array((-1, *self.stops)))
            slots = _advanced(slots, token, active)
            slots = slots._replace(remaining=jnp.where(ended, 0, slots.remaining))
            if slots.seen is not None:
                slots = slots._replace(seen=mark_seen(slots.seen, token[:, None], active[:, None]))
            # All devices must leave the loop at the same step, since its body contains collectives.
            busy, over = slots.remaining > 0, live(BATCH_AXES)
            goes_on = lax.psum(jnp.sum(busy, dtype=jnp.int32), over) > 0 if over else jnp.any(busy)
            return at + 1, caches, slots, drawn, scores, goes_on

        rows = slots.last.shape[0]
        drawn, scores = jnp.full((steps, rows), NO_TOKEN, jnp.int32), jnp.zeros((steps, rows), jnp.float32)
        carry = (jnp.int32(0), caches, slots, drawn, scores, jnp.bool_(True))
        _, caches, _, drawn, scores, _ = lax.while_loop(lambda c: (c[0] < steps) & c[-1], step, carry)
        return caches, _gathered(drawn, 1), _gathered(scores, 1)

    def _follow(
        self, steps: int, params: Params, extras: Extras, caches: Caches, slots: Slots, tokens: jax.Array
    ) -> tuple[Caches, jax.Array]:
        model = self.parts.merge(params)

        def step(at: jax.Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
            caches, slots, scores = carry
            logits, caches = self._token(model, extras, caches, slots)
            token = lax.dynamic_index_in_dim(tokens, at, keepdims=False)
            scores = lax.dynamic_update_index_in_dim(scores, log_probabilities(logits, token), at, 0)
            return caches, _advanced(slots, token, slots.remaining > 0), scores

        carry = (caches, slots, jnp.zeros(tokens.shape, jnp.float32))
        caches, _, scores = lax.fori_loop(0, steps, step, carry)
        return caches, _gathered(scores, 1)

    def _token(self, model: Any, extras: Extras, caches: Caches, slots: Slots) -> tuple[jax.Array, Caches]:
        """Run the newest token of every slot through all layers; return logits [slots, vocab/Gy] and the caches."""
        position = positions(slots.counts + 1, caches[0][0].shape[2])

        @cache  # layers with the same rule share the mask
        def seen_by(rule: AttentionRule) -> Seen:
            valid = position >= 0
            if rule.window:
                valid &= position > slots.counts[:, None] - rule.window
            tokens = jnp.where(slots.remaining > 0, jnp.sum(valid, -1, dtype=jnp.int32), 0)
            return Seen(valid, slots.counts % position.shape[1], tokens, rule)

        def attend(
            arrays: LayerCache, extra: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule
        ) -> Attended:
            seen = seen_by(rule)
            k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
            grouped = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
            new = tokens_to_write(arrays, self.attention.stored(k, v, extra), seen.newest, slots.remaining > 0)
            out, arrays = self.attention.step(grouped, new, arrays, seen, extra)
            return out.reshape(q.shape), arrays

        x, caches = self._layers(model, slots.last[:, None], slots.counts[:, None], extras, caches, attend)
        return self._logits(model, x)[:, 0], caches

    def _prefill(self, first: bool, params: Params, extras: Extras, caches: Caches, chunk: Chunk) -> tuple[Caches]:
        return (self._chunk(self.parts.merge(params), extras, caches, chunk, first=first)[1],)

    def _score(
        self, first: bool, params: Params, extras: Extras, caches: Caches, chunk: Chunk, targets: jax.Array
    ) -> tuple[Caches, jax.Array]:
        model = self.parts.merge(params)
        x, caches = self._chunk(model, extras, caches, chunk, first=first)
        return caches, _gathered(log_probabilities(self._logits(model, x)[0], targets[0])[None], 0)

    def _chunk(
        self, model: Any, extras: Extras, caches: Caches, chunk: Chunk, *, first: bool
    ) -> tuple[jax.Array, Caches]:
        """Run a chunk of a prompt through all layers; return [1, chunk, hidden/Gx] and the caches."""
        slot, start, valid = chunk.slot[0], chunk.start[0], chunk.valid[0]

        def attend(
            arrays: LayerCache, extra: jax.Array | None, q: jax.Array, k: jax.Array, v: jax.Array, rule: AttentionRule
        ) -> Attended:
            new = k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
            if first:
                out = causal_attention(q, k, v, rule=rule)
            else:
                old = tuple(lax.dynamic_slice_in_dim(a, slot, 1, 0) for a in arrays)
                out = attend_chunk(q, new, self.attention.keys_and_values(old, extra), start, rule)
            return out, insert(arrays, self.attention.stored(*new, extra), slot, start, valid)

        places = start + jnp.arange(chunk.tokens.shape[1])
        # Padding may exceed the sequence length; its results are discarded, but its position must be a valid index.
        places = jnp.minimum(places, model.shape.seq_len - 1)
        return self._layers(model, chunk.tokens, places[None], extras, caches, attend)

    def _layers(
        self, model: Any, tokens: jax.Array, places: jax.Array, extras: Extras, caches: Caches, attend: Attend
    ) -> tuple[jax.Array, Caches]:
        x, by = model.embed_at(tokens, places, self.dtype)
        new_caches = []
        for block, arrays, extra in zip(model.blocks, caches, extras, strict=True):
            x, arrays = block.attend_by(partial(attend, arrays, extra), x, by)
            x = block.feed_forward(x)
            new_caches.append(arrays)
        return x, new_caches

    def _logits(self, model: Any, x: jax.Array) -> jax.Array:
        return masked(model.logits(x), self._limit)


def _advanced(slots: Slots, token: jax.Array, active: jax.Array) -> Slots:
    """Advance every active slot by one token."""
    step = active.astype(jnp.int32)
    # -1 marks logits that are not finite; the embedding needs a valid id until the host raises the error.
    last = jnp.where(active, jnp.maximum(token, 0), slots.last)
    return slots._replace(last=last, counts=slots.counts + step, remaining=slots.remaining - step)


def _copied(params: Params, extras: Extras, caches: Caches, copy: Copy) -> tuple[Caches]:
    def copy_slot(array: jax.Array) -> jax.Array:
        row = lax.dynamic_slice_in_dim(array, copy.source[0], 1, 0)
        return lax.dynamic_update_slice_in_dim(array, row, copy.target[0], 0)

    return ([tuple(copy_slot(array) for array in arrays) for arrays in caches],)


def _gathered(x: jax.Array, dim: int) -> jax.Array:
    over = live(BATCH_AXES)
    return x if not over else lax.all_gather(x, over, axis=dim, tiled=True)


def logits(parts: SplitModule, mesh: Mesh, params: Params, tokens: jax.Array) -> jax.Array:
    """Return float32 logits [sequences, seq, vocab], sharded over `data`, `z` and `y`, of [sequences, seq] tokens.

    It runs full sequences without a cache: the reference for generation with one.
    """

    def local(params: Params, tokens: jax.Array) -> jax.Array:
        model: Any = parts.merge(params)
        dtype = jnp.dtype("float32")
        return gather_weights(model, dtype, skip=model.layer_list)(tokens, dtype=dtype)  # type: ignore[no-any-return]

    region = shard_mapped(local, mesh, (parts.specs, P(BATCH_AXES)), P(BATCH_AXES, None, "y"))
    return region(params, tokens)  # type: ignore[no-any-return]
