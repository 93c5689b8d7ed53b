"""``axonn-jax prepare``: tokenised shards from text, code or conversations."""

import json
import signal
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from axonn_jax.cli.arguments import Arg
from axonn_jax.core.documents import look_at
from axonn_jax.core.errors import UNSET, UserError
from axonn_jax.core.options import InstructionLoss, TooLong
from axonn_jax.core.terminal import Ticker, printable, say

if TYPE_CHECKING:
    from axonn_jax.files.data.manifest import Manifest
    from axonn_jax.files.data.source import Source

_TEXT_OPTIONS = {"vocab": None, "field": "text", "include": (), "exclude": ()}
_SHARED_OPTIONS = ("split", "holdout", "seed", "force", "shard_tokens")


@dataclass(frozen=True)
class Prepare:
    """Turn text or code into tokenised shards to train on.

    Trains a byte-level BPE on the documents (or takes an existing tokenizer), encodes all documents, and holds some out
    for evaluation. A document is a file, or a record of JSON Lines (.jsonl, .ndjson) or Parquet; files may be
    compressed (.gz, .zst). `[data] path` of a training configuration names OUT_DIR, which appears complete or not at
    all.

    With --instructions, SOURCE is a file of conversations in JSON Lines or Parquet, which become packed rows to
    fine-tune on.
    """

    source: Annotated[Path, Arg(positional="SOURCE")]
    """A folder, read with all folders below; one file; or, in quotes, a pattern such as 'data/*.jsonl.zst'. Files and
    records other than UTF-8 text are skipped and counted, as are symbolic links outside of the Hugging Face cache.
    Where there is no such path: a data set on the Hub, as org/name or org/name@revision."""

    out: Annotated[Path, Arg(positional="OUT_DIR")]
    """The directory to write; new or empty. One prepare at a time writes there. Files put there by others meanwhile are
    never removed: the shards then stay beside the directory, and the error names the place."""

    vocab: Annotated[int | None, Arg(default="that of --tokenizer")] = None
    """Entries of the vocabulary to train, from 257. Above 65535 tokens take 4 bytes instead of 2."""

    tokenizer: Annotated[Path | None, Arg(default="trained")] = None
    """An existing tokenizer.json, or a directory with one (of a pretrained model, or prepared), to use; or a model
    on the Hub, as org/name or org/name@revision."""

    bos: bool = False
    """Begin each document with the begin token of --tokenizer's post-processor, as Llama's has."""

    field: str = "text"
    """The field of a record, or column of a table, with the text of a document."""

    split: Annotated[str | None, Arg(default="train")] = None
    """The split of a data set on the Hub; CONFIG/SPLIT where its card has several configs and no default."""

    include: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Read only files of this pattern; repeatable. A pattern with a slash is compared with the path below SOURCE,
    another with the file's name, with or without .gz or .zst. Default: common kinds of text and source code, JSON Lines
    and Parquet."""

    exclude: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Skip files and folders of this pattern; repeatable. Always skipped: .git, __pycache__, site-packages,
    node_modules, virtual environments and tool caches below SOURCE."""

    instructions: bool = False
    """Read conversations, an object a line: {"messages": [{"role", "content"}]}, {"conversations": [{"from",
    "value"}]}, {"prompt", "completion"} or {"instruction", "input", "output"}; or tokens: {"input_ids", "labels"}.
    Needs --tokenizer and --seq-len."""

    template: Annotated[str | None, Arg(default="chat, or alpaca where the tokenizer has no template")] = None
    """Text of a conversation: chat (the tokenizer's own), a FILE.jinja like it, or alpaca (as HPC-Coder-V2)."""

    seq_len: Annotated[int | None, Arg(default="none", least=2, most=1 << 24)] = None
    """Tokens of a row into which conversations are packed; the model's model.seq_len."""

    loss: Annotated[InstructionLoss | None, Arg(default="response")] = None
    """Targets that count: those of responses, or all."""

    too_long: Annotated[TooLong | None, Arg(default="drop")] = None
    """Fate of conversations longer than a row."""

    mix: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """One more file, as FILE:WEIGHT; repeatable. Its conversations count WEIGHT times, a share of them below 1."""

    valid: Annotated[Path | None, Arg(default="--holdout")] = None
    """A file of conversations to hold out for evaluation, all of them, in the place of a share of the others."""

    skip_bad: bool = False
    """Leave rows of no use out, count them, and show the first five; by default the first ends the command."""

    holdout: float = 0.05
    """The share of the documents to hold out for evaluation, chosen by a hash of text and seed; at least one document.
    Of a document with a large share of all text the last part is held out. 0: none is, and runs do not evaluate."""

    seed: int = 0
    """Seed of the choice of held-out documents."""

    shard_tokens: int = 16 << 20
    """The most tokens in one shard file."""

    force: bool = False
    """Replace OUT_DIR if an earlier prepare made it."""

    json: bool = False
    """Print one JSON object with the result, and nothing else, on standard output."""


