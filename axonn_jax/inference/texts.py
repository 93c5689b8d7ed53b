"""Texts in and out: prompts through a tokenizer into a generator, and what comes back as text, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from axonn_jax.inference.generator import Continuation, Generator, Request
from axonn_jax.inference.sampling import Sampling

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPart(NamedTuple):
    """A part of a text."""

    request: int
    text: str
    ids: list[int]
    log_probabilities: list[float]
    ended: bool


@dataclass
class _Text:
    """A text so far: its tokens, and how much of it has been handed on."""

    ids: list[int] = field(default_factory=list)
    shown: int = 0


def write(
    generator: Generator,
    tokenizer: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    logs: bool = False,
) -> Iterator[TextPart]:
    """Yields texts as they come; each ends at its tokens, at one of the generator's `stops` or before a `stop` string.

    What may be the beginning of a stop string, or of a character whose bytes are not all there, is held back.
    """
    texts = [_Text() for _ in requests]
    longest = max(map(len, stop), default=1) - 1

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([token for token in ids if token not in generator.programs.stops]))

    def stopped(request: int, piece: Continuation) -> bool:
        text = decoded(texts[request].ids + piece.ids)
        return any(ending in text for ending in stop)

    for piece in generator.stream(requests, sampling, logs=logs, until=stopped):
        so_far = texts[piece.request]
        so_far.ids += piece.ids
        full = decoded(so_far.ids)
        ends = [at for text in stop if (at := full.find(text)) >= 0]
        full = full[: min(ends)] if ends else full
        ready = len(full)
        if not piece.ended:
            ready = len(full.rstrip(UNFINISHED)) if full.endswith(UNFINISHED) else ready - longest
        ready = max(ready, so_far.shown)
        shown, so_far.shown = full[so_far.shown : ready], ready
        yield TextPart(piece.request, shown, piece.ids, piece.log_probabilities, piece.ended)
