"""Answers of commands and of generation that `same` compares word for word: runs of configurations, plans, texts."""

import contextlib
import hashlib
import importlib
import io
import json
import re
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from programs import Programs, forget, live
from training_runs import GPT, LLAMA, VOCAB, Net, class_batches, net_loss

import axonn_jax as ax

ROOT = Path(__file__).resolve().parents[2]
_TIMES = re.compile(r'"seconds": [\d.]+|\b\d+(\.\d+)? s\b|\b\d+(:\d\d){1,2}\b|\d{4}-\d\d-\d\d[T ][\d:.]+')
_TICKER = re.compile(r"[a-z ]+, \d+(:\d\d)+(:|$)")
"""Lines about progress, which come after so many seconds."""
MODEL = ["--model.layers", "2", "--model.hidden", "32", "--model.heads", "4", "--model.seq_len", "16"]
RUN = [
    *MODEL, "--data.path", "data", "--train.steps", "4", "--train.global_batch", "16", "--train.lr", "3e-3",
    "--train.eval_every", "2", "--log.tracker", "answers:Recorder",
]  # fmt: skip


def command() -> Callable[[Sequence[str]], int]:
    """Return the function behind `axonn-jax`, wherever this tree has it."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, name = scripts["axonn-jax"].partition(":")
    return getattr(importlib.import_module(module), name)


def said(main: Callable[[Sequence[str]], int], words: Sequence[str]) -> list[str]:
    """Return the exit status of a command line and the lines that it prints, without times and this folder's path."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(list(words))
    text = f"status {status}\n{out.getvalue()}{err.getvalue()}".replace(str(Path.cwd()), "DIR")
    return [_TIMES.sub("TIME", line) for line in text.splitlines() if not _TICKER.match(line)]


class Recorder:
    """Tracker of a run that leaves exact numbers, and the programs of its end, in the run's directory."""

    def start(self, run: Any) -> None:
        """Keep the place."""
        self._path, self._lines = Path(run.directory) / "recorded.json", list[str]()

    def log(self, step: int, values: Any) -> None:
        """Keep what does not depend on the clock."""
        exact = {name: value for name, value in values.items() if not re.search("second|_s$|time", name)}
        told = (f"{name} {value.hex() if isinstance(value, float) else value}" for name, value in exact.items())
        self._lines.append(f"step {step}: {', '.join(sorted(told))}")

    def finish(self, status: int) -> None:
        """Write the file."""
        self._path.write_text(json.dumps({"losses": [*self._lines, f"status {status}"], "programs": live()}))


CONFIGURED: dict[str, list[str]] = {
    "sequence split over y 2": ["--grid.y", "2", "--memory.sequence_parallel", "true", "--train.optimizer", "lion"],
    "gathered residual over y 2 x 2": ["--grid.y", "2", "--grid.x", "2", "--tensor.residual_comm", "gather"],
    "Muon, averaged": ["--grid.z", "2", "--train.optimizer", "muon", "--train.ema", "0.9", "--train.schedule", "wsd"],
    "Adafactor, goldfish": ["--train.optimizer", "adafactor", "--goldfish.k", "4", "--goldfish.h", "3"],
    "early bird": ["--prune.density", "0.5", "--prune.method", "early_bird", "--prune.every", "1"],
    "offloaded activations": [
        "--memory.activations", "offload", "--train.optimizer", "adamw_bf16", "--train.microbatches", "2",
    ],
    "mix": ["--data.path", "", "--data.mix", "data=0.7,more=0.3", "--train.optimizer", "sgd", "--train.beta1", "0"],
    "a pipeline of a configuration": [
        "--grid.pipe", "2", "--pipeline.policy", "1f1b", "--train.microbatches", "4", "--model.tied", "false",
        "--model.positions", "rope", "--model.norm", "rmsnorm", "--model.mlp", "geglu", "--model.bias", "qkv",
    ],
    "packed rows": ["--data.path", "rows", "--grid.z", "2", "--model.seq_len", "160"],
}  # fmt: skip


def write_text(folder: Path) -> None:
    """Write text to prepare, and conversations."""
    folder.mkdir()
    for part in range(4):
        lines = [f"def f{n}(x):\n    return x + {n * n % 97}\n" for n in range(part, 2000, 4)]
        (folder / f"{part}.py").write_text("\n".join(lines))
    rows = [{"instruction": f"add {n} to x", "output": f"def f(x): return x + {n}"} for n in range(120)]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))


def prepared(main: Callable[[Sequence[str]], int]) -> dict[str, list[str]]:
    """Prepare data in this folder; return what the commands say."""
    write_text(Path("text"))
    lines = {
        "prepare": ["text", "data", "--vocab", "300", "--include", "*.py", "--holdout", "0.3"],
        "prepare more": ["text", "more", "--tokenizer", "data", "--include", "[01].py", "--json"],
        "prepare rows": ["text/rows.jsonl", "rows", "--instructions", "--tokenizer", "data", "--seq-len", "160",
                         "--template", "alpaca", "--too-long", "cut", "--holdout", "0.2"],
    }  # fmt: skip
    return {name: said(main, ["prepare", *words]) for name, words in lines.items()}


