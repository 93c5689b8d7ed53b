"""Prompts from the command line or a file, and output of generated texts to a terminal, a pipe or as JSON."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from axonn_jax.core.errors import UserError, refused
from axonn_jax.core.terminal import printable, say

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from axonn_jax.cli.generate import Generate
    from axonn_jax.text.inference.generator import Generator
    from axonn_jax.text.inference.sampling import Sampling
    from axonn_jax.text.inference.slots import Request

_TOKENS = 100


class Prompt(NamedTuple):
    """Prompt with its tokens, the number of tokens to add, and the JSON object of its line."""

    text: str
    ids: tuple[int, ...]
    tokens: int
    line: dict[str, Any]


def prompts_of(args: "Generate", tokenizer: "Tokenizer", seq_len: int, vocab: int) -> list[Prompt]:
    """Return the prompts of a command line.

    Args:
        args: Command line.
        tokenizer: Tokenizer of the model.
        seq_len: Most tokens of a text, prompt included.
        vocab: Entries of the model's vocabulary.

    Raises:
        UserError: A prompt cannot be used; for a file the error names the line.
    """
    from axonn_jax.files.data.instructions.chat import ChatTemplate
    from axonn_jax.files.data.instructions.schemas import tools_of
    from axonn_jax.files.data.instructions.templates import chat_template_of
    from axonn_jax.files.data.prompts import file_line, ids_within
    from axonn_jax.files.data.tokenize import end_of

    template = ChatTemplate.of(args.run_dir, "--chat", True) if args.chat and args.template is None else None
    if args.template is not None:
        end = end_of(args.run_dir, tokenizer, "RUN_DIR")
        template = chat_template_of(
            args.template, args.run_dir, "" if end is None else tokenizer.id_to_token(end) or ""
        )
    prompts, unused = list[Prompt](), 0
    lines = {0: {"prompt": args.prompt or ""}} if args.prompts is None else _read(args.prompts, args.chat)
    for number, line in lines.items():
        text = "" if template else line["prompt"]  # an answer is shown without the template's text
        try:
            if template:
                single_turn = [{"role": "user", "content": line.get("prompt")}]
                messages, tools = line.get("messages", single_turn), tools_of(line)
                ids = ids_within(tokenizer, template.text(messages, tools), seq_len, special=False, vocab=vocab)
                unused += bool(tools) and not template.takes("tools")
            else:
                ids = ids_within(tokenizer, text, seq_len, vocab=vocab)
        except UserError as error:
            if args.prompts is None:
                raise
            raise UserError("--prompts", file_line(args.prompts, number), error.accepted) from None
        if (args.tokens or 1) > (room := seq_len - len(ids)):
            where = f" in {file_line(args.prompts, number)}" if args.prompts else ""
            accepted = f"at most {room}, as the prompt{where} has {len(ids)} tokens and model.seq_len is {seq_len}"
            raise UserError("--tokens", args.tokens, accepted)
        prompts.append(Prompt(text, ids, args.tokens or min(_TOKENS, room), line))
    if unused:
        say(f"warning: lines with tools that the chat template does not take: {unused:,}")
    return prompts


def _read(path: Path, chat: bool) -> dict[int, dict[str, Any]]:
    # By line number. A pipe, or "-" for standard input, has no size to check beforehand, so reading stops at the limit.
    from axonn_jax.core.documents import read_bytes
    from axonn_jax.files.data.prompts import MOST_BYTES, objects_of

    with refused("--prompts", path, "a file with a JSON object a line"):
        if (stream := str(path) == "-") or path.is_fifo():
            with open(0 if stream else path, "rb", closefd=not stream) as pipe:
                raw = pipe.read(MOST_BYTES + 1)
            if len(raw) > MOST_BYTES:
                raise ValueError(f"more than the {MOST_BYTES:,} bytes that are read")
        else:
            raw = read_bytes(path, MOST_BYTES)
    prompts = objects_of(raw, path, "--prompts", chat=chat)
    if not prompts:
        accepted = "at least one line; with several processes only the first has a standard input" if stream else ""
        raise UserError("--prompts", str(path), accepted or "at least one line")
    return prompts


def print_texts(
    generator: "Generator",
    tokenizer: "Tokenizer",
    prompts: Sequence[Prompt],
    requests: "Sequence[Request]",
    sampling: "Sampling",
    args: "Generate",
) -> None:
    """Generate and print all texts: a single one token by token, several in order as soon as each is complete."""
    from axonn_jax.text.inference.texts import write

    first = generator.grid.rank == 0
    texts = ["" for _ in requests]
    logs: list[list[float]] = [[] for _ in requests]
    ids: list[list[int]] = [[] for _ in requests]
    ended, printed = [False] * len(requests), 0
    single = len(requests) == 1 and not args.json
    speed = _Speed(min(args.slots or 1, len(requests)))
    for piece in write(generator, tokenizer, requests, sampling, stop=args.stop, logs=args.logprobs):
        at = piece.request
        speed.count(len(piece.ids))
        if single and first:
            _put(piece.text if speed.pieces > 1 else prompts[0].text + piece.text)
        texts[at] += piece.text
        logs[at] += piece.log_probabilities
        ids[at] += piece.ids
        ended[at] = piece.ended
        while not single and first and printed < len(requests) and ended[printed]:
            prompt, sample = prompts[printed // args.samples], printed % args.samples
            result = prompt.line | {"sample": sample, "text": texts[printed]}
            result |= {"ids": ids[printed], "logprobs": logs[printed]} if args.logprobs else {}
            _put(json.dumps(result) + "\n" if args.json else f"{prompt.text}{texts[printed]}\n\n")
            printed += 1
    if first:
        _put("\n" if single else "")
        say(str(speed))


class _Speed:
    """Counter of tokens a second that excludes the first result of every slot, which include compilation."""

    def __init__(self, at_once: int):
        self._at_once, self._began = at_once, time.perf_counter()
        self.pieces, self._tokens, self._early, self._warm = 0, 0, 0, self._began

    def count(self, tokens: int) -> None:
        """Add the tokens of a piece."""
        self.pieces, self._tokens = self.pieces + 1, self._tokens + tokens
        if self.pieces <= self._at_once:
            self._early, self._warm = self._tokens, time.perf_counter()

    def __str__(self) -> str:
        now = time.perf_counter()
        line = f"{self._tokens:,} tokens in {now - self._began:.1f} s with prompts and compilation"
        if warm_tokens := self._tokens - self._early:
            line += f"; the last {warm_tokens:,}: {warm_tokens / (now - self._warm):,.1f} tokens/s"
        return line


def _put(text: str) -> None:
    # Control characters could take over a terminal; pipes and files get the text unchanged.
    sys.stdout.write(printable(text) if sys.stdout.isatty() else text)
    sys.stdout.flush()
