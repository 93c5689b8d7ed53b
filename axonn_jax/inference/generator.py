"""Generation in slots: a prompt waits for a free slot, and leaves the slot at the text's end."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError, integer, typed_arguments
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.inference.attend import FullAttention
from axonn_jax.inference.programs import NO_TOKEN, ROWS, Programs
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import (
    NO_KEY,
    Continuation,
    Request,
    Slot,
    checked,
    copy_of,
    ids_of,
    numbered,
    parts_of,
    put,
    state,
    tokens_behind,
)
from axonn_jax.inference.store import CacheStore, check_memory
from axonn_jax.inference.weights import floating, load_model, stops_of
from axonn_jax.models.declared.comparison import differences
from axonn_jax.models.transformer import Transformer
from axonn_jax.tensor.params import placed

SAMPLING = Sampling()
STEPS, _TOLD = 16, 64
"""Tokens of every slot from one call of a program, and for one on given texts."""
_FIRST = 256
"""First capacity of a cache in tokens, where more may come."""
Scores = np.ndarray[Any, np.dtype[np.float32]]


class Generator:
    """A model that generates and scores texts on a grid of `data`, `y` and `x`.

    `model` is a `Transformer` or a directory: a run's or a Hugging Face model's; `base` is that of a run's adapters if
    it has moved. `slots` texts are made at a time, a multiple of `data`, each of at most `length` tokens, prompt
    included. Weights and cache are in `dtype`: by default bfloat16 on accelerators, else float32. Tokens in `stops` end
    a text (default: the directory's end tokens); none of `limit` or above is drawn. A cache has 2 * layers * kv_heads *
    head_dim * itemsize bytes a token and slot, split as heads are, and grows with the longest text. Collective over the
    grid's processes, one stream or list at a time. Raises ``UserError`` where grid, sizes or memory do not fit.
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
        dtype: Any = None,
        attention: FullAttention | None = None,
        extras: Sequence[Any] | None = None,
        stops: Sequence[int] | None = None,
        limit: int | None = None,
        steps: int = STEPS,
    ):
        if integer("slots", slots, 1) % (replicas := grid.shape.batch_shards):
            raise UserError("slots", slots, f"a multiple of {grid.shape.batch_rule} = {replicas}, at least 1")
        self.grid, self._dtype, self._used, self.attention = grid, floating(dtype), Lock(), attention or FullAttention()
        with jax.set_mesh(grid.mesh):  # the newest grid of a script, or a mesh of its own, may be another
            self.shape, parts, self.params = load_model(model, grid, self._dtype, base)
        self.length = self.shape.seq_len if length is None else integer("length", length, 2)
        if self.length > self.shape.seq_len:
            raise UserError("length", self.length, f"at least 2 and at most model.seq_len = {self.shape.seq_len}")
        vocab = self.shape.vocab
        limit = vocab if limit is None else min(integer("limit", limit, 1), vocab)
        stops = stops_of(model, vocab) if stops is None else ids_of("stops", stops, vocab)
        self.programs = Programs(parts, grid.mesh, self.attention, self._dtype, stops, limit)
        self.extras: Sequence[Any] = list(extras) if extras is not None else [None] * self.shape.layers
        """Data of the attention for each layer, laid out as `programs.extra_spec`."""
        check_memory(self.shape, self.programs, slots, self.length, grid)
        self._slots = [Slot(at, *divmod(at, slots // replicas)) for at in range(slots)]  # device by device
        self._steps = integer("steps", steps, 1)
        self._store = CacheStore(self.shape, self.programs, self._slots, self.length)

    @typed_arguments
    def generate(
        self, prompts: Sequence[Sequence[int]], *, tokens: int, sampling: Sampling = SAMPLING, samples: int = 1
    ) -> list[list[list[int]]]:
        """Continue every prompt `samples` times: the new token ids, by prompt and sample, a stop included.

        A text depends on its prompt, the sampling and the sample's number alone, not on slots, grid or other prompts. A
        repeated prompt gets further samples. Raises ``UserError`` for an empty or too long prompt, or weights without
        finite scores.
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
        """Yield texts piece by piece, on arrival; a text ends when `until` (request, piece) returns True.

        The stream has the slots from the first piece to the last, or until closed or unreferenced.
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
                slot.left = 0
            while waiting or any(slot.left for slot in self._slots):
                with jax.set_mesh(self.grid.mesh):
                    self._fill(waiting, sampling)
                    active = [slot for slot in self._slots if slot.left]
                    self._store.reserve(max(slot.count + min(self._steps, slot.left) for slot in active))
                    drawn, logs_of = self._call(decode, state(self._slots, self.grid.mesh, vocab), sampling.numbers)
                for slot in active:
                    ids = [int(token) for token in drawn[:, slot.at] if token != NO_TOKEN]
                    if -1 in ids:
                        raise UserError("model", "its weights", "weights that give finite scores for the next token")
                    piece = self._advanced(slot, ids, logs_of[: len(ids), slot.at].tolist())
                    if not piece.ended and until(slot.request, piece):
                        piece, slot.left = piece._replace(ended=True), 0
                    yield piece

    @typed_arguments
    def update(self, model: Transformer | str | Path) -> None:
        """Take other weights for a model of the same sizes, such as a trainer's after a step; compiles nothing again.

        Raises ``UserError`` where the sizes differ. An attention's `extras` stay.
        """
        with self._use(reads=False), jax.set_mesh(self.grid.mesh):
            loaded = load_model(model, self.grid, self._dtype)
            if wrong := differences(loaded.shape, self.shape):
                raise UserError("model", ", ".join(wrong), "a model of the sizes with which the generator was made")
            self.params = placed(loaded.params, self.programs.parts.specs, self.grid.mesh)
            self._store.release()

    def release(self) -> None:
        """Give the memory of weights and cache back, until `update` takes weights again."""
        with self._use(reads=False):
            self.params = {}
            self._store.release()

    @typed_arguments
    def score(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        """Return log-probabilities, in nats, of each text's tokens but the first, which has none: [tokens - 1] each.

        Full attention takes texts in chunks, one a device along `data`; any other token by token, one a slot.
        """
        texts = [ids_of("text", text, self.shape.vocab) for text in texts]
        for text in texts:
            if not 2 <= len(text) <= self.length:
                raise UserError("text", f"{len(text)} tokens", f"from 2 to length = {self.length} tokens")
        with self._use(), jax.set_mesh(self.grid.mesh):
            dense = self.attention.name == "full"
            score, each = (self._score, self.grid.shape.batch_shards) if dense else (self._follow, len(self._slots))
            return [scores for at in range(0, len(texts), each) for scores in score(texts[at : at + each])]

    @contextmanager
    def _use(self, *, reads: bool = True) -> Iterator[None]:
        """Take the slots; raise ``UserError`` if another stream has the slots, or `reads` finds data missing."""
        if reads and self.attention.calibrated and any(extra is None for extra in self.extras):
            accepted = f"components of every layer for {self.attention.name} (axonn_jax.loki)"
            raise UserError("extras", None, accepted)
        if reads and (not self.params or any(value.is_deleted() for value in self.params.values())):
            raise UserError("model", "deleted", "a model of arrays not donated by a trainer: update(trainer.model)")
        if not self._used.acquire(blocking=False):
            raise UserError("generator", "in use", "a generator without an unfinished stream")
        try:
            yield
        finally:
            self._used.release()

    def _call(self, program: Any, *given: Any) -> Sequence[Any]:
        return self._store.call(program, self.params, self.extras, *given)

    def _advanced(self, slot: Slot, ids: list[int], logs: list[float]) -> Continuation:
        slot.count, slot.left, slot.last = slot.count + len(ids), slot.left - len(ids), ids[-1]
        slot.text += ids
        if slot.count > self._store.capacity:  # the ring has come around
            slot.cached = ()
        if ids[-1] in self.programs.stops:
            slot.left = 0
        return Continuation(slot.request, ids, logs, not slot.left)

    def _fill(self, waiting: "deque[tuple[int, Request]]", sampling: Sampling) -> None:
        """Give free slots to waiting requests, and put prompts but for the last token into the cache.

        A prompt in the cache of a slot on the same device is copied.
        """
        fresh, twins = list[Slot](), list[tuple[Slot, Slot]]()
        for slot in self._slots:
            if slot.left or not waiting:
                continue
            slot.request, (prompt, slot.left, sample) = waiting.popleft()
            slot.count, slot.last, slot.text = len(prompt) - 1, prompt[-1], list(prompt)
            slot.key = sampling.key(sample, prompt).tolist()
            self._store.reserve(min(len(prompt) + slot.left, max(2 * len(prompt), _FIRST)))
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
        """Put the prompts of one slot a device into the cache."""
        new = [slot for slot in slots if slot is not None]
        if self.attention.dense_prompt:
            for start, _, chunk in parts_of(slots, self._store.ring, self.grid.mesh):
                self._call(self.programs.prefill(first=start == 0), chunk)
        else:
            self._tell([(slot, list(slot.text)) for slot in new])
        for slot in new:
            kept = self.attention.dense_prompt and slot.count <= self._store.capacity
            slot.cached = tuple(slot.text) if kept else ()

    def _score(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        """Scores of as many texts as there are devices along `data`."""
        slots: list[Slot | None] = [None] * self.grid.shape.batch_shards
        for device, text in enumerate(texts):
            slots[device] = slot = next(slot for slot in self._slots if slot.device == device)
            slot.text, slot.cached = list(text), ()
        self._store.reserve(max(map(len, texts)) - 1)
        scores = []
        for start, length, chunk in parts_of(slots, self._store.ring, self.grid.mesh):
            targets = np.zeros((len(slots), length), np.int32)
            for row, text in zip(targets, texts, strict=False):
                own = text[start + 1 : start + 1 + length]
                row[: len(own)] = own
            given = put(targets, ROWS, self.grid.mesh)
            scores.append(self._call(self.programs.score(first=start == 0), chunk, given)[0])
        return [row[: len(text) - 1] for row, text in zip(np.concatenate(scores, 1), texts, strict=False)]

    def _follow(self, texts: Sequence[Sequence[int]]) -> list[Scores]:
        """Scores of as many texts as there are slots, token by token."""
        for slot in self._slots:
            slot.left, slot.cached, slot.key = 0, (), NO_KEY
        self._store.reserve(max(map(len, texts)) - 1)
        scores = self._tell(pairs := list(zip(self._slots, texts, strict=False)))
        return [scores[: len(text) - 1, slot.at] for slot, text in pairs]

    def _tell(self, pairs: Sequence[tuple[Slot, Sequence[int]]]) -> Scores:
        """Put texts but for their last tokens into slots, token by token: scores [tokens, slots]; others wait."""
        left = [slot.left for slot in self._slots]
        for slot in self._slots:
            slot.left = 0
        for slot, text in pairs:
            slot.count, slot.left, slot.last = 0, len(text) - 1, text[0]
        tokens = tokens_behind(pairs, len(self._slots), _TOLD)
        scores = [np.zeros((0, len(self._slots)), np.float32)]
        for part in (tokens[start : start + _TOLD] for start in range(0, len(tokens), _TOLD)):
            given = put(part, P(None, BATCH_AXES), self.grid.mesh)
            scores.append(self._call(self.programs.follow(_TOLD), state(self._slots, self.grid.mesh), given)[0])
            for slot, _ in pairs:
                if steps := min(slot.left, _TOLD):
                    slot.count, slot.left = slot.count + steps, slot.left - steps
                    slot.last = int(part[steps - 1, slot.at])
        for slot, before in zip(self._slots, left, strict=True):
            slot.left = before
        return np.concatenate(scores)
