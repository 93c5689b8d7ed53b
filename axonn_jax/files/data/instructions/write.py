"""Preparation of instruction data: conversations of files to packed rows, tokenizer and manifest."""

import hashlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from axonn_jax.core.errors import UserError, first_of
from axonn_jax.core.options import InstructionLoss, TooLong
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.holdout import Holdout
from axonn_jax.files.data.instructions.chat import FILE
from axonn_jax.files.data.instructions.marks import encoded
from axonn_jax.files.data.instructions.mix import Mix
from axonn_jax.files.data.instructions.pack import MarkedTokens, Packer
from axonn_jax.files.data.instructions.schemas import Conversation
from axonn_jax.files.data.instructions.templates import template_name, template_of
from axonn_jax.files.data.manifest import SPLITS, Manifest, Split
from axonn_jax.files.data.output import appearing
from axonn_jax.files.data.prepare import (
    PREPARED,
    SHARD_TOKENS,
    Report,
    ShardWriter,
    check_numbers,
    described,
    silent,
    unigram_entropy,
)
from axonn_jax.files.huggingface.pretrained import TEMPLATES
from axonn_jax.files.huggingface.splits import files_of

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_WORD = np.dtype("uint32")
_SHOWN = 5
_DEFAULT_LINES = {
    "chat": "template: chat, the tokenizer's own; --template alpaca is HPC-Coder-V2's",
    "alpaca": "template: alpaca, as the tokenizer has none of its own",
}
_KINDS = {"too_long": "longer than a row", "cut": "cut", "without_targets": "without a target that counts"}
"""Words for documents that are left out or cut."""


@dataclass(frozen=True)
class InstructionOptions:
    """Form of instruction data."""

    seq_len: int
    """Tokens of a row that are inputs: the model's model.seq_len."""
    template: str = ""
    """Name, or file, of the template (`templates.template_of`); empty: the tokenizer's own, or else alpaca."""
    loss: InstructionLoss = "response"
    """Targets that count: the answers' tokens, or all."""
    too_long: TooLong = "drop"
    """Fate of a document longer than a row."""
    mix: Sequence[str] = ()
    """More files with weights, each as FILE:WEIGHT."""
    bos: bool = False
    """True if documents begin with the tokenizer's begin token."""
    skip_bad: bool = False
    """True if rows of no use are left out and counted, instead of ending the preparation."""
    valid: Path | None = None
    """File of the held-out conversations; None: a share of the others is held out."""


