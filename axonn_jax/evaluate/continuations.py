"""Continuations of a suite's prompts by a model: the bodies of functions."""

from collections.abc import Callable, Sequence
from typing import Any

from axonn_jax.data.prompts import ids_within
from axonn_jax.errors import UserError
from axonn_jax.evaluate.formats import Entry
from axonn_jax.evaluate.forms import PromptForm
from axonn_jax.inference.generator import Generator
from axonn_jax.inference.sampling import Sampling
from axonn_jax.inference.slots import Request, numbered
from axonn_jax.inference.texts import write
from axonn_jax.models.config import ModelShape


def requests_of(
    entries: Sequence[Entry], tokenizer: Any, form: PromptForm, shape: ModelShape, *, samples: int, tokens: int
) -> list[Request]:
    """Return requests for samples of every prompt.

    Args:
        entries: ParEval's prompts.
        tokenizer: The model's.
        form: Form of the prompts.
        shape: Sizes of the model: most tokens of a text, prompt included, and entries of the vocabulary.
        samples: Texts for each prompt.
        tokens: Most new tokens of a text.

    Raises:
        UserError: a prompt leaves no room, or has a token that the model has not.
    """
    asked = []
    for entry in entries:
        try:
            text = form.text(entry["prompt"])
            ids = ids_within(tokenizer, text, shape.seq_len, special=form.special, vocab=shape.vocab)
        except UserError as error:
            accepted = f"{error.accepted} ({entry['name']}, {entry['parallelism_model']})"
            raise UserError("--suite", error.value, accepted) from None
        asked.append((ids, min(tokens, shape.seq_len - len(ids))))
    return numbered(asked, samples)


def continuations(
    generator: Generator,
    tokenizer: Any,
    entries: Sequence[Entry],
    form: PromptForm,
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[str]]:
    """Return bodies of functions for each prompt.

    Args:
        generator: Makes the texts.
        tokenizer: The model's.
        entries: ParEval's prompts.
        form: Form of the prompts.
        requests: The prompts' requests, as from `requests_of`.
        sampling: Choice of tokens.
        progress: Takes the number of texts done.
    """
    texts, done, samples = ["" for _ in requests], 0, len(requests) // len(entries)

    def ended(request: int, text: str) -> bool:
        return form.ended(entries[request // samples]["prompt"], text)

    for part in write(generator, tokenizer, requests, sampling, until=ended):
        texts[part.request] += part.text
        done += part.ended
        progress(done)
    return [
        [form.body(entry["prompt"], text) for text in texts[at * samples : (at + 1) * samples]]
        for at, entry in enumerate(entries)
    ]
