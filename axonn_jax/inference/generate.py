"""Texts in and out: prompts through a tokenizer into an engine, and what comes back as text, piece by piece."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from axonn_jax.inference.engine import Engine, Piece, Request
from axonn_jax.inference.sampling import Sampling

UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPiece(NamedTuple):
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
    engine: Engine,
    tokenizer: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    logs: bool = False,
) -> Iterator[TextPiece]:
    """Yields texts as they come; each ends at its tokens, at a token of the engine's `stops` or before a `stop` string.

    What may be the beginning of a stop string, or of a character whose bytes are not all there, is held back.
    """
    texts = [_Text() for _ in requests]
    longest = max(map(len, stop), default=1) - 1

    def decoded(ids: Sequence[int]) -> str:
        return str(tokenizer.decode([token for token in ids if token not in engine.programs.stops]))

    def found(request: int, piece: Piece) -> bool:
        text = decoded(texts[request].ids + piece.ids)
        return any(one in text for one in stop)

    for piece in engine.stream(requests, sampling, logs=logs, until=found):
        one = texts[piece.request]
        one.ids += piece.ids
        whole = decoded(one.ids)
        ends = [at for text in stop if (at := whole.find(text)) >= 0]
        whole = whole[: min(ends)] if ends else whole
        ready = len(whole)
        if not piece.ended:
            ready = len(whole.rstrip(UNFINISHED)) if whole.endswith(UNFINISHED) else ready - longest
        ready = max(ready, one.shown)
        shown, one.shown = whole[one.shown : ready], ready
        yield TextPiece(piece.request, shown, piece.ids, piece.log_probabilities, piece.ended)