def configured(main: Callable[[Sequence[str]], int]) -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield the runs of configurations: name, exact numbers, programs."""
    Path("run.toml").write_text("")
    for name, words in CONFIGURED.items():
        folder = Path("runs") / name.replace(" ", "_").replace(",", "")
        forget()
        lines = said(main, ["train", "run.toml", *RUN, *words, "--log.dir", str(folder)])
        try:
            record = json.loads((folder / "recorded.json").read_text())
        except OSError:
            yield name, lines, []
            continue
        settings = (folder / "config.toml").read_text().splitlines()
        yield name, [*record["losses"], *settings], record["programs"]


def commanded(main: Callable[[Sequence[str]], int]) -> dict[str, list[str]]:
    """Return what commands say of a finished run, and what planners find."""
    run, other = "runs/Muon_averaged", "runs/offloaded_activations"
    plan = ["--machine", "perlmutter", "--devices", "64", "--batch-tokens", "1Mi", "--json"]
    small = ["--machine", "dgx-h100", "--devices", "8", "--batch-tokens", "64Ki", "--json"]
    lines = {
        "generate": ["generate", run, "--prompt", "d", "--tokens", "8", "--json", "--logprobs", "--temperature", "0"],
        "generate on a grid": ["generate", run, "--prompt", "def ", "--tokens", "8", "--grid.y", "2", "--samples", "2"],
        "loki": ["loki", run, "--data", "data", "--tokens", "256"],
        "generate by Loki": ["generate", run, "--prompt", "def ", "--tokens", "8", "--attention", "loki"],
        "prune": ["prune", other, "runs/pruned", "--density", "0.5"],
        "convert": ["convert", run, "converted"],
        "plan of gpt": ["plan", "--model", "gpt-1.3b", *plan],
        "plan of llama": ["plan", "--model", "llama3-8b", *plan, "--memory.zero", "1", "--model.seq_len", "2048"],
        "plan of experts": ["plan", "--model", "ted-1.3b-16e", *plan],
        "plan of adapters": ["plan", "--model", "llama2-7b", *small, "--lora.rank", "16"],
        "plan, pruned": ["plan", "--model", "gpt2", *small, "--prune.density", "0.1", "--explain"],
        "simulate": ["simulate", "--model", "gpt-1.3b", *plan, "--grid.pipe", "4", "--jitter", "0.2", "--baselines"],
        "simulate a slow rank": ["simulate", "--model", "gpt-2.7b", *plan, "--grid.pipe", "8", "--slow", "3:1.5"],
        "version": ["--version"],
    }  # fmt: skip
    found = {name: said(main, words) for name, words in lines.items()}
    files = sorted(path for path in Path("converted").rglob("*") if path.is_file())
    found["files of convert"] = [f"{path}: {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" for path in files]
    return found


def generated() -> Iterator[tuple[str, list[str], list[str]]]:
    """Yield what generators of fresh models write: name, tokens and scores, programs."""
    prompts = [[1, 2, 3], list(range(9)), [5]]
    samplings = [ax.Sampling(temperature=0.0), ax.Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01)]
    samplings.append(ax.Sampling(repetition_penalty=1.2))
    for name, shape, grid in (
        ("generator", GPT | {"dropout": 0.0}, {}),
        ("generator over data 2 y 2", LLAMA, {"data": 2, "y": 2}),
        ("generator over y 2 x 2", LLAMA, {"y": 2, "x": 2}),
    ):
        programs = Programs()
        model = ax.models.Transformer(ax.models.ModelShape(**shape), rngs=nnx.Rngs(0))
        generator = ax.Generator(model, ax.init(**grid), slots=2)
        texts = [str(generator.generate(prompts, tokens=6, sampling=sampling, samples=2)) for sampling in samplings]
        scores = [" ".join(float(value).hex() for value in row) for row in generator.score(prompts[:2])]
        yield name, [*texts, *scores], programs.told()
        del generator, model


def called() -> dict[str, list[str]]:
    """Return what other public functions answer."""
    tokens = np.random.default_rng(0).integers(0, VOCAB, (4, 33))
    loader = ax.Loader("data", seq_len=16, global_batch=4, seed=3)
    batches = [np.asarray(next(iter(loader))).tolist() for _ in range(2)]
    rows = [ax.models.pack([[1, 2, 3], [4, 5]], 8, [[False, True, True], [True, True]]).tolist()]
    shape = jax.eval_shape(lambda: class_batches()[0]["x"])
    batch = {"x": jax.ShapeDtypeStruct((64, *shape.shape[1:]), np.float32), "label": np.zeros(64, np.int32)}
    plan = ax.plan(lambda: Net(nnx.Rngs(0)), net_loss, batch, machine="dgx-h100", devices=16)
    offloaded = ax.offload(optax.adam(1e-2))
    weights = {"a": jnp.ones((4, 4))}
    update, _ = offloaded.update(weights, offloaded.init(weights), weights)
    return {
        "goldfish": [str(ax.goldfish(tokens, k=4, h=5).tolist())],
        "loader": [str(batches)],
        "pack": [str(rows)],
        "ax.plan": str(plan).splitlines(),
        "ax.offload": [np.asarray(update["a"]).tobytes().hex()],
        "presets": [f"{name}: {ax.models.preset(name)}" for name in ax.models.preset_names()],
        "models.shape_of": [str(ax.models.shape_of("converted"))],
        "public names": sorted(vars(ax.models)["__all__"]) + sorted(dir(ax)),
    }
