"""Continuations of a suite's prompts by a model, each cut at the end of its function."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from axonn_jax.data.prompts import ids_within
from axonn_jax.errors import UserError
from axonn_jax.evaluate.formats import Entry
from axonn_jax.inference.generator import Generator
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import Request, numbered
from axonn_jax.inference.texts import write


def cut(text: str) -> str | None:
    """Return a function's body up to its closing brace, None without one; braces in literals and comments are text."""
    depth = 1
    for at in _code(text):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[: at + 1]
    return None


def _code(text: str) -> Iterator[int]:
    """Indices of characters outside of literals and comments."""
    at = 0
    while at < len(text):
        char, pair = text[at], text[at : at + 2]
        if pair in ("//", "/*"):
            end = "\n" if pair == "//" else "*/"
            last = text.find(end, at + 2)
            at = len(text) if last < 0 else last + len(end)
        elif char in "\"'" and not (char == "'" and at and text[at - 1].isalnum()):  # 1'000 is a number
            at += 1
            while at < len(text) and text[at] not in (char, "\n"):
                at += 2 if text[at] == "\\" else 1
            at += 1
        else:
            yield at
            at += 1


def requests_of(
    entries: Sequence[Entry],
    tokenizer: Any,
    seq_len: int,
    *,
    samples: int,
    tokens: int,
    frame: Callable[[str], str] = str.strip,
) -> list[Request]:
    """Return requests for samples of every prompt.

    Args:
        entries: ParEval's prompts.
        tokenizer: The model's.
        seq_len: Most tokens of a text, prompt included.
        samples: Texts for each prompt.
        tokens: Most new tokens of a text.
        frame: Puts a prompt into the form of the model's tuning; the default gives the prompt itself.

    Raises:
        UserError: a prompt leaves no room.
    """
    asked = []
    for entry in entries:
        try:
            ids = ids_within(tokenizer, frame(entry["prompt"]), seq_len)
        except UserError as error:
            accepted = f"{error.accepted} ({entry['name']}, {entry['parallelism_model']})"
            raise UserError("--suite", error.value, accepted) from None
        asked.append((ids, min(tokens, seq_len - len(ids))))
    return numbered(asked, samples)


def continuations(
    generator: Generator,
    tokenizer: Any,
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Callable[[int], None] = lambda done: None,
) -> list[str]:
    """Return a text for each request, cut behind its function where that ends."""
    texts, done = ["" for _ in requests], 0
    for part in write(generator, tokenizer, requests, sampling, until=lambda text: cut(text) is not None):
        texts[part.request] += part.text
        done += part.ended
        progress(done)
    return [cut(text) or text for text in texts]
