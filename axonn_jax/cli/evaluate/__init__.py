"""``axonn-jax evaluate``: generated programs, built, run and measured with ParEval's files and metrics."""

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from axonn_jax.cli.arguments import Arg, NotNegative, Positive, default_of
from axonn_jax.cli.evaluate.report import check_k, ends, figures, lines
from axonn_jax.cli.main import rank_of
from axonn_jax.cli.prepare import terminated
from axonn_jax.core.errors import UNSET, UserError, local_path, nearest
from axonn_jax.core.grid import GridShape
from axonn_jax.core.terminal import Ticker, printable, say
from axonn_jax.files.huggingface.hub import hub_name
from axonn_jax.judge.build import compiler
from axonn_jax.judge.formats import Entry, judged, read_generations, read_prompts, read_results, samples_of, write
from axonn_jax.judge.judge import judge_all, judging, resumable_results, threads_of
from axonn_jax.judge.metrics import Definition
from axonn_jax.judge.sandbox import Limits, check_sandbox
from axonn_jax.judge.suite import MODELS, Problem, problems

_MODEL_OPTIONS = ("base", "template", "samples", "tokens", "temperature", "top_p", "seed", "grid")
_RUN_OPTIONS = ("execute", "as_root", "seconds", "memory", "compiler")


@dataclass(frozen=True)
class Evaluate:
    """Measure generated programs: build@k, pass@k, speedup_n@k and efficiency_n@k, in the files of ParEval (HPDC 2024).

    RUN_DIR --suite mini --execute generates, builds, runs and measures; --generations FILE --execute judges programs
    of any tool; --results FILE measures without running. RUN_DIR --suite FILE.json writes generations alone, for
    ParEval's own drivers.
    """

    run_dir: Annotated[Path | None, Arg(positional="RUN_DIR")] = None
    """A directory left by `axonn-jax train` or `convert`, or a Hugging Face model's; where there is no such path, a
    model on the Hub, as org/name or org/name@revision, with --out."""
    base: Path | None = None
    """The base of the adapters in RUN_DIR, if it is not where they say."""
    suite: str = "mini"
    """Prompts: mini, a problem of each of ParEval's 12 types for serial and omp; or a file of ParEval's prompts, which
    is only continued."""
    generations: Annotated[Path | None, Arg(default="made by RUN_DIR")] = None
    """ParEval's generations for the suite, to judge without a model."""
    results: Annotated[Path | None, Arg(default="made by --execute")] = None
    """ParEval's results, to measure without running anything."""
    execute: bool = False
    """Compile and run the generated code on this machine, under limits: it may compute, read files and start threads,
    and not write a file, start a process or use the network."""
    as_root: bool = False
    """Let programs run as root; by default root's programs run as the user nobody."""
    out: Annotated[Path | None, Arg(default="RUN_DIR/evaluate.json, or FILE.results.json of --generations")] = None
    """The file to write: results, or generations where nothing is run."""
    template: str = "none"
    """Form of the prompts: none leaves the function to be continued; alpaca (as HPC-Coder-V2), chat (the tokenizer's
    template) and a FILE.jinja ask for it."""
    samples: Annotated[int, Arg(least=1, most=100_000)] = 20
    """Programs for each prompt."""
    tokens: Positive = 1024
    """Most new tokens of a program; the end of the function ends it earlier."""
    temperature: float = 0.2
    """Divisor of the scores before sampling among the 50 likeliest tokens; 0 always takes the likeliest."""
    top_p: float = 0.95
    """Sample among the fewest likeliest tokens whose probabilities add up to this."""
    seed: NotNegative = 0
    """Seed of the sampling."""
    k: Annotated[tuple[int, ...], Arg(default="1, 5, 10 and 20, up to the samples", least=1)] = ()
    """Numbers of samples drawn."""
    metrics: Definition = "paper"
    """Definition of the metrics: the paper's, or that of the published script, faults included (as-code)."""
    seconds: Annotated[float, Arg(least=1, most=86_400)] = 20.0
    """Most seconds of a run."""
    memory: Annotated[float, Arg(least=0.1, most=1e6)] = 2.0
    """Most GiB of a run, beside 0.16 a thread."""
    compiler: Annotated[str | None, Arg(default="$CXX, c++ or g++")] = None
    """The C++ compiler, with flags if needed."""
    grid: GridShape = field(default_factory=GridShape)
    json: bool = False
    """Print one JSON object in the place of tables."""


def run(args: Evaluate) -> int:
    """Generate, judge and measure programs as the command line asks, and print the figures.

    Raises:
        UserError: An option or a file cannot be used, or the system does not support the sandbox.
    """
    sources = {"RUN_DIR": args.run_dir, "--generations": args.generations, "--results": args.results}
    sources_set = [name for name, path in sources.items() if path is not None]
    if len(sources_set) != 1:
        accepted = "one of RUN_DIR, --generations FILE and --results FILE"
        raise UserError(" and ".join(sources_set) or "RUN_DIR", "together" if sources_set else UNSET, accepted)
    if args.results is not None:
        _check_unused(args, "--results", (*_MODEL_OPTIONS, *_RUN_OPTIONS, "out", "suite"))
        return _print(args, figures(read_results(args.results, "--results"), args.k, args.metrics))
    if args.run_dir is not None and args.suite.endswith(".json"):
        _check_unused(args, "--suite FILE.json, which is only continued", (*_RUN_OPTIONS, "k", "metrics"))
        return _continue_file(args, args.run_dir)
    if args.generations is not None:
        _check_unused(args, "--generations", _MODEL_OPTIONS)
    return _judge(args)


