"""``axonn-jax generate``: continues prompts with a trained model."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from axonn_jax.cli_args import Arg, NotNegative, Positive
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.loki.options import LokiOptions
from axonn_jax.options import CachedKeys, InferencePrecision

_TOKENS = 100
_AT_ONCE = 16
_DTYPES = {"auto": None, "fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Generate:
    """Continue prompts with the weights of a run directory, with a key/value cache on a grid of data, y and x."""

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train` or `convert`, or a Hugging Face model's."""
    prompt: str | None = None
    """The text to continue."""
    prompts: Annotated[Path | None, Arg(default="--prompt")] = None
    """A file of many: a JSON object with the key "prompt" a line."""
    samples: Positive = 1
    """Texts for each prompt."""
    tokens: Annotated[int | None, Arg(default="100, or what model.seq_len leaves", least=1)] = None
    """How many tokens to add at most; a text ends before with the tokenizer's end of text."""
    temperature: float = 0.8
    """Divides the scores before sampling; 0 always takes the likeliest token."""
    top_k: NotNegative = 50
    """Sample among this many likeliest tokens only; 0: among all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample among tokens at least this times as probable as the likeliest."""
    repetition_penalty: float = 1.0
    """Divides positive scores of tokens that the text holds, and multiplies negative ones."""
    stop: tuple[str, ...] = ()
    """Texts before which to end."""
    seed: NotNegative = 0
    """Seed of the sampling; a text depends on prompt, seed and its number among the samples, not on grid or slots."""
    slots: Annotated[int | None, Arg(default="16, or one a text", least=1)] = None
    """Texts that are made at a time; others wait for a place."""
    precision: InferencePrecision = "auto"
    """Of weights and cache; auto: bf16 on accelerators, fp32 on CPUs."""
    attention: CachedKeys = "full"
    """Which keys a new token attends to: all, those that Loki (NeurIPS 2024) ranks first, or baselines of its paper."""
    loki: LokiOptions = field(default_factory=LokiOptions)
    grid: GridShape = field(default_factory=GridShape)
    logprobs: bool = False
    """With --json: the log-probability of every token too."""
    json: bool = False
    """Print a JSON object a text instead of the text as it comes."""


def run(args: Generate) -> int:
    """Prints prompts and continuations, on the first process of a run; tokens a second go to stderr.

    Raises:
        UserError: the directory is not a run's, or an option is out of range.
    """
    from axonn_jax.cli.generate.texts import print_texts, read_prompts
    from axonn_jax.data.tokenize import load, prompt_ids
    from axonn_jax.inference.sampling import Sampling
    from axonn_jax.inference.weights import check_grid, shape_of

    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed")
    sampling = Sampling(**{name: getattr(args, name) for name in names})
    sampling.check()
    if "" in args.stop:
        raise UserError("--stop", "", "a text of at least one character")
    if (args.prompt is None) == (args.prompts is None):
        raise UserError("--prompt", args.prompt or "", "a text, or --prompts FILE.jsonl, one of both")
    args.loki.check(args.attention)
    check_grid(args.grid)
    shape = shape_of(args.run_dir)
    shape.check_grid(args.grid)
    tokenizer = load(args.run_dir / "tokenizer.json", "RUN_DIR")
    if (entries := tokenizer.get_vocab_size()) > shape.vocab:
        accepted = f"a tokenizer.json of at most model.vocab = {shape.vocab} entries in it; this one has {entries}"
        raise UserError("RUN_DIR", str(args.run_dir), accepted)
    prompts = [args.prompt] if args.prompt is not None else read_prompts(args.prompts)
    ids = [prompt_ids(tokenizer, prompt) for prompt in prompts]
    wanted = [budget(args.tokens, tokens, shape.seq_len) for tokens in ids]
    if shape.window and args.attention != "full":
        raise UserError("--attention", args.attention, f"full for a model whose tokens see a window of {shape.window}")

    from axonn_jax.loki import components

    calibrated = (
        components.load(args.run_dir / components.FILE, args.run_dir, shape) if args.attention == "loki" else None
    )

    from axonn_jax.distributed.initialize import start
    from axonn_jax.inference.generator import Generator, Request

    _, grid = start(args.grid)
    requests = [
        Request(tuple(own), tokens, sample)
        for own, tokens in zip(ids, wanted, strict=True)
        for sample in range(args.samples)
    ]
    replicas = grid.shape.batch_shards
    generator = Generator(
        args.run_dir,
        grid,
        slots=args.slots or -(-min(_AT_ONCE, len(requests)) // replicas) * replicas,
        dtype=_DTYPES[args.precision],
        attention=components.attention_of(args.attention, args.loki, shape),
        stops=end_tokens(args.run_dir, tokenizer),
        limit=entries,
    )
    if calibrated is not None:
        vectors, facts = calibrated
        components.check_weights(facts, generator.params, args.run_dir)
        generator.extras = components.laid_out(vectors, generator.programs.extra_spec, grid.mesh)
    print_texts(generator, tokenizer, prompts, requests, sampling, args)
    return 0


def budget(tokens: int | None, prompt: Sequence[int], most: int) -> int:
    """How many tokens to add to a prompt; raises ``UserError`` where the model has no room for them."""
    room = most - len(prompt)
    if room < (tokens or 1):
        accepted = f"at most {room}, as the prompt has {len(prompt)} tokens and model.seq_len is {most}"
        if room < 1:
            accepted = f"a prompt of at most {most - 1} tokens (model.seq_len = {most}); this one has {len(prompt)}"
            raise UserError("--prompt", f"{len(prompt)} tokens", accepted)
        raise UserError("--tokens", tokens, accepted)
    return tokens or min(_TOKENS, room)


def end_tokens(run: Path, tokenizer: Any) -> tuple[int, ...]:
    """The token that ends a text, as the directory names it, or the one of `prepare`'s tokenizers."""
    from axonn_jax.data.tokenize import EOT
    from axonn_jax.models.huggingface.pretrained import end_token

    vocab = tokenizer.get_vocab(with_added_tokens=True)
    end = end_token(run, vocab, "RUN_DIR")
    end = vocab.get(EOT) if end is None else end
    return () if end is None else (end,)
