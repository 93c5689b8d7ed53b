"""Generation of function bodies for a suite's prompts."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.data.prompts import ids_within
from axonn_jax.judge.formats import Entry
from axonn_jax.judge.forms import PromptForm
from axonn_jax.text.inference.generator import Generator
from axonn_jax.text.inference.sampling import Sampling
from axonn_jax.text.inference.slots import Request, numbered
from axonn_jax.text.inference.texts import write

if TYPE_CHECKING:
    from tokenizers import Tokenizer


def requests_of(
    entries: Sequence[Entry], tokenizer: "Tokenizer", form: PromptForm, shape: ModelShape, *, samples: int, tokens: int
) -> list[Request]:
    """Return the generation requests for the samples of every prompt.

    Args:
        entries: ParEval's prompts.
        tokenizer: Tokenizer of the model.
        form: Form of the prompts.
        shape: Sizes of the model: its sequence length limits a text, prompt included.
        samples: Texts per prompt.
        tokens: Most new tokens of a text.

    Raises:
        UserError: A prompt is too long, or has a token outside the model's vocabulary.
    """
    prompts = []
    for entry in entries:
        try:
            text = form.text(entry["prompt"])
            ids = ids_within(tokenizer, text, shape.seq_len, special=form.special, vocab=shape.vocab)
        except UserError as error:
            accepted = f"{error.accepted} ({entry['name']}, {entry['parallelism_model']})"
            raise UserError("--suite", error.value, accepted) from None
        prompts.append((ids, min(tokens, shape.seq_len - len(ids))))
    return numbered(prompts, samples)


def continuations(
    generator: Generator,
    tokenizer: "Tokenizer",
    entries: Sequence[Entry],
    form: PromptForm,
    requests: Sequence[Request],
    sampling: Sampling,
    progress: Callable[[int], None] = lambda done: None,
) -> list[list[str]]:
    """Generate the function bodies for each prompt.

    Args:
        generator: Generator of the model.
        tokenizer: Tokenizer of the model.
        entries: ParEval's prompts.
        form: Form of the prompts.
        requests: Requests for these prompts, from `requests_of`.
        sampling: Sampling of tokens.
        progress: Called with the number of completed texts.
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
