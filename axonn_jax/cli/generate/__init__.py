"""``axonn-jax generate``: continuations of prompts by a trained model."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from axonn_jax.cli.arguments import Arg, NotNegative
from axonn_jax.core.errors import UNSET, UserError, as_flags
from axonn_jax.core.grid import GridShape
from axonn_jax.core.options import CachedKeys, InferencePrecision
from axonn_jax.core.terminal import libraries_on_stderr, say
from axonn_jax.text.loki.options import LokiOptions

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_DEFAULT_SLOTS = 16
_MOST_SAMPLES = 1_000_000
_DTYPES = {"auto": None, "fp32": "float32", "bf16": "bfloat16"}


@dataclass(frozen=True)
class Generate:
    """Continue prompts with the weights of a run directory, with a key/value cache on a grid of data, y and x."""

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train` or `convert`, or a Hugging Face model's; where there is no such path, a
    model on the Hub, as org/name or org/name@revision."""
    base: Path | None = None
    """The base of the adapters in RUN_DIR, if it is not where they say."""
    prompt: str | None = None
    """The text to continue; an empty one begins a document, with a tokenizer trained by `prepare`."""
    prompts: Annotated[Path | None, Arg(default="--prompt")] = None
    """A file, a pipe or - for standard input: each line a JSON object with the key "prompt"; --json keeps other
    keys."""
    chat: bool = False
    """Put each prompt into the model's chat template, as the user's message, and print the answer alone. A line of
    --prompts may have "messages", a whole conversation, in the place of its prompt. Needs the extra hf."""
    template: Annotated[str | None, Arg(default="the model's own")] = None
    """Template of --chat: alpaca, or a FILE.jinja."""
    samples: Annotated[int, Arg(least=1, most=_MOST_SAMPLES)] = 1
    """Texts for each prompt."""
    tokens: Annotated[int | None, Arg(default="100, or what model.seq_len leaves", least=1)] = None
    """Most tokens to add; an end token ends a text earlier."""
    temperature: float = 0.8
    """Divisor of the scores before sampling; 0 always takes the likeliest token."""
    top_k: NotNegative = 50
    """Sample among this many likeliest tokens only; 0: among all."""
    top_p: float = 1.0
    """Sample among the fewest likeliest tokens whose probabilities add up to this."""
    min_p: float = 0.0
    """Sample among tokens at least this times as probable as the likeliest."""
    repetition_penalty: float = 1.0
    """Factor against repetition: divides positive scores of the text's tokens, and multiplies negative ones."""
    stop: Annotated[tuple[str, ...], Arg(repeat=True)] = ()
    """A string before which a text ends, also the text of a special token."""
    seed: NotNegative = 0
    """Seed of the sampling; a text depends on prompt, seed and its number among the samples, not on grid or slots."""
    slots: Annotated[int | None, Arg(default="16, or one a text", least=1)] = None
    """Texts made at a time; others wait."""
    precision: InferencePrecision = "auto"
    """Precision of weights and cache; auto: bf16 on accelerators, fp32 on CPUs."""
    attention: CachedKeys = "full"
    """Cached keys attended to by a new token. full: all; loki: the first by rank (NeurIPS 2024)."""
    loki: LokiOptions = field(default_factory=LokiOptions)
    grid: GridShape = field(default_factory=GridShape)
    logprobs: bool = False
    """Add the id and the log-probability of every token to --json."""
    json: bool = False
    """Print a JSON object a text instead of streaming texts."""


def directories(run_dir: Path, base: Path | None) -> tuple[Path, Path | None]:
    """Return RUN_DIR and --base; names on the Hub become their directories in the cache."""
    from axonn_jax.files.huggingface.hub import resolve_path

    run_dir = resolve_path(run_dir, "RUN_DIR", "an existing directory left by `axonn-jax train` or `convert`")
    return run_dir, base and resolve_path(base, "--base", "the directory of the adapters' base")