def prepare_instructions(
    source: Path,
    out: Path,
    options: InstructionOptions,
    *,
    tokenizer: Path,
    split: str | None = None,
    holdout: float = 0.05,
    seed: int = 0,
    force: bool = False,
    shard_tokens: int = SHARD_TOKENS,
    report: Report = silent,
) -> tuple[Manifest, list[str]]:
    """Write the prepared directory ``out`` of packed rows from conversations, atomically.

    Returns the manifest, and lines on anything unexpected.

    Raises:
        UserError: an argument is out of range, a row is of no use, no document fits, ``out`` holds something else or
            cannot be written, or another prepare writes there.
    """
    encoder, files, end = tokenize.load_existing(tokenizer, "--tokenizer")
    by_user = bool(options.template)
    options = options if by_user else replace(options, template=template_name(tokenizer))
    template = template_of(options.template, tokenizer)
    begin = tokenize.begin_of(encoder) if options.bos else []
    if options.bos and not begin:
        raise UserError("--bos", True, "a --tokenizer whose post-processor adds a token before a text")
    check_numbers(holdout, seed, shard_tokens)
    share = 0 if options.valid else holdout
    vocab_ids = {*encoder.get_vocab(with_added_tokens=True).values()}
    inputs = files_of(source, split, (), report)
    skip_bad, valid = options.skip_bad, options.valid
    mix = Mix(inputs.paths, options.mix, seed, template.takes, vocab_ids, skip_bad=skip_bad, valid=valid)
    encoder.encode_special_tokens = not template.special
    vocab, width, out = max(vocab_ids) + 1, options.seq_len + 1, out.resolve()
    # Round down to a multiple of the row, so that no row is split between two shards.
    limit = max(shard_tokens // width, 1) * width
    with appearing(source.resolve(), out, PREPARED, force=force) as partial:
        splitter, size = Holdout(share, seed), 0
        for read in mix.rows():  # the first of two passes: splits need to have seen all documents
            splitter.see(read.document)
            size += round(read.document.characters * read.weight)
            report("reading", size, 0)
        if splitter.alike:
            accepted = "at least two rows that differ, one to hold out" if share else "at least one row"
            raise UserError("SOURCE", str(source), accepted)
        unused, mix.unused = mix.unused, Counter()  # the second pass must not count keys again
        with ExitStack() as stack:
            writers = {name: ShardWriter(partial, name, _WORD, vocab, end, limit) for name in SPLITS}
            rows = {name: _Rows(stack.enter_context(writer), options) for name, writer in writers.items()}
            done = 0
            unmarked = dict[str, UserError]()
            arguments = mix.divided(splitter), template, options.loss, encoder, begin, end
            for split, document, row in encoded(mix, *arguments, unmarked):
                rows[split].add(document, row.conversation)
                done += row.document.characters
                report("encoding", done, size)
            splits = {name: of_split.close() for name, of_split in rows.items()}
        skipped = Counter({"bad": len(mix.bad), "unmarked": len(unmarked)})
        skipped = rows["train"].skipped + rows["valid"].skipped + skipped
        if unmarked and not any(split.tokens for split in splits.values()):
            line, error = next(iter(unmarked.items()))
            raise UserError("--template", options.template, f"{error.accepted}; at {line}")
        _check_filled(splits, rows, options, holdout, source)
        used = options.template.endswith(".jinja") or any(of_split.templated for of_split in rows.values())
        # Store the template with the tokenizer, so that generation prompts the model in the form of its training.
        if used and options.template != "chat":
            files = {name: raw for name, raw in files.items() if not name.startswith(f"{TEMPLATES}/")}
            files[FILE] = template.jinja(encoder.id_to_token(end) or "").encode()
        manifest = described(
            partial,
            files,
            path=out,
            version=2,
            kind="rows",
            row=width,
            vocab=vocab,
            dtype=_WORD.name,
            eot_id=end,
            splits=splits,
            unigram_entropy=unigram_entropy(rows["valid"].writer.counts),
            skipped=skipped,
            options={**inputs.facts, **_user_options(options, template.source), "holdout": holdout, "seed": seed},
        )
    lines = [
        *([_DEFAULT_LINES[options.template]] if used and not by_user else []),
        *_skipped_lines(manifest, unused),
        *_refused("rows of no use", mix.bad),
        *_refused("conversations whose answers the template's text does not show", unmarked),
        *_ends(encoder, tokenizer, rows),
    ]
    return manifest, lines


def _user_options(options: InstructionOptions, template: str) -> dict[str, object]:
    """Return the options as recorded in the manifest."""
    return {
        "template": options.template,
        "template_sha256": hashlib.sha256(template.encode()).hexdigest(),
        "loss": options.loss,
        "too_long": options.too_long,
        "mix": [*options.mix],
        "bos": options.bos,
        "valid": str(options.valid or ""),
    }


class _Rows:
    """Rows of one split on their way to its files."""

    def __init__(self, writer: ShardWriter, options: InstructionOptions):
        self.writer, self._options, self._width = writer, options, options.seq_len + 1
        self.skipped = Counter[str]()
        """Documents left out or cut, by kind."""
        self.shortest: int | None = None
        """Tokens of the shortest document."""
        self.first: int | None = None
        """First token of the first document that did not come as tokens."""
        self.templated = False
        """True if a document is a conversation by the template."""
        self._packer = Packer(self._width)
        self._size = self._padding = self._counted = 0

    def add(self, document: MarkedTokens, conversation: Conversation) -> None:
        """Add a document, or count it as skipped."""
        length = len(document.ids)
        self.first = int(document.ids[0]) if self.first is None and not conversation.ready else self.first
        self.templated |= len(conversation.messages) > 0
        self.shortest = length if self.shortest is None else min(self.shortest, length)
        if length > self._width:
            if self._options.too_long == "drop":
                self.skipped["too_long"] += 1
                return
            document = document.cut(self._width)
        if not document.targets:
            self.skipped["without_targets"] += 1
            return
        self.skipped["cut"] += length > self._width
        for row in self._packer.add(document):
            self._write(row)

    def close(self) -> Split:
        """Write the last rows; return the split."""
        for row in self._packer.flush():
            self._write(row)
        shards = self.writer.close()
        tokens = sum(shard.tokens for shard in shards)
        return Split(self._size, tokens, shards, self._counted, self._padding, self.writer.largest)

    def _write(self, row: list[MarkedTokens]) -> None:
        from axonn_jax.core.models.packed import counted_targets, pack, token_ids  # imports jax, a second

        ids = [document.ids for document in row]
        counts = [document.counts for document in row]
        words = pack(ids, self._width, counts)
        targets = token_ids(words[1:])[counted_targets(words, packed=True)]
        self.writer.add(words.view(np.uint32), targets, len(row))
        self._counted += len(targets)
        self._padding += self._width - sum(len(document.ids) for document in row)
        self._size += sum(document.size for document in row)


def _check_filled(
    splits: dict[str, Split], rows: dict[str, _Rows], options: InstructionOptions, share: float, source: Path
) -> None:
    """Raise ``UserError`` where a split has no rows."""
    required = SPLITS if share or options.valid else SPLITS[:1]
    empty = [name for name in required if not splits[name].tokens]
    shortest = min((of_split.shortest for of_split in rows.values() if of_split.shortest), default=0)
    if empty == [*required] and shortest > options.seq_len + 1:
        hint = "or --too-long cut" if options.too_long == "drop" else "cut to a row, none has a target"
        accepted = f"at least {shortest - 1}: the shortest document has {shortest} tokens; {hint}"
        raise UserError("--seq-len", options.seq_len, accepted)
    if empty:
        kinds = sum((rows[name].skipped for name in empty), Counter[str]()).items()
        skipped = ", ".join(f"{count:,} {_KINDS[kind]}" for kind, count in kinds if kind != "cut")
        if empty == [*required]:
            raise UserError(
                "SOURCE", str(source), f"a document with a target that counts; all are left out ({skipped})"
            )
        accepted = f"a split with a document in each part; of {empty[0]} all are left out ({skipped}); see --seq-len"
        raise UserError("--holdout", share, accepted)


def _skipped_lines(manifest: Manifest, unused: Counter[str]) -> Iterator[str]:
    """Yield lines on keys that were not read, and on conversations that were left out or cut."""
    if unused:
        yield f"keys not read: {first_of([f'{key} ({count:,} rows)' for key, count in sorted(unused.items())])}"
    for kind, count in manifest.skipped.items():
        if count and kind in _KINDS:
            yield f"{_KINDS[kind]}: {count:,} conversations"


def _refused(name: str, lines: Mapping[str, UserError]) -> Iterator[str]:
    """Yield the number of refused rows, and the first five of them with the reasons."""
    if lines:
        yield f"{name}: {len(lines):,} left out"
    for line, error in islice(lines.items(), _SHOWN):
        yield f"  {line}: {error.accepted}"


def _ends(encoder: "Tokenizer", tokenizer: Path, rows: dict[str, _Rows]) -> Iterator[str]:
    """Yield lines on the begin and end tokens that the conversations lack."""
    folder = tokenizer if tokenizer.is_dir() else tokenizer.parent
    ends, train = tokenize.ends_of(folder, encoder, "--tokenizer"), rows["train"]
    if not train.writer.counts[[*ends]].any():
        yield f"no target is {' or '.join(str(encoder.id_to_token(each)) for each in ends)}, at which generation ends"
    if (begin := tokenize.begin_of(encoder)) and train.first not in (None, begin[0]):
        yield f"conversations begin without {encoder.id_to_token(begin[0])}, the tokenizer's begin token: --bos adds it"
