"""Batch of a plan, a number of tokens in words of people: 16777216, 16.8M, 4Mi or 512K."""

from fractions import Fraction
from math import floor

from axonn_jax.errors import UserError
from axonn_jax.options import amount

_TOKENS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "ki": 2**10, "mi": 2**20}
_MOST_SEQUENCES = 2**31 - 1  # as train.global_batch


def sequences(text: str, seq: int) -> int:
    """Sequences of a batch given in tokens: exactly, or rounded such as `16.8M`.

    A rounded number stands for the batch near it with the most factors of two, as grids divide it: 16.8M at 2,048 is
    8,192 sequences. K and M may be powers of two: 512K is 524,288 tokens, 256 sequences. Raises ``UserError`` where
    there is no whole number of sequences.
    """
    accepted = "tokens a step, such as 16777216, 4Mi or 16.8M"
    tokens, slack = amount("--batch-tokens", text, _TOKENS, accepted)
    if tokens > _MOST_SEQUENCES * seq:
        raise UserError("--batch-tokens", text, f"at most {_MOST_SEQUENCES:,} sequences of {seq} tokens")
    binary = {"k": Fraction(2**10, 10**3), "m": Fraction(2**20, 10**6)}.get(text.strip()[-1:].lower(), Fraction(1))
    found = [_most_even((tokens - slack) * factor / seq, (tokens + slack) * factor / seq) for factor in (1, binary)]
    if not any(found):
        near = max(1, round(tokens / seq)) * seq
        raise UserError("--batch-tokens", text, f"a multiple of the sequence length, {seq}; nearest: {near}")
    return max(found, key=lambda number: number & -number)


def _most_even(low: Fraction, high: Fraction) -> int:
    """Return the whole number above 0 with the most factors of two in a range, 0 where there is none."""
    first, last, step = -floor(-low), floor(high), 1
    if first > last or last < 1:
        return 0
    while (last // (2 * step)) * 2 * step >= max(first, 1):
        step *= 2
    return last // step * step
