"""Prompts from a file, and texts onto a terminal, a pipe or as JSON, on the first process alone."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_jax.errors import UserError
from axonn_jax.terminal import printable, say

if TYPE_CHECKING:
    from axonn_jax.cli.generate import Generate
    from axonn_jax.inference.generator import Generator, Request
    from axonn_jax.inference.sampling import Sampling

_MOST_BYTES = 256 << 20


def read_prompts(path: Path | None) -> list[str]:
    """The prompts of a file with a JSON object a line; raises ``UserError`` that names the first line of no use."""
    from axonn_jax.documents import parse_json, read_bytes

    assert path is not None
    try:
        lines = read_bytes(path, _MOST_BYTES).splitlines()
    except (OSError, ValueError) as error:
        raise UserError("--prompts", str(path), f"a file with a JSON object a line; {error}") from None
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise UserError("--prompts", f"{path}, line {number}", f"an object in JSON; {error}") from None
        if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
            raise UserError("--prompts", f"{path}, line {number}", 'an object whose "prompt" is a text')
        prompts.append(entry["prompt"])
    if not prompts:
        raise UserError("--prompts", str(path), "at least one line")
    return prompts


def print_texts(
    generator: "Generator",
    tokenizer: Any,
    prompts: Sequence[str],
    requests: "Sequence[Request]",
    sampling: "Sampling",
    args: "Generate",
) -> None:
    """Makes all texts and prints them: a single one as it comes, of several each when it ends, in their order."""
    from axonn_jax.inference.texts import write

    first = generator.grid.rank == 0
    texts = ["" for _ in requests]
    counts, logs = [0] * len(requests), [[] for _ in requests]  # type: ignore[var-annotated]
    ended, printed = [False] * len(requests), 0
    single = len(requests) == 1 and not args.json
    if single and first:
        _put(prompts[0])
    began = time.perf_counter()
    for piece in write(generator, tokenizer, requests, sampling, stop=args.stop, logs=args.logprobs):
        at = piece.request
        texts[at] += piece.text
        counts[at] += len(piece.ids)
        logs[at] += piece.log_probabilities
        ended[at] = piece.ended
        if single and first:
            _put(piece.text)
        while not single and first and printed < len(requests) and ended[printed]:
            prompt = prompts[printed // args.samples]
            result = {"prompt": prompt, "sample": requests[printed].sample, "text": texts[printed]}
            result |= {"logprobs": logs[printed]} if args.logprobs else {}
            _put(json.dumps(result) + "\n" if args.json else f"{prompt}{texts[printed]}\n\n")
            printed += 1
    if not first:
        return
    if single:
        _put("\n")
    seconds = time.perf_counter() - began
    speed = f"{sum(counts):,} tokens in {seconds:.1f} s, {sum(counts) / seconds:,.1f} tokens/s"
    say(f"{speed} with prompts and compilation")


def _put(text: str) -> None:
    """Writes the text as it is to a pipe or a file; on a terminal without what would steer it."""
    encoding = sys.stdout.encoding or "utf-8"
    shown = printable(text) if sys.stdout.isatty() else text
    sys.stdout.write(shown.encode(encoding, "backslashreplace").decode(encoding))
    sys.stdout.flush()
