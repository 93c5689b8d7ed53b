"""Text generation: continuations of prompts as text, piece by piece, through a tokenizer."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from axonn_jax.text.inference.generator import Generator
from axonn_jax.text.inference.sampling import Sampling
from axonn_jax.text.inference.slots import Continuation, Request

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_CONTEXT = 16
"""Number of prompt tokens that are decoded with a text."""
_LONGEST = 4
"""Bytes of a character at most, and so tokens of a tokenizer with one per byte."""


class TextPart(NamedTuple):
    """Part of a text."""

    request: int
    text: str
    ids: list[int]
    log_probabilities: list[float]
    ended: bool


class _Text:
    """Text so far, as tokens, and the number of characters already yielded."""

    def __init__(self, tokenizer: "Tokenizer", prompt: Sequence[int], ends: Collection[int], stop: Sequence[str]):
        self._tokenizer, self._ends, self._stop = tokenizer, ends, stop
        self.ids: list[int] = []
        self.shown = 0
        # The context must not begin within a character: at least one of four consecutive starts does not.
        parts = [prompt[-tokens:] for tokens in range(_CONTEXT, _CONTEXT + _LONGEST)]
        self._context = min(parts, key=lambda ids: self._plain(ids).count(UNFINISHED))

    def _plain(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _decoded(self, ids: Sequence[int], *, special: bool) -> str:
        """Decode tokens, except end tokens, after a part of the prompt."""
        # Decoded by themselves, some texts would lack their leading blank.
        tokens = [*self._context, *(token for token in ids if token not in self._ends)]
        return self._plain(tokens, special=special)[len(self._plain(self._context, special=special)) :]

    def decoded(self, ids: Sequence[int], *, special: bool = False) -> tuple[str, str]:
        """Return the text of tokens and, separately, an incomplete last character."""
        text = self._decoded(ids, special=special)
        if not text.endswith(UNFINISHED):
            return text, ""
        # A tokenizer with one token per byte decodes nothing of a run of bytes whose last character is incomplete: find
        # the cut after which the fewest characters are unfinished.
        ends = range(len(ids), max(len(ids) - _LONGEST, -1), -1)
        cuts = [(self._decoded(ids[:end], special=special), (len(ids) - end) * UNFINISHED) for end in ends]
        return min(cuts, key=lambda parts: sum(part.count(UNFINISHED) for part in parts))

    def holds_stop(self, ids: Sequence[int]) -> bool:
        """Return True if the text of tokens contains a stop string, which may be that of a hidden special token."""
        text = self.decoded(ids, special=True)[0] if self._stop else ""
        return any(ending in text for ending in self._stop)

    def cut_at_stop(self, ids: Sequence[int]) -> tuple[str, int]:
        """Return the text before the first stop string, and the number of tokens that complete it."""
        first = len(self.ids) + 1  # earlier tokens do not contain one
        number = next((n for n in range(first, len(ids)) if self.holds_stop(ids[:n])), len(ids))
        text = self.decoded(ids, special=True)[0]
        end = min(at for ending in self._stop if (at := text.find(ending)) >= 0)
        for count in range(number, -1, -1):
            begin = self._decoded(ids[:count], special=True)
            if len(begin) <= end and text.startswith(begin):
                break
        return self._decoded(ids[:count], special=False) + text[len(begin) : end], number


def write(
    generator: Generator,
    tokenizer: "Tokenizer",
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    until: Callable[[int, str], bool] | None = None,
    logs: bool = False,
) -> Iterator[TextPart]:
    """Generate texts and yield their parts on arrival.

    A text ends at its number of tokens, at one of the generator's `stops`, before a `stop` string, or soon after
    `until` returns True. A possible beginning of a stop string, or of an incomplete character, is withheld until it is
    decided. The token that completes a stop string is the last one of its part.

    Args:
        generator: The generator.
        tokenizer: Tokenizer that decodes the tokens.
        requests: Texts to generate.
        sampling: Sampling settings.
        stop: Strings that end a text; may be the text of a special token.
        until: Called with (request, text so far).
        logs: True to return log-probabilities; zeros otherwise.
    """
    texts = [_Text(tokenizer, request.prompt, generator.programs.stops, stop) for request in requests]
    longest = max(map(len, stop), default=1) - 1

    def stopped(request: int, piece: Continuation) -> bool:
        text, ids = texts[request], texts[request].ids + piece.ids
        return text.holds_stop(ids) or (until is not None and until(request, text.decoded(ids)[0]))

    for piece in generator.stream(requests, sampling, logs=logs, until=stopped):
        progress = texts[piece.request]
        ids, number = progress.ids + piece.ids, len(piece.ids)
        if progress.holds_stop(ids):
            full, tokens = progress.cut_at_stop(ids)
            ready, number = len(full), tokens - len(progress.ids)
        else:
            full, incomplete = progress.decoded(ids)
            full += incomplete if piece.ended else ""
            ready = len(full) if piece.ended else len(full.rstrip(UNFINISHED)) - longest
        progress.ids = ids
        ready = max(ready, progress.shown)
        shown, progress.shown = full[progress.shown : ready], ready
        yield TextPart(piece.request, shown, piece.ids[:number], piece.log_probabilities[:number], piece.ended)