def _check_unused(args: Evaluate, source: str, names: Sequence[str]) -> None:
    # Refuse an option that nothing would read, instead of ignoring it.
    for option in fields(args):
        if option.name in names and (value := getattr(args, option.name)) != default_of(option):
            flag = f"--{option.name.replace('_', '-')}"
            raise UserError(flag, value, f"not given with {source}")


def _continue_file(args: Evaluate, run_dir: Path) -> int:
    from axonn_jax.cli.evaluate.model import generate_outputs

    prompts = read_prompts(Path(local_path("--suite", args.suite)), "--suite")
    out = _out(args, run_dir / "evaluate.json")
    entries, first = generate_outputs(args, run_dir, prompts, single_process=False)
    if first:
        write(out, entries, "--out")
        _print(args, {"generations": str(out), "prompts": len(entries), "samples": args.samples})
    return 0


def _judge(args: Evaluate) -> int:
    suite_problems = problems(args.suite)
    if not args.execute:
        accepted = "--execute, which compiles and runs the generated code on this machine, in a sandbox"
        raise UserError("--execute", UNSET, accepted)
    # Check the sandbox and the compiler before generating programs, which takes much longer.
    check_sandbox(as_root=args.as_root)
    command = compiler(args.compiler)
    if args.generations is not None:
        if rank_of(os.environ)[0]:
            return 0  # the first process judges
        entries = _of_suite(args, suite_problems, read_generations(args.generations, "--generations"))
        out = _out(args, args.generations.with_suffix(".results.json"))
        check_k(args.k, min(samples_of(entries).values()))
    else:
        from axonn_jax.cli.evaluate.model import generate_outputs

        assert args.run_dir is not None
        check_k(args.k, args.samples)
        out = _out(args, args.run_dir / "evaluate.json")
        entries, _ = generate_outputs(args, args.run_dir, _prompts(suite_problems), single_process=True)
        write(out, entries, "--out")  # keeps the generations if judging is interrupted
    count, memory = samples_of(entries).total(), int(args.memory * 2**30)
    settings = [entries, args.suite, command, args.seconds, memory, args.as_root, threads_of("omp")]
    with (
        terminated(),
        resumable_results(out.with_name(f"{out.name}.judged"), settings) as (cached, add),
        Ticker("judging", count) as ticker,
        judging(args.suite, command, Limits(args.seconds, memory, as_root=args.as_root)) as judge,
    ):
        judged_entries = judge_all(
            judge,
            suite_problems,
            entries,
            cached,
            add=add,
            progress=lambda at, name: ticker.now(f"judging {name}", count, "programs", at),
            save=lambda results: write(out, results, "--out"),
        )
    report = figures(judged(judged_entries), args.k, args.metrics)
    return _print(args, report | {"suite": args.suite, "results": str(out), "ends": ends(judged_entries)})


def _prompts(suite_problems: list[Problem]) -> list[Entry]:
    return [
        {
            "problem_type": problem.kind,
            "language": "cpp",
            "name": problem.name,
            "parallelism_model": model,
            "prompt": problem.prompt(model),
        }
        for problem in suite_problems
        for model in MODELS
    ]


def _of_suite(args: Evaluate, suite_problems: list[Problem], entries: list[Entry]) -> list[Entry]:
    # Keeps the entries of the suite's execution models, and reports how many others there are.
    names = [problem.name for problem in suite_problems]
    for entry in entries:
        if entry["name"] not in names:
            accepted = f"a problem of the suite {args.suite}, such as {names[0]}{nearest(entry['name'], names)}"
            raise UserError("--generations", entry["name"], accepted)
    ignored = Counter(entry["parallelism_model"] for entry in entries if entry["parallelism_model"] not in MODELS)
    judgeable = [entry for entry in entries if entry["parallelism_model"] in MODELS]
    if not judgeable:
        raise UserError("--generations", ", ".join(ignored), f"programs of one of {', '.join(MODELS)}")
    if ignored:
        say(f"not judged: {', '.join(f'{count} of {model}' for model, count in ignored.items())}")
    return judgeable


def _out(args: Evaluate, default: Path) -> Path:
    out = args.out or default
    if args.out is None and args.run_dir is not None and hub_name(args.run_dir):
        raise UserError("--out", UNSET, f"a file: {str(args.run_dir)!r} is no directory, but a name on the Hub")
    folder = out.parent.is_dir()
    if out.is_dir() or (args.out and not folder) or (folder and not os.access(out.parent, os.W_OK)):
        raise UserError("--out", str(out), "a file in a directory that exists and can be written")
    return out


def _print(args: Evaluate, report: dict[str, Any]) -> int:
    if args.json:
        print(json.dumps(report))
        return 0
    if "models" in report:
        print("\n".join(lines(report)))
    if "ends" in report:
        print("\n" + printable(", ".join(f"{name}: {count}" for name, count in report["ends"].items())))
    for name in ("generations", "results"):
        if name in report:
            print(printable(f"{name}: {report[name]}"))
    return 0