def tokenizer_of(run_dir: Path, vocab: int) -> tuple["Tokenizer", int]:
    """Return the tokenizer of a directory and its number of entries, at most `vocab`."""
    from axonn_jax.files.data.tokenize import load

    tokenizer = load(run_dir / "tokenizer.json", "RUN_DIR")
    return tokenizer, min(1 + max(tokenizer.get_vocab(with_added_tokens=True).values()), vocab)


def run(args: Generate) -> int:
    """Print prompts and continuations on the first process of a run, and tokens a second on stderr.

    Raises:
        UserError: The directory holds no model, or an option is out of range.
    """
    # Report mistakes before importing jax, which takes a second: first those of flags alone, then of the directory.
    if "" in args.stop:
        raise UserError("--stop", "", "a text of at least one character")
    if args.logprobs and not args.json:
        raise UserError("--logprobs", True, "--json beside it")
    if args.template is not None and not args.chat:
        raise UserError("--template", args.template, "--chat beside it")
    if (args.prompt is None) == (args.prompts is None):
        value = UNSET if args.prompt is None else args.prompt
        raise UserError("--prompt", value, "either a text or --prompts FILE, a JSON object a line")
    args.loki.check(args.attention)
    if (args.slots or 0) % (replicas := args.grid.batch_shards):
        raise UserError("--slots", args.slots, f"a multiple of {args.grid.batch_rule} = {replicas}")
    from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN
    from axonn_jax.files.huggingface.pretrained import shape_of

    run_dir, base = directories(args.run_dir, args.base)
    args = replace(args, run_dir=run_dir, base=base)
    shape = shape_of(args.run_dir, "RUN_DIR")
    if (rule := shape.attention_rule(0)) != EVERY_TOKEN and args.attention != "full":
        raise UserError("--attention", args.attention, f"full for a model with {rule}")

    from axonn_jax.cli.generate.texts import print_texts, prompts_of
    from axonn_jax.files.data.tokenize import ends_of
    from axonn_jax.text.inference.sampling import Sampling
    from axonn_jax.text.inference.weights import on_grid

    names = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p", "seed")
    with as_flags("sampling"):
        sampling = Sampling(**{name: getattr(args, name) for name in names})
    repeated_shape = on_grid(shape, args.grid)
    tokenizer, entries = tokenizer_of(args.run_dir, shape.vocab)
    prompts = prompts_of(args, tokenizer, shape.seq_len, shape.vocab)

    from axonn_jax.text.loki import components

    calibrated = (
        components.load(args.run_dir / components.FILE, args.run_dir, shape) if args.attention == "loki" else None
    )

    from axonn_jax.core.distributed.initialize import start
    from axonn_jax.text.inference.generator import Generator
    from axonn_jax.text.inference.slots import numbered

    with libraries_on_stderr():
        _, grid = start(args.grid)
    requests = numbered(((prompt.ids, prompt.tokens) for prompt in prompts), args.samples)
    # Slots are split over the shards of the batch, so their number is rounded up to a multiple.
    slots = args.slots or -(-min(_DEFAULT_SLOTS, len(requests)) // replicas) * replicas
    generator = Generator(
        args.run_dir,
        grid,
        base=args.base,
        slots=slots,
        dtype=_DTYPES[args.precision],
        attention=components.attention_of(args.attention, args.loki, repeated_shape),
        stops=ends_of(args.run_dir, tokenizer, "RUN_DIR", shape.vocab),
        limit=entries,
    )
    if args.attention == "loki" and (share := args.loki.share_read(repeated_shape)) >= 1:
        heads = f"{repeated_shape.heads // repeated_shape.kv_heads} query heads a KV head, each with its own choice"
        say(f"warning: Loki reads {share:.2f} of what full attention reads, with {heads}; lower --loki.keys")
    if calibrated is not None:
        vectors, facts = calibrated
        components.check_weights(facts, generator.programs.parts, generator.params, args.run_dir)
        times = repeated_shape.kv_heads // shape.kv_heads
        generator.extras = components.laid_out(vectors, generator.programs.extra_spec, grid.mesh, times=times)
    print_texts(generator, tokenizer, prompts, requests, sampling, replace(args, slots=slots))
    return 0
