"""``axonn-jax generate``: continues a prompt with a trained model."""

import itertools
import json
import math
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from axonn_jax.cli_args import Arg, NotNegative, Positive
from axonn_jax.errors import UserError
from axonn_jax.terminal import printable, say


@dataclass(frozen=True)
class Generate:
    """Continue a prompt with the weights of a run directory, on one device."""

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train` or `convert`, or a Hugging Face model's."""
    prompt: str
    """The text to continue."""
    tokens: Positive = 100
    """How many tokens to add."""
    temperature: float = 0.8
    """Divides the scores before sampling; 0 always takes the likeliest token."""
    top_k: NotNegative = 50
    """Sample among this many likeliest tokens only; 0: among all."""
    seed: NotNegative = 0
    """Seed of the sampling."""
    json: bool = False
    """Print one JSON object instead of the text as it comes."""


def run(args: Generate) -> int:
    """Prints prompt and continuation.

    Raises:
        UserError: the directory is not a run's, or an option is out of range.
    """
    if not (math.isfinite(args.temperature) and args.temperature >= 0):
        raise UserError("--temperature", args.temperature, "a finite number of at least 0")
    from axonn_jax.models.huggingface.pretrained import is_pretrained, read_config

    if is_pretrained(args.run_dir):
        from axonn_jax.models.huggingface.families import shape_from_config

        shape = shape_from_config(read_config(args.run_dir, "RUN_DIR"))
    elif (args.run_dir / "config.toml").is_file():
        from axonn_jax.train.config_file import read

        shape = read(str(args.run_dir / "config.toml"), []).model.shape()
    else:
        raise UserError("RUN_DIR", str(args.run_dir), "a directory left by `axonn-jax train`, with a config.toml")
    from axonn_jax.data.tokenize import load, prompt_ids

    tokenizer = load(args.run_dir / "tokenizer.json", "RUN_DIR")
    if (entries := tokenizer.get_vocab_size()) > shape.vocab:
        accepted = f"a tokenizer.json of at most model.vocab = {shape.vocab} entries in it; this one has {entries}"
        raise UserError("RUN_DIR", str(args.run_dir), accepted)
    prompt_ids(tokenizer, args.prompt)  # before jax starts, which takes seconds
    from axonn_jax.distributed.initialize import start
    from axonn_jax.grid import GridShape
    from axonn_jax.inference.generate import Generator

    _, grid = start(GridShape())
    generator = Generator(args.run_dir, shape, tokenizer, grid, say)
    pieces = generator.continue_prompt(
        args.prompt, tokens=args.tokens, temperature=args.temperature, top_k=args.top_k, seed=args.seed
    )
    if args.json:
        print(json.dumps({"prompt": args.prompt, "text": "".join(pieces)}))
        return 0
    for piece in itertools.chain((args.prompt,), pieces):
        sys.stdout.write(_shown(piece))
        sys.stdout.flush()
    print()
    return 0


def _shown(text: str) -> str:
    """The text as it is for a pipe or a file; on a terminal without what would steer it."""
    encoding = sys.stdout.encoding or "utf-8"
    return (printable(text) if sys.stdout.isatty() else text).encode(encoding, "backslashreplace").decode(encoding)
