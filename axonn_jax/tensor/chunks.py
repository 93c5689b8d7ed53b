"""How many parts of a microbatch's tokens the projection onto the vocabulary and the loss run in, without jax."""

from math import ceil

LOGITS_BYTES = 2**30
"""Float32 logits of a part at the most. Every part reads and writes the weight's gradient once, which costs a GPU about
an eighth of the part's matmuls at this size with a vocabulary of 128,256, and less with a smaller one."""


def loss_chunk(tokens: int, columns: int) -> int:
    """Tokens of a part, of `tokens` with `columns` logits each on a device; all of them where they fit in one."""
    return ceil(tokens / ceil(4 * tokens * columns / LOGITS_BYTES))
