"""``axonn-jax prepare``: text or code to tokenised shards."""

import json
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from axonn_jax.cli_args import Arg
from axonn_jax.terminal import Ticker, printable, say

if TYPE_CHECKING:
    from axonn_jax.data.manifest import Manifest

# fmt: off
INCLUDE = (
    "*.txt", "*.md", "*.rst", "*.tex", "*.html", "*.css", "*.py", "*.pyi", "*.pyx", "*.c", "*.h", "*.cc",
    "*.cpp", "*.hpp", "*.cu", "*.cuh", "*.f", "*.f90", "*.F90", "*.jl", "*.rs", "*.go", "*.java", "*.kt",
    "*.scala", "*.js", "*.ts", "*.jsx", "*.tsx", "*.rb", "*.pl", "*.lua", "*.r", "*.R", "*.m", "*.hs",
    "*.ml", "*.sql", "*.sh", "*.cmake", "*.toml", "*.yaml", "*.yml",
)
EXCLUDE = (
    ".git", ".hg", ".svn", "__pycache__", "site-packages", "node_modules", ".venv", ".tox", ".nox",
    ".eggs", "*.egg-info", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".ipynb_checkpoints",
    "*.min.js", "*.min.css",
)
# fmt: on


@dataclass(frozen=True)
class Prepare:
    """Turn a directory of text or code into tokenised shards to train on.

    Trains a byte-level BPE on the files (or takes a tokenizer that exists), encodes them, and holds some of them out
    for evaluation. OUT_DIR is what `[data] path` of a training configuration names; it appears complete or not at
    all.
    """

    source: Annotated[Path, Arg(positional="SOURCE_DIR")]
    """The directory whose files are read, with all below it. Symbolic links and files that are not UTF-8 text are
    skipped."""

    out: Annotated[Path, Arg(positional="OUT_DIR")]
    """The directory to write; new, or empty. One prepare at a time writes it, and what others put there meanwhile is
    never removed: what was prepared is then kept beside it, and the error says where."""

    vocab: Annotated[int | None, Arg(default="that of --tokenizer")] = None
    """Entries of the vocabulary to train, from 257. Above 65535 tokens take 4 bytes instead of 2."""

    tokenizer: Annotated[Path | None, Arg(default="trained")] = None
    """Take this tokenizer.json, or that of this directory (a pretrained model's, another prepared one), instead."""

    include: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Read only files that match this pattern; repeat it for more. A pattern with a slash is compared with the
    path below SOURCE_DIR, one without with the file's name. Without any: common kinds of text and source code."""

    exclude: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """Leave out files and directories that match this pattern; repeat it for more. These come on top of .git,
    __pycache__, site-packages, node_modules, virtual environments and tool caches below SOURCE_DIR."""

    holdout: float = 0.05
    """The share of the files to hold out for evaluation, at least one; a hash of path and seed chooses."""

    seed: int = 0
    """Changes which files are held out."""

    shard_tokens: int = 16 << 20
    """The most tokens in one shard file."""

    force: bool = False
    """Replace OUT_DIR if it is an earlier prepared directory."""

    json: bool = False
    """Print one JSON object with the result, and nothing else, on standard output."""


def run(args: Prepare) -> int:
    """Prepares the directory, prints what came out and returns the exit status.

    Raises:
        UserError: an argument is of no use, or the text is not enough.
    """
    from axonn_jax.data.prepare import prepare

    began = time.perf_counter()
    with terminated(), Ticker("reading") as ticker:
        manifest, source = prepare(
            args.source,
            args.out,
            vocab=args.vocab,
            tokenizer=args.tokenizer,
            include=args.include or INCLUDE,
            exclude=(*EXCLUDE, *args.exclude),
            holdout=args.holdout,
            seed=args.seed,
            force=args.force,
            shard_tokens=args.shard_tokens,
            report=lambda phase, done, total: ticker.now(phase, total >> 20, "MiB", done >> 20),
        )
    seconds = time.perf_counter() - began
    for reason, count in sorted(source.skipped.items()):
        say(f"skipped {count} {reason}, such as {source.examples[reason]!r}")
    if args.json:
        print(json.dumps(_summary(manifest, seconds)))
    else:
        print(_lines(manifest, seconds))
    return 0


def _summary(manifest: "Manifest", seconds: float) -> dict[str, Any]:
    """The manifest with the number of shards in the place of their list."""
    summary = manifest.as_json()
    for split in summary["splits"].values():
        split["shards"] = len(split["shards"])
    return {"path": str(manifest.path), "seconds": round(seconds, 3), **summary}


def _lines(manifest: "Manifest", seconds: float) -> str:
    rows = [
        f"{name}: {split.tokens:,} tokens from {split.files:,} files, {split.bytes:,} bytes "
        f"({split.bytes / split.tokens:.2f} a token), shards: {len(split.shards)}"
        for name, split in manifest.splits.items()
    ]
    rows.append(f"unigram entropy of the held-out split: {manifest.unigram_entropy:.4f} nats a token")
    rows.append(printable(f"{manifest.path} written in {seconds:.1f} s"))
    return "\n".join(rows)


@contextmanager
def terminated() -> Iterator[None]:
    """Makes SIGTERM, which a batch system sends at the time limit, and SIGHUP clean up as an interrupt does."""

    def stop(number: int, _: object) -> None:
        raise SystemExit(128 + number)

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:  # under nohup it is
                signal.signal(number, stop)
    except ValueError:  # only the main thread may ask for signals
        yield
        return
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
