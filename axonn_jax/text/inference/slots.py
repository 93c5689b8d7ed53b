"""Requests and slots on the host, and the arrays that programs take of them."""

import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError, integer
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.text.inference.cache import chunks
from axonn_jax.text.inference.programs import ROWS, Chunk, Copy, Slots

T = TypeVar("T")

NO_KEY = (0, 0)


class Request(NamedTuple):
    """A text to generate."""

    prompt: tuple[int, ...]
    tokens: int
    sample: int = 0
    """Index of the sample, which distinguishes texts of the same prompt and seed."""


class Continuation(NamedTuple):
    """Further tokens of a request."""

    request: int
    """Index of the request."""
    ids: list[int]
    log_probabilities: list[float]
    """Log-probabilities under the model's scores before sampling options; zeros if they were not requested."""
    ended: bool


def numbered(prompts: Iterable[tuple[Sequence[int], int]], samples: int) -> list[Request]:
    """Return `samples` requests per prompt; samples of a repeated prompt are numbered consecutively."""
    times, requests = Counter[tuple[int, ...]](), []
    for ids, tokens in prompts:
        first = times[prompt := tuple(ids)]
        requests += [Request(prompt, tokens, sample) for sample in range(first, first + samples)]
        times[prompt] += samples
    return requests


@dataclass(eq=False)
class Slot:
    """Slot for one text."""

    at: int
    """Index of the slot among all slots."""
    device: int
    """Index of the slot's device along `data`."""
    place: int
    """Index of the slot on its device."""
    request: int = -1
    count: int = 0
    """Number of tokens in the cache."""
    remaining: int = 0
    """Number of tokens still to generate."""
    last: int = 0
    """The newest token, which is not in the cache yet."""
    key: Sequence[int] = NO_KEY
    text: list[int] = field(default_factory=list)
    """Prompt and tokens generated so far."""
    cached: tuple[int, ...] = ()
    """Prompt whose keys and values, except the last token's, are still in the cache."""


def ids_of(field: str, value: object, vocab: int) -> tuple[int, ...]:
    """Return token ids of a list or an array as Python integers.

    Raises:
        UserError: On `field`, for anything else or an id outside the vocabulary.
    """
    try:
        ids = tuple(operator.index(token) for token in np.asarray(value).tolist())
    except (TypeError, ValueError):
        raise UserError(field, value, "a list of token ids, which are integers") from None
    for token in ids:
        if not 0 <= token < vocab:
            raise UserError(field, token, f"token ids below model.vocab = {vocab}")
    return ids


def checked(request: Request, vocab: int, length: int) -> Request:
    """Return a valid request of Python integers.

    Raises:
        UserError: It is not a request, the prompt is empty, or prompt and tokens exceed `length`.
    """
    if not isinstance(request, Request):
        raise UserError("request", request, "a Request(prompt, tokens) each")
    prompt, tokens = ids_of("prompt", request.prompt, vocab), integer("tokens", request.tokens, 1)
    if not prompt:
        raise UserError("prompt", "", "at least one token")
    if (together := len(prompt) + tokens) > length:
        accepted = f"with the prompt's {len(prompt)} together at most length = {length}, not {together}"
        raise UserError("tokens", tokens, accepted)
    return Request(prompt, tokens, integer("sample", request.sample, 0, 2**32 - 1))


def put(tree: T, spec: P, mesh: Mesh) -> T:
    """Lay out arrays, of which every process has the full values, on the mesh; no collectives."""
    sharding = NamedSharding(mesh, spec)
    return jax.tree.map(lambda a: jax.make_array_from_callback(a.shape, sharding, a.__getitem__), tree)


def state(slots: Sequence[Slot], mesh: Mesh, vocab: int = 0) -> Slots:
    """Return the arrays of a decode step; with a padded `vocab` size, also the mask of the texts' tokens."""
    last, counts, remaining = (
        np.array([getattr(slot, name) for slot in slots], np.int32) for name in ("last", "count", "remaining")
    )
    keys = np.array([slot.key for slot in slots], np.uint32)
    arrays = put(Slots(last, counts, remaining, keys), ROWS, mesh)
    if not vocab:
        return arrays
    seen = np.zeros((len(slots), vocab), bool)
    for slot in slots:
        seen[slot.at, slot.text] = True
    return arrays._replace(seen=put(seen, P(BATCH_AXES, "y"), mesh))


def prompt_chunks(slots: Sequence[Slot | None], ring: int, mesh: Mesh) -> Iterator[tuple[int, int, Chunk]]:
    """Yield start, length and chunk of every part of the texts of one slot per device, without their last tokens."""
    counts = np.array([0 if slot is None else len(slot.text) - 1 for slot in slots], np.int32)
    places = np.array([0 if slot is None else slot.place for slot in slots], np.int32)
    start = 0
    for length in chunks(int(counts.max()), ring):
        tokens, valid = np.zeros((len(slots), length), np.int32), np.clip(counts - start, 0, length)
        for row, slot in enumerate(slots):
            if slot is not None:
                tokens[row, : valid[row]] = slot.text[start : start + valid[row]]
        chunk = Chunk(tokens, places, np.full(len(slots), start, np.int32), valid.astype(np.int32))
        yield start, length, put(chunk, ROWS, mesh)
        start += length


def copy_of(source: Slot, target: Slot, devices: int, mesh: Mesh) -> Copy:
    """Return the copy of a slot's cache to another slot of its device."""
    # Zeros are the copy of a slot to itself, for the devices that have nothing to do.
    copy = Copy(*(np.zeros(devices, np.int32) for _ in Copy._fields))
    copy.source[source.device], copy.target[source.device] = source.place, target.place
    return put(copy, ROWS, mesh)


def shifted_tokens(texts: Iterable[tuple[Slot, Sequence[int]]], slots: int, multiple: int) -> NDArray[np.int32]:
    """Return the texts without their first tokens, [tokens, slots], zero-padded to a multiple of `multiple` tokens."""
    pairs = list(texts)
    longest = max(len(text) for _, text in pairs) - 1
    tokens = np.zeros((-(-longest // multiple) * multiple, slots), np.int32)
    for slot, text in pairs:
        tokens[: len(text) - 1, slot.at] = text[1:]
    return tokens
