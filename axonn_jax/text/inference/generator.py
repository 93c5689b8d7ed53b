"""Generation in slots: a prompt waits for a free slot and occupies it until its text ends."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock

import jax
import numpy as np
from jax.sharding import PartitionSpec as P
from jax.typing import DTypeLike
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError, integer, typed_arguments
from axonn_jax.core.grid import BATCH_AXES, Grid
from axonn_jax.core.models.comparison import differences
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.tensor.params import place_params
from axonn_jax.text.inference.attend import Extras, FullAttention
from axonn_jax.text.inference.programs import NO_TOKEN, ROWS, Program, Programs
from axonn_jax.text.inference.sampling import Sampling
from axonn_jax.text.inference.slots import (
    NO_KEY,
    Continuation,
    Request,
    Slot,
    checked,
    copy_of,
    ids_of,
    numbered,
    prompt_chunks,
    put,
    shifted_tokens,
    state,
)
from axonn_jax.text.inference.store import CacheStore, check_memory
from axonn_jax.text.inference.weights import floating, load_model, stops_of

SAMPLING = Sampling()
STEPS, _FOLLOW_STEPS = 16, 64
"""Tokens of every slot per call of a program: generated ones, and those of existing texts."""
_FIRST = 256
"""Initial capacity of a cache in tokens, if its text may grow to more."""
Scores = NDArray[np.float32]


class Generator:
    """A model that generates and scores texts on a grid of `data`, `y` and `x`.

    `model` is a `Transformer` or a directory of a run or a Hugging Face model; `base` locates the base model of a run's
    adapters if it has moved. Up to `slots` texts, a multiple of `data`, are generated at a time, each with at most
    `length` tokens including its prompt. Weights and cache are in `dtype`, by default bfloat16 on accelerators and
    float32 elsewhere. Tokens in `stops` (default: the directory's end tokens) end a text; tokens from `limit` on are
    never drawn. The cache takes 2 * layers * kv_heads * head_dim * itemsize bytes per token and slot, split like the
    heads, and grows with the longest text. All methods are collective over the grid's processes, and only one stream or
    list is in progress at a time. Raises ``UserError`` if grid, sizes or memory do not fit.
    """

    @typed_arguments
    def __init__(
        self,
        model: Transformer | str | Path,
        grid: Grid,
        *,
        base: str | Path | None = None,
        slots: int = 8,
        length: int | None = None,
        dtype: DTypeLike | None = None,
        attention: FullAttention | None = None,
        extras: Extras | None = None,
        stops: Sequence[int] | None = None,
        limit: int | None = None,
        steps: int = STEPS,
    ):
        if integer("slots", slots, 1) % (replicas := grid.shape.batch_shards):
            raise UserError("slots", slots, f"a multiple of {grid.shape.batch_rule} = {replicas}, at least 1")
        self.grid, self._dtype, self._lock, self.attention = grid, floating(dtype), Lock(), attention or FullAttention()
        with jax.set_mesh(grid.mesh):  # the script's current mesh may be another one, such as a newer grid's
            self.shape, parts, self.params = load_model(model, grid, self._dtype, base)
        self.length = self.shape.seq_len if length is None else integer("length", length, 2)
        if self.length > self.shape.seq_len:
            raise UserError("length", self.length, f"at least 2 and at most model.seq_len = {self.shape.seq_len}")
        vocab = self.shape.vocab
        limit = vocab if limit is None else min(integer("limit", limit, 1), vocab)
        stops = stops_of(model, vocab) if stops is None else ids_of("stops", stops, vocab)
        self.programs = Programs(parts, grid.mesh, self.attention, self._dtype, stops, limit)
        self.extras: Extras = list(extras) if extras is not None else [None] * self.shape.layers
        """The attention's data for each layer, laid out as `programs.extra_spec`."""
        check_memory(self.shape, self.programs, slots, self.length, grid)
        self._slots = [Slot(at, *divmod(at, slots // replicas)) for at in range(slots)]  # device by device
        self._steps = integer("steps", steps, 1)
        self._store = CacheStore(self.shape, self.programs, self._slots, self.length)

    @typed_arguments
    def generate(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, sampling: Sampling = SAMPLING, samples: int = 1
    ) -> list[list[list[int]]]:
        """Continue every prompt `samples` times and return the new token ids by prompt and sample, with the stop token.

        A text depends only on its prompt, the sampling and its sample number, not on slots, grid or other prompts. A
        repeated prompt gets further samples. Raises ``UserError`` for a prompt that is empty or too long, and for
        weights whose scores are not finite.
        """
        samples, vocab = integer("samples", samples, 1), self.shape.vocab
        requests = numbered(((ids_of("prompt", prompt, vocab), tokens) for prompt in prompts), samples)
        texts: list[list[int]] = [[] for _ in requests]
        for piece in self.stream(requests, sampling):
            texts[piece.request] += piece.ids
        return [texts[at : at + samples] for at in range(0, len(texts), samples)]

    @typed_arguments
    def stream(
        self,
        requests: Sequence[Request],
        sampling: Sampling = SAMPLING,
        *,
        logs: bool = False,
        until: Callable[[int, Continuation], bool] = lambda _, piece: False,
    ) -> Iterator[Continuation]:
        """Yield texts piece by piece, on arrival; a text also ends when `until` (request, piece) returns True.

        The stream occupies the slots from its first piece to its last, or until it is closed or garbage collected.
        """
        requests = [checked(request, self.shape.vocab, self.length) for request in requests]
        with self._use():
            return self._stream(requests, sampling, logs, until)

    def _stream(
        self, requests: Sequence[Request], sampling: Sampling, logs: bool, until: Callable[[int, Continuation], bool]
    ) -> Iterator[Continuation]:
        waiting = deque(enumerate(requests))
        decode = self.programs.decode(sampling.form, self._steps, logs=logs)
        vocab = self.params["embedding.table"].shape[0] if sampling.form.penalty else 0
        with self._use():
            for slot in self._slots:
                slot.remaining = 0
            while waiting or any(slot.remaining for slot in self._slots):
                with jax.set_mesh(self.grid.mesh):
                    self._fill(waiting, sampling)
                    active = [slot for slot in self._slots if slot.remaining]
                    self._store.reserve(max(slot.count + min(self._steps, slot.remaining) for slot in active))
                    drawn, logs_of = self._call(decode, state(self._slots, self.grid.mesh, vocab), sampling.numbers)
                for slot in active:
                    ids = [int(token) for token in drawn[:, slot.at] if token != NO_TOKEN]
                    if -1 in ids:
                        raise UserError("model", "its weights", "weights that give finite scores for the next token")
                    piece = self._advanced(slot, ids, logs_of[: len(ids), slot.at].tolist())
                    if not piece.ended and until(slot.request, piece):
                        piece, slot.remaining = piece._replace(ended=True), 0
                    yield piece

    @typed_arguments
    def update(self, model: Transformer | str | Path) -> None:
        """Replace the weights, for example with a trainer's after a step, without compiling; `extras` stay.

        Raises ``UserError`` if the model has other sizes.
        """
        with self._use(reads=False), jax.set_mesh(self.grid.mesh):
            loaded = load_model(model, self.grid, self._dtype)
            if wrong := differences(loaded.shape, self.shape):
                raise UserError("model", ", ".join(wrong), "a model of the sizes with which the generator was made")
            self.params = place_params(loaded.params, self.programs.parts.specs, self.grid.mesh)
            self._store.release()

    def release(self) -> None:
        """Free the memory of weights and cache until the next `update`."""
        with self._use(reads=False):
            self.params = {}
            self._store.release()

    @typed_arguments
    def score(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        """Return the log-probabilities, in nats, of each text's tokens except the first: [tokens - 1] each.

        Full attention processes texts in chunks, one per device along `data`; others go token by token, one per slot.
        """
        texts = [ids_of("text", text, self.shape.vocab) for text in texts]
        for text in texts:
            if not 2 <= len(text) <= self.length:
                raise UserError("text", f"{len(text)} tokens", f"from 2 to length = {self.length} tokens")
        with self._use(), jax.set_mesh(self.grid.mesh):
            dense = self.attention.name == "full"
            score, count = (self._score, self.grid.shape.batch_shards) if dense else (self._follow, len(self._slots))
            return [scores for at in range(0, len(texts), count) for scores in score(texts[at : at + count])]

    @contextmanager
    def _use(self, *, reads: bool = True) -> Iterator[None]:
        """Take the slots; raise ``UserError`` if another stream has them, or if data that `reads` needs is missing."""
        if reads and self.attention.calibrated and any(extra is None for extra in self.extras):
            accepted = f"components of every layer for {self.attention.name} (axonn_jax.text.loki)"
            raise UserError("extras", None, accepted)
        if reads and (not self.params or any(value.is_deleted() for value in self.params.values())):
            raise UserError("model", "deleted", "a model of arrays not donated by a trainer: update(trainer.model)")
        if not self._lock.acquire(blocking=False):
            raise UserError("generator", "in use", "a generator without an unfinished stream")
        try:
            yield
        finally:
            self._lock.release()

    def _call(self, program: Program, *inputs: object) -> Sequence[np.ndarray]:
        return self._store.call(program, self.params, self.extras, *inputs)

    def _advanced(self, slot: Slot, ids: list[int], logs: list[float]) -> Continuation:
        slot.count, slot.remaining, slot.last = slot.count + len(ids), slot.remaining - len(ids), ids[-1]
        slot.text += ids
        if slot.count > self._store.capacity:  # the ring has wrapped around
            slot.cached = ()
        if ids[-1] in self.programs.stops:
            slot.remaining = 0
        return Continuation(slot.request, ids, logs, not slot.remaining)

    def _fill(self, waiting: "deque[tuple[int, Request]]", sampling: Sampling) -> None:
        """Assign free slots to waiting requests, and cache their prompts except for the last token."""
        # A prompt that a slot of the same device has cached, or is about to, is copied rather than computed.
        fresh, twins = list[Slot](), list[tuple[Slot, Slot]]()
        for slot in self._slots:
            if slot.remaining or not waiting:
                continue
            slot.request, (prompt, slot.remaining, sample) = waiting.popleft()
            slot.count, slot.last, slot.text = len(prompt) - 1, prompt[-1], list(prompt)
            slot.key = sampling.key(sample, prompt).tolist()
            self._store.reserve(min(len(prompt) + slot.remaining, max(2 * len(prompt), _FIRST)))
            local = [near for near in self._slots if near.device == slot.device]
            if source := next((near for near in local if near.cached == prompt), None):
                self._copy(source, slot)
                slot.cached = prompt
            elif source := next((near for near in fresh if near in local and near.text == slot.text), None):
                twins.append((source, slot))
            else:
                fresh.append(slot)
        while fresh:
            now = [next((s for s in fresh if s.device == at), None) for at in range(self.grid.shape.batch_shards)]
            self._prefill(now)
            fresh = [slot for slot in fresh if slot not in now]
        for source, slot in twins:
            self._copy(source, slot)
            slot.cached = source.cached

    def _copy(self, source: Slot, target: Slot) -> None:
        if source is not target:
            self._call(self.programs.copy(), copy_of(source, target, self.grid.shape.batch_shards, self.grid.mesh))

    def _prefill(self, slots: Sequence[Slot | None]) -> None:
        new = [slot for slot in slots if slot is not None]
        if self.attention.dense_prompt:
            for start, _, chunk in prompt_chunks(slots, self._store.ring, self.grid.mesh):
                self._call(self.programs.prefill(first=start == 0), chunk)
        else:
            self._feed([(slot, list(slot.text)) for slot in new])
        for slot in new:
            reusable = self.attention.dense_prompt and slot.count <= self._store.capacity
            slot.cached = tuple(slot.text) if reusable else ()

    def _score(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        slots: list[Slot | None] = [None] * self.grid.shape.batch_shards
        for device, text in enumerate(texts):
            slots[device] = slot = next(slot for slot in self._slots if slot.device == device)
            slot.text, slot.cached = list(text), ()
        self._store.reserve(max(map(len, texts)) - 1)
        scores = []
        for start, length, chunk in prompt_chunks(slots, self._store.ring, self.grid.mesh):
            targets = np.zeros((len(slots), length), np.int32)
            for row, text in zip(targets, texts, strict=False):
                part = text[start + 1 : start + 1 + length]
                row[: len(part)] = part
            inputs = chunk, put(targets, ROWS, self.grid.mesh)
            scores.append(self._call(self.programs.score(first=start == 0), *inputs)[0])
        return [row[: len(text) - 1] for row, text in zip(np.concatenate(scores, 1), texts, strict=False)]

    def _follow(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        for slot in self._slots:
            slot.remaining, slot.cached, slot.key = 0, (), NO_KEY
        self._store.reserve(max(map(len, texts)) - 1)
        scores = self._feed(pairs := list(zip(self._slots, texts, strict=False)))
        return [scores[: len(text) - 1, slot.at] for slot, text in pairs]

    def _feed(self, pairs: Sequence[tuple[Slot, Sequence[int]]]) -> Scores:
        """Feed texts to slots token by token, without their last tokens; return scores [tokens, slots]."""
        # Slots that are not fed must not advance: with nothing remaining they idle.
        remaining = [slot.remaining for slot in self._slots]
        for slot in self._slots:
            slot.remaining = 0
        for slot, text in pairs:
            slot.count, slot.remaining, slot.last = 0, len(text) - 1, text[0]
        tokens = shifted_tokens(pairs, len(self._slots), _FOLLOW_STEPS)
        scores = [np.zeros((0, len(self._slots)), np.float32)]
        for part in (tokens[start : start + _FOLLOW_STEPS] for start in range(0, len(tokens), _FOLLOW_STEPS)):
            inputs = state(self._slots, self.grid.mesh), put(part, P(None, BATCH_AXES), self.grid.mesh)
            scores.append(self._call(self.programs.follow(_FOLLOW_STEPS), *inputs)[0])
            for slot, _ in pairs:
                if steps := min(slot.remaining, _FOLLOW_STEPS):
                    slot.count, slot.remaining = slot.count + steps, slot.remaining - steps
                    slot.last = int(part[steps - 1, slot.at])
        for slot, count in zip(self._slots, remaining, strict=True):
            slot.remaining = count
        return np.concatenate(scores)
