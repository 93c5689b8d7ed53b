"""Texts in and out: prompts through a tokenizer into a generator, and what comes back as text, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from axonn_jax.inference.generator import Generator
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import Continuation, Request

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BEFORE = 16
"""Tokens of the prompt that are decoded with a text."""


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

    What may be the beginning of a stop string, or of a character whose bytes are not all there, is held back. The
    token with which a stop string is complete is a part's last.
    """
    texts = [_Text() for _ in requests]
    longest = max(map(len, stop), default=1) - 1

    def decoded(request: int, ids: Sequence[int]) -> str:
        """Behind a part of the prompt: alone, some tokenizers' texts begin without their blank."""
        before = requests[request].prompt[-_BEFORE:]
        kept = [token for token in ids if token not in generator.programs.stops]
        return str(tokenizer.decode([*before, *kept]))[len(str(tokenizer.decode(before))) :]

    def stopped(request: int, piece: Continuation) -> bool:
        return bool(stop) and _holds(decoded(request, texts[request].ids + piece.ids), stop)

    for piece in generator.stream(requests, sampling, logs=logs, until=stopped):
        so_far = texts[piece.request]
        full = decoded(piece.request, so_far.ids + piece.ids)
        number = len(piece.ids)
        if ends := [at for text in stop if (at := full.find(text)) >= 0]:
            full = full[: min(ends)]
            new = (n for n in range(1, number) if _holds(decoded(piece.request, so_far.ids + piece.ids[:n]), stop))
            number = next(new, number)
        so_far.ids += piece.ids
        ready = len(full) if piece.ended else len(full.rstrip(UNFINISHED)) - longest
        ready = max(ready, so_far.shown)
        shown, so_far.shown = full[so_far.shown : ready], ready
        yield TextPart(piece.request, shown, piece.ids[:number], piece.log_probabilities[:number], piece.ended)


def _holds(text: str, stop: Sequence[str]) -> bool:
    return any(ending in text for ending in stop)
