"""Prompts in files: a JSON object a line, or a text a line; their tokens."""

from codecs import BOM_UTF8
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from axonn_jax.core.documents import parse_json, read_bytes
from axonn_jax.core.errors import UserError, refused
from axonn_jax.core.models.config import ModelShape
from axonn_jax.files.data.manifest import MAX_VOCAB
from axonn_jax.files.data.tokenize import EOT_ID, has_our_settings

if TYPE_CHECKING:
    from tokenizers import Tokenizer

MOST_BYTES = 256 << 20
"""Largest size of a file of prompts, in bytes."""


def objects_of(raw: bytes, path: Path, field: str, *, chat: bool = False) -> dict[int, dict[str, Any]]:
    """Return the objects of a file by line number; for a `chat` they may have messages.

    Raises ``UserError`` on `field`, the file's name in errors, for the first unusable line.
    """
    prompts = {}
    for number, line in _filled(raw):
        try:
            entry = parse_json(line)
        except ValueError as error:
            raise UserError(field, file_line(path, number), f"an object in JSON; {error}") from None
        messages = chat and isinstance(entry, dict) and "messages" in entry
        if not (messages or (isinstance(entry, dict) and isinstance(entry.get("prompt"), str))):
            accepted = 'an object whose "prompt" is a text' + ', or one with "messages"' * chat
            raise UserError(field, file_line(path, number), accepted)
        prompts[number] = entry
    return prompts


def prompt_ids(tokenizer: "Tokenizer", prompt: str, *, special: bool = True) -> list[int]:
    """Return a prompt's tokens, with the post-processor's if `special`.

    With a tokenizer trained by `prepare`, an empty prompt is the end of the document before. Raises ``UserError`` for a
    prompt without tokens, or other than text.
    """
    try:
        prompt.encode()
    # Python represents bytes of a command line that are not UTF-8 by surrogates, which a tokenizer cannot encode.
    except UnicodeEncodeError:
        raise UserError("--prompt", prompt, "a text in UTF-8") from None
    ids: list[int] = tokenizer.encode(prompt, add_special_tokens=special).ids
    if not ids and has_our_settings(tokenizer):
        return [EOT_ID]
    if not ids:
        raise UserError("--prompt", prompt, "a text of at least one token")
    return ids


def ids_within(
    tokenizer: "Tokenizer", text: str, seq_len: int, *, special: bool = True, vocab: int = MAX_VOCAB
) -> tuple[int, ...]:
    """Return a prompt's tokens (`prompt_ids`).

    Raises ``UserError`` for one beyond the model's vocabulary, or without room for one more.
    """
    ids = tuple(prompt_ids(tokenizer, text, special=special))
    if (largest := max(ids)) >= vocab:
        accepted = f"a prompt of tokens below model.vocab = {vocab}; this one has {largest}"
        raise UserError("--prompt", tokenizer.id_to_token(largest), accepted)
    if len(ids) >= seq_len:
        accepted = f"a prompt of at most {seq_len - 1} tokens (model.seq_len = {seq_len}); this one has {len(ids)}"
        raise UserError("--prompt", f"{len(ids)} tokens", accepted)
    return ids


def file_line(path: Path, number: int) -> str:
    """Return the name of a file's line in messages."""
    return f"{path}, line {number}"


class FixedPrompt(NamedTuple):
    """Prompt that a run continues at intervals, as an object of the prompts file and as tokens."""

    line: dict[str, Any]
    ids: tuple[int, ...]


def fixed_prompts(path: Path, tokenizer: "Tokenizer", shape: ModelShape, field: str) -> list[FixedPrompt]:
    """Return the prompts of a `.jsonl` file, or of another file with one text per line; errors name `field`."""
    with refused(field, path, "a file of prompts, .jsonl or one a line"):
        raw = read_bytes(path, MOST_BYTES).removeprefix(BOM_UTF8)
    if path.suffix == ".jsonl":
        lines = objects_of(raw, path, field)
    else:
        # Bytes that are not UTF-8 become surrogates, which `prompt_ids` rejects with the line in the message.
        lines = {number: {"prompt": line.decode(errors="surrogateescape")} for number, line in _filled(raw)}
    prompts = []
    for number, line in lines.items():
        try:
            prompts.append(FixedPrompt(line, ids_within(tokenizer, line["prompt"], shape.seq_len, vocab=shape.vocab)))
        except UserError as error:
            raise UserError(field, file_line(path, number), error.accepted) from None
    if not prompts:
        raise UserError(field, str(path), "at least one line")
    return prompts


def _filled(raw: bytes) -> Iterator[tuple[int, bytes]]:
    """Return nonempty lines with numbers."""
    return ((number, line) for number, line in enumerate(raw.splitlines(), 1) if line.strip())
