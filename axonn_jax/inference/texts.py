"""Texts in and out: prompts through a tokenizer into a generator, and continuations as text, piece by piece."""

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from axonn_jax.inference.generator import Generator
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import Continuation, Request

UNFINISHED = "\N{REPLACEMENT CHARACTER}"
_BEFORE = 16
"""Tokens of the prompt decoded with a text."""
_LONGEST = 4
"""Bytes of a character, and tokens, where a tokenizer has one a byte."""


class TextPart(NamedTuple):
    """A part of a text."""

    request: int
    text: str
    ids: list[int]
    log_probabilities: list[float]
    ended: bool


class _Text:
    """Text so far, as tokens, and the length of the part handed on."""

    def __init__(self, tokenizer: Any, prompt: Sequence[int], ends: Collection[int], stop: Sequence[str]):
        self._tokenizer, self._ends, self._stop = tokenizer, ends, stop
        self.ids: list[int] = []
        self.shown = 0
        parts = [prompt[-tokens:] for tokens in range(_BEFORE, _BEFORE + _LONGEST)]  # one begins with a character
        self._before = min(parts, key=lambda ids: self._plain(ids).count(UNFINISHED))

    def _plain(self, ids: Sequence[int], *, special: bool = False) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=not special))

    def _decoded(self, ids: Sequence[int], *, special: bool) -> str:
        """Decode tokens, without ending ones, behind a part of the prompt: alone, some texts lack their first blank."""
        kept = [*self._before, *(token for token in ids if token not in self._ends)]
        return self._plain(kept, special=special)[len(self._plain(self._before, special=special)) :]

    def decoded(self, ids: Sequence[int], *, special: bool = False) -> tuple[str, str]:
        """Return the text of tokens, and apart from it an incomplete last character.

        A tokenizer with a token a byte decodes nothing of a run of bytes with an incomplete last character.
        """
        text = self._decoded(ids, special=special)
        if not text.endswith(UNFINISHED):
            return text, ""
        ends = range(len(ids), max(len(ids) - _LONGEST, -1), -1)
        cuts = [(self._decoded(ids[:end], special=special), (len(ids) - end) * UNFINISHED) for end in ends]
        return min(cuts, key=lambda parts: sum(part.count(UNFINISHED) for part in parts))

    def holds_stop(self, ids: Sequence[int]) -> bool:
        """Return True if tokens hold a stop string, such as the text of a special token, which is not shown."""
        text = self.decoded(ids, special=True)[0] if self._stop else ""
        return any(ending in text for ending in self._stop)

    def before_stop(self, ids: Sequence[int]) -> tuple[str, int]:
        """Text before the first stop string, and the number of tokens with which one is complete."""
        first = len(self.ids) + 1  # no tokens handed on before hold one
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
    tokenizer: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    *,
    stop: Sequence[str] = (),
    until: Callable[[int, str], bool] | None = None,
    logs: bool = False,
) -> Iterator[TextPart]:
    """Yield texts on arrival; each ends at its number of tokens, at one of the generator's `stops` or before a `stop`
    string.

    A possible beginning of a stop string, or of a character with missing bytes, is held back. The token that completes
    a stop string is a part's last. A stop string may be the text of a special token. A text also ends soon after
    `until` (request, text so far) is True.
    """
    texts = [_Text(tokenizer, request.prompt, generator.programs.stops, stop) for request in requests]
    longest = max(map(len, stop), default=1) - 1

    def stopped(request: int, piece: Continuation) -> bool:
        text, ids = texts[request], texts[request].ids + piece.ids
        return text.holds_stop(ids) or (until is not None and until(request, text.decoded(ids)[0]))

    for piece in generator.stream(requests, sampling, logs=logs, until=stopped):
        so_far = texts[piece.request]
        ids, number = so_far.ids + piece.ids, len(piece.ids)
        if so_far.holds_stop(ids):
            full, tokens = so_far.before_stop(ids)
            ready, number = len(full), tokens - len(so_far.ids)
        else:
            full, rest = so_far.decoded(ids)
            full += rest if piece.ended else ""
            ready = len(full) if piece.ended else len(full.rstrip(UNFINISHED)) - longest
        so_far.ids = ids
        ready = max(ready, so_far.shown)
        shown, so_far.shown = full[so_far.shown : ready], ready
        yield TextPart(piece.request, shown, piece.ids[:number], piece.log_probabilities[:number], piece.ended)
