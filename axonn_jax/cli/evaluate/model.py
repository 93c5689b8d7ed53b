"""Generation of a model's answers to the prompts of ``axonn-jax evaluate``."""

from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.cli.generate import directories, tokenizer_of
from axonn_jax.core.errors import UserError, as_flags
from axonn_jax.core.terminal import Ticker, libraries_on_stderr

if TYPE_CHECKING:
    from axonn_jax.cli.evaluate import Evaluate
    from axonn_jax.judge.formats import Entry

_MAX_SLOTS, _PHASE = 16, "generating"


def generate_outputs(
    args: "Evaluate", run_dir: Path, prompts: "list[Entry]", *, single_process: bool
) -> "tuple[list[Entry], bool]":
    """Generate outputs for every prompt.

    Args:
        args: Command line.
        run_dir: Directory of the model, or its name on the Hub.
        prompts: Entries of a ParEval file.
        single_process: True to refuse a run of several processes.

    Returns:
        The prompts with their outputs, and True on the first process of a run.

    Raises:
        UserError: The directory holds no model, or an option is out of range.
    """
    from axonn_jax.files.data.tokenize import ends_of
    from axonn_jax.files.huggingface.pretrained import shape_of
    from axonn_jax.judge.continuations import requests_of
    from axonn_jax.judge.forms import form_of
    from axonn_jax.text.inference.sampling import Sampling
    from axonn_jax.text.inference.weights import check_grid, on_grid

    with as_flags("sampling"):
        sampling = Sampling(temperature=args.temperature, top_p=args.top_p, seed=args.seed)
    check_grid(args.grid)
    run_dir, base = directories(run_dir, args.base)
    shape = shape_of(run_dir, "RUN_DIR")
    on_grid(shape, args.grid)
    tokenizer, entries = tokenizer_of(run_dir, shape.vocab)
    form = form_of(args.template, run_dir)
    requests = requests_of(prompts, tokenizer, form, shape, samples=args.samples, tokens=args.tokens)
    stops = ends_of(run_dir, tokenizer, "RUN_DIR", shape.vocab)

    # Everything above reports mistakes before devices are started.
    from axonn_jax.core.distributed.initialize import start
    from axonn_jax.judge.continuations import continuations
    from axonn_jax.text.inference.generator import Generator

    with libraries_on_stderr():
        _, grid = start(args.grid)
    if single_process and grid.size > 1:
        accepted = "one process; several write generations for --suite FILE.json, which --generations judges"
        raise UserError("--execute", f"{grid.size} processes", accepted)
    replicas = args.grid.batch_shards
    slots = -(-min(_MAX_SLOTS, len(requests)) // replicas) * replicas
    with Ticker(_PHASE) as ticker:
        generator = Generator(run_dir, grid, base=base, slots=slots, stops=stops, limit=entries)
        texts = continuations(
            generator,
            tokenizer,
            prompts,
            form,
            requests,
            sampling,
            lambda done: ticker.now(_PHASE, len(requests), "texts", done),
        )
    settings: dict[str, object] = {
        "temperature": args.temperature,
        "top_p": args.top_p,
        "do_sample": args.temperature > 0,
        "max_new_tokens": args.tokens,
        "prompted": form.prompted,
    }
    generations = [prompt | settings | {"outputs": outputs} for prompt, outputs in zip(prompts, texts, strict=True)]
    return generations, grid.rank == 0