def run(args: Prepare) -> int:
    """Prepare the directory, print the result and return the exit status.

    Raises:
        UserError: An argument cannot be used, or there is too little text.
    """
    _check_kind(args)
    for text in args.mix:
        look_at("--mix", text.rpartition(":")[0])
    shared: dict[str, Any] = {name: getattr(args, name) for name in _SHARED_OPTIONS} | {"tokenizer": _tokenizer(args)}
    notes: Iterable[str]
    began = time.perf_counter()
    with terminated(), Ticker("reading") as ticker:

        def report(phase: str, done: int, total: int) -> None:
            ticker.now(phase, total >> 20, "MiB", done >> 20)

        if args.instructions:
            from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions

            values = {option.name: getattr(args, option.name) for option in fields(InstructionOptions)}
            options = InstructionOptions(**{name: value for name, value in values.items() if value is not None})
            manifest, notes = prepare_instructions(args.source, args.out, options, report=report, **shared)
        else:
            from axonn_jax.files.data.prepare import prepare

            text_options: dict[str, Any] = {name: getattr(args, name) for name in (*_TEXT_OPTIONS, "bos")}
            manifest, source = prepare(args.source, args.out, report=report, **text_options, **shared)
            notes = _notes(args, manifest, source)
    seconds = time.perf_counter() - began
    for line in notes:
        say(line)
    print(json.dumps(_summary(manifest, seconds)) if args.json else _lines(manifest, seconds))
    return 0


def _tokenizer(args: Prepare) -> Path | None:
    from axonn_jax.files.huggingface.hub import SMALL_FILES, resolve_path

    accepted = "a tokenizer.json, or a directory with one"
    return args.tokenizer and resolve_path(args.tokenizer, "--tokenizer", accepted, patterns=SMALL_FILES)


def _check_kind(args: Prepare) -> None:
    # Refuse flags of the other kind of data, which would be ignored.
    row_options = dict.fromkeys(("template", "seq_len", "loss", "too_long", "valid")) | {"mix": (), "skip_bad": False}
    for name, default in (_TEXT_OPTIONS if args.instructions else row_options).items():
        if (value := getattr(args, name)) != default:
            accepted = f"not given with{'' if args.instructions else 'out'} --instructions"
            raise UserError(f"--{name.replace('_', '-')}", value, accepted)
    if args.instructions and args.tokenizer is None:
        accepted = "a tokenizer.json, or the directory of a model to fine-tune: --instructions trains none"
        raise UserError("--tokenizer", UNSET, accepted)
    if args.instructions and args.seq_len is None:
        raise UserError("--seq-len", UNSET, "the length of rows, such as 2048: the model's model.seq_len")


def _notes(args: Prepare, manifest: "Manifest", source: "Source") -> Iterator[str]:
    # Lines about results that may surprise the user.
    from axonn_jax.files.data.source import endings
    from axonn_jax.files.data.tokenize import begin_of, load

    for kind, number in sorted(source.skipped.items()):
        yield f"skipped {number:,} {kind}, such as {source.examples[kind]!r}"
    if source.not_included:
        yield f"left out by --include: {endings(source.not_included)}"
    valid, size = manifest.splits["valid"].bytes, source.size
    if valid > 2 * args.holdout * size:
        yield f"held out: {valid / size:.0%} of the text for --holdout {args.holdout:g}, as documents are few or uneven"
    if args.tokenizer is not None and not args.bos:
        tokenizer = load(manifest.path / "tokenizer.json")
        if begin := begin_of(tokenizer):
            token = tokenizer.id_to_token(begin[0])
            yield f"documents begin without {token}, the tokenizer's begin token: --bos adds it"


def _summary(manifest: "Manifest", seconds: float) -> dict[str, Any]:
    # Lists of shards can be long: report their number instead.
    summary = manifest.as_json()
    for name, split in manifest.splits.items():
        summary["splits"][name] |= {"documents": split.documents, "shards": len(split.shards)}
        summary["splits"][name] |= {"fill": split.fill} if manifest.packed else {}
    summary["unigram_entropy"] = manifest.unigram_entropy if manifest.splits["valid"].tokens else None
    return {"path": str(manifest.path), "seconds": round(seconds, 3), **summary}


def _lines(manifest: "Manifest", seconds: float) -> str:
    splits = {name: split for name, split in manifest.splits.items() if split.tokens}
    rows = [
        f"{name}: {split.tokens:,} tokens from {split.documents:,} documents, {split.bytes:,} bytes "
        f"({split.bytes / split.tokens:.2f} a token), shards: {len(split.shards)}"
        for name, split in splits.items()
    ]
    if manifest.packed:
        rows = [
            f"{name}: {split.tokens // manifest.row:,} rows of {manifest.row - 1:,} tokens from {split.documents:,} "
            f"conversations, {split.fill:.1%} filled, {split.counted:,} targets, shards: {len(split.shards)}"
            for name, split in splits.items()
        ]
    entropy = f"unigram entropy of the held-out split: {manifest.unigram_entropy:.4f} nats a token"
    rows.append(entropy if "valid" in splits else "nothing is held out: runs do not evaluate")
    rows.append(printable(f"{manifest.path} written in {seconds:.1f} s"))
    return "\n".join(rows)


@contextmanager
def terminated() -> Iterator[None]:
    """Turn SIGTERM, which batch systems send at the time limit, and SIGHUP into an exception, so that cleanup runs."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in previous.items():
            if handler is not signal.SIG_IGN:  # as nohup sets it for SIGHUP
                signal.signal(number, stop)
    except ValueError:  # only the main thread may set handlers
        yield
        return
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
