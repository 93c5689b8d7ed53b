"""Bad input, and the line with which the package refuses it: configurations, command lines, calls from Python."""

import contextlib
import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from answers import said
from flax import nnx
from training_runs import EXPERTS, GPT, Net, class_batches, net_loss

import axonn_jax as ax

Main = Callable[[Sequence[str]], int]
GOOD = {
    "model": {"layers": 2, "hidden": 32, "heads": 4, "seq_len": 16},
    "data": {"path": "data"},
    "train": {"global_batch": 8},
    "log": {"tracker": "nowhere:Nobody"},  # refused last of all, so that nothing ever trains
}
VALUES: tuple[Any, ...] = (
    True,
    "nonsense",
    "",
    "no/body",
    -7,
    0,
    3,
    10**10,
    0.37,
    -0.5,
    float("nan"),
    [],
    ["q", 1],
    {"a": 1},
)
TOGETHER = (
    "grid.pipe 7", "grid.pipe 2 pipeline.policy 1f1b pipeline.virtual_stages 2", "grid.pipe 2 pipeline.split 9,9",
    "grid.pipe 2 pipeline.split 6", "grid.pipe 2 pipeline.split 6,0", "grid.pipe 2 pipeline.split a,b",
    "grid.pipe 2 pipeline.virtual_stages 4", "grid.pipe 2 tensor.scan_layers yes", "grid.pipe 2 train.ema 0.9",
    "grid.pipe 2 memory.reshard_after step", "grid.pipe 2 prune.density 0.5 prune.at_step 2",
    "grid.pipe 2 prune.density 0.5 prune.method early_bird", "grid.pipe 2 prune.density 0.5 prune.scope global",
    "grid.pipe 2 train.sample_every 2", "grid.y 3", "grid.y 8", "grid.x 3", "grid.z 3", "grid.data 3", "grid.expert 2",
    "grid.expert 2 model.experts 3", "grid.y 2 model.seq_len 15 memory.sequence_parallel true",
    "grid.x 4 grid.y 4 tensor.residual_comm gather", "model.layers 1 tensor.scan_layers yes",
    "memory.offload optimizer tensor.scan_layers yes", "memory.offload optimizer memory.resident 20000",
    "memory.resident 2GB", "prune.density 0.5 train.optimizer muon", "prune.density 0.5 lora.rank 4",
    "prune.density 0.5 train.ema 0.9", "prune.density 0.5 prune.at_step 100000", "prune.at_step 3", "prune.method file",
    "prune.mask_file none.npz", "prune.method file prune.mask_file none.npz prune.density 0.5",
    "prune.method file prune.mask_file none.npz", "lora.rank 4", "lora.rank 4 checkpoint.weights nowhere",
    "lora.rank 4 lora.targets gate", "lora.rank 4 lora.targets q,z", "checkpoint.adapter nowhere", "lora.alpha 3",
    "train.patience 2", "train.sample_every 2", "train.sample_prompts none.txt",
    "train.sample_every 2 train.sample_prompts none.txt", "train.microbatches 3", "checkpoint.keep_every 5",
    "checkpoint.every 2 checkpoint.keep_every 5", "checkpoint.resume newest", "checkpoint.resume data",
    "checkpoint.best true", "goldfish.k 1", "goldfish.h 3", "goldfish.k 4 goldfish.h 16", "goldfish.k 4 goldfish.h 40",
    "model.experts 1", "model.experts 4 model.experts_per_token 5", "model.experts 4 model.router_groups 3",
    "model.experts 4 model.router sigmoid model.router_groups 4", "model.experts 4 model.router_groups 2",
    "model.experts 4 model.moe_every 3 model.moe_first 9", "model.router sigmoid", "model.kv_heads 3", "model.heads 5",
    "model.vocab 256", "model.vocab 299", "model.preset gpt3", "model.preset gpt2", "model.window 4", "model.mlp relu2",
    "model.seq_len 1000000", "model.experts 4 model.bias all", "model.head_dim 7 model.positions rope",
    "moe.dispatch capacity", "moe.capacity 2", "tensor.sub_batches 3", "log.profile 10", "log.profile 3:1",
    "log.profile 1:100000", "log.dir run.toml", "log.dir data", "log.dir run.toml/deeper", "data.mix data=0.5",
    "data.mix data=0", "data.mix data", "data.held_out data", "data.held_out a=nowhere", "train.stepz 5", "zzz.steps 5",
    "trian.steps 5", "grid.tp 2", "steps 5", "grid 2", "pipeline.channel mpi", "train.optimizer adamx", "train.lr",
    "memory.zero 3", "memory.precision fp8", "model.attention flash", "train.epochs 1 train.steps 5",
)  # fmt: skip
"""Flags and their values that contradict each other, or what there is."""

LINES = (
    "", "trian", "--verbose", "train", "train none.toml", "train .", "train run.toml/x", "train run.toml more.toml",
    "train run.toml -n 4", "train run.toml -train.steps 5", "train run.toml --restarts 3", "prepare",
    "prepare none out", "prepare text", "prepare text out --vocab big", "prepare text out --vocab -1",
    "prepare text out --holdout 2", "prepare text out --vocap 300", "prepare text out more --vocab 300",
    "prepare text data --vocab 300", "prepare text out --vocab 300 --tokenizer data",
    "prepare text out --tokenizer none", "prepare text out --seq-len 5", "prepare text out --instructions",
    "prepare text out --instructions --tokenizer data",
    "prepare text/rows.jsonl out --instructions --tokenizer data --seq-len 1",
    "prepare text/rows.jsonl out --instructions --tokenizer data --seq-len 16 --template none",
    "prepare text/rows.jsonl out --instructions --tokenizer data --seq-len 16 --mix a",
    "prepare text/0.py out --instructions --tokenizer data --seq-len 16",
    "prepare text out --include *.none --vocab 300", "prepare text out --vocab 300 --shard-tokens 0",
    "prepare text out --vocab 300 --field", "inspect", "inspect none", "inspect data", "generate",
    "generate none --prompt a", "generate data --prompt a", "generate data --tokens 0", "generate data --prompts none",
    "generate data --prompt a --attention flash", "generate data --temperature -1",
    "generate data --prompt a --loki.keys 2", "generate data --prompt a --grid.pipe 2", "loki", "loki none --data data",
    "loki data --data none", "convert", "convert none out", "convert data out", "convert data out --merge --adapter",
    "prune", "prune none out", "prune none out --density 1", "prune none out --scope row", "timeline", "timeline none",
    "timeline none --replay fifo", "plan", "plan --model gpt2", "plan --model gpt9 --machine laptop --devices 2",
    "plan --model gpt2 --machine moon --devices 2", "plan --model gpt2 --machine laptop --devices 0",
    "plan --model gpt2 --machine laptop --devices 2 --batch-tokens 3",
    "plan --model none.toml --machine laptop --devices 2",
    "plan --model gpt2 --machine laptop --devices 2 --batch-tokens many", "plan --model gpt2 --top 0 --machine laptop",
    "plan --model gpt2 --machine laptop --devices 2 --memory-limit 5",
    "plan --model gpt-80b --machine laptop --devices 1", "plan --model gpt2 --machine laptop --devices 8 --grid.x 3",
    "plan --model gpt2 --machine laptop --lora.rank -1",
    "plan --model gpt2 --machine laptop --devices 2 --prune.density 2", "simulate --model gpt2 --machine laptop",
    "simulate --model gpt2 --machine laptop --devices 2 --slow 9:2",
    "simulate --model gpt2 --machine laptop --jitter -1", "simulate --model gpt2 --machine laptop --devices 2 --fail 0",
    "calibrate --out", "calibrate --none", "evaluate", "evaluate data --suite none", "evaluate --generations none",
    "evaluate --results none", "evaluate --results run.toml", "evaluate --results none --k 0", "doctor --jason",
    "doctor --timeout -1", "launch", "launch none.toml", "launch -n 0", "launch run.toml --restarts -1",
)  # fmt: skip

FILES = (
    "[train\nsteps = 5", "[train]\nsteps = = 5", "[train]\nsteps = 1\nsteps = 2", "[[train]]\nsteps = 5", "train = 5",
    "steps = 5", "[tarin]", "[train.steps]\nx = 1", "[train]\nlr = [1e-3]", "[log]\ndir = 2026-01-01", "",
    '[log]\ndir = "a\\u0000b"', '[data]\npath = "data"', '[data]\npath = "data"\n[model]\nlayers = 1\nhidden = 32',
    '[memory]\noffload_to = "/nvme"', '[train]\n"st\\neps" = 1', "[train]\noptimizer = 3",
)  # fmt: skip


def written(tables: Mapping[str, Mapping[str, Any]]) -> str:
    """Return a configuration as TOML."""

    def literal(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{key} = {literal(inner)}" for key, inner in value.items()) + "}"
        return "nan" if value != value else json.dumps(value)

    lines = ([f"[{name}]", *(f"{key} = {literal(v)}" for key, v in table.items())] for name, table in tables.items())
    return "\n".join(line for table in lines for line in table)


def of_commands(main: Main) -> Iterator[tuple[str, str]]:
    """Yield every bad configuration and command line, and what is said of it."""

    def train(text: str, *flags: str) -> str:
        Path("run.toml").write_text(text)
        return "\n".join(said(main, ["train", "run.toml", *flags]))

    keys = dict.fromkeys(re.findall(r"--([a-z]+\.[a-z_0-9]+)", "\n".join(said(main, ["train", "--help"]))))
    yield "keys of a configuration", " ".join(keys)
    for key in keys:
        table, _, name = key.partition(".")
        for value in VALUES if key != "log.tracker" else VALUES[:2]:  # an empty one would let a run train
            changed = GOOD | {table: GOOD.get(table, {}) | {name: value}}
            yield f"{key} = {value!r}", train(written(changed))
    for words in TOGETHER:
        pieces = re.findall(r"([a-z_]+\.?[a-z_]*)(?: ([^ ]+))?", words)
        yield words, train(written(GOOD), *(word for name, value in pieces for word in (f"--{name}", value) if word))
    for text in FILES:
        yield text, train(text)
    Path("run.toml").write_text(written(GOOD))
    for line in LINES:
        yield f"axonn-jax {line}", "\n".join(said(main, line.split()))


def _model(shape: Mapping[str, Any] = GPT, **options: Any) -> ax.models.Transformer:
    return ax.models.Transformer(ax.models.ModelShape(**shape), rngs=nnx.Rngs(0), **options)


def _trainer(grid: Mapping[str, int], shape: Mapping[str, Any] = GPT, **options: Any) -> ax.Trainer:
    return ax.Trainer(lambda: _model(shape), options.pop("optimizer", optax.adamw(1e-3)), ax.init(**grid), **options)


def _fitter(grid: Mapping[str, int], **options: Any) -> ax.Trainer:
    options = {"optimizer": optax.adam(1e-3), "loss": net_loss} | options
    return ax.Trainer(Net(nnx.Rngs(0)), options.pop("optimizer"), ax.init(**grid), **options)


def calls() -> dict[str, Callable[[], Any]]:
    """Return wrong calls of public functions, by what is wrong."""
    ids, few = np.zeros((8, 17), int), class_batches()[0]
    zero, look = optax.lbfgs(), optax.contrib.muon(1e-3)
    found: dict[str, Callable[[], Any]] = {
        f"init({name}={value!r})": lambda name=name, value=value: ax.init(**{name: value})
        for name in ("pipe", "data", "expert", "z", "y", "x", "num_processes", "coordinator")
        for value in (0, -1, 1.5, "two", 64)
    }
    for table in (ax.MemoryConfig, ax.TensorConfig, ax.PipelineConfig, ax.PruneConfig, ax.MoeConfig, ax.Sampling):
        for name in table.__dataclass_fields__:
            for value in ("nonsense", -1, None, 10**10, 0.5):
                call: Any = lambda table=table, name=name, value=value: table(**{name: value})  # noqa: E731
                found[f"{table.__name__}({name}={value!r})"] = call
    for name in ax.models.ModelShape.__dataclass_fields__:
        for value in ("nonsense", -1, 3, 10**10, 0.5):
            found[f"ModelShape({name}={value!r})"] = lambda name=name, value=value: ax.models.ModelShape(
                **(EXPERTS | {name: value})
            )
    grid = ax.init()
    options: dict[str, tuple[Any, ...]] = {
        "microbatches": (0, "two"), "clip": (-1.0, "one"), "ema": (1.0, -0.1), "seed": (-1, 0.5), "pipeline": (3,),
        "memory": (ax.TensorConfig(), {"zero": 1}, ax.MemoryConfig(resident="2GB"), ax.MemoryConfig(resident="much")),
        "rows": ("half",), "optimizer": (zero, None, optax.MultiSteps, optax.MultiSteps(look, 2)), "loss": (3,),
        "prune": (ax.PruneConfig(density=0.5, mask_file="none"),),
    }  # fmt: skip
    for name, values in options.items():
        for number, value in enumerate(values):
            found[f"Trainer({name}: {number})"] = lambda name=name, value=value: _trainer({}, **{name: value})
            found[f"Trainer(loss=, {name}: {number})"] = lambda name=name, value=value: _fitter({}, **{name: value})
    for number, loss in enumerate((len, lambda model, batch, key, more: 0, lambda model, batch: batch["x"])):
        found[f"Trainer(loss={number})"] = lambda loss=loss: _fitter({}, loss=loss).step(few)
    for name, value in (("weight", 3), ("wrt", 3), ("tensor", ax.TensorConfig(scan_layers="yes"))):
        found[f"Trainer(loss=, {name})"] = lambda name=name, value=value: _fitter({}, **{name: value})
    for axis, size in (("pipe", 2), ("expert", 2), ("z", 8), ("y", 8), ("x", 8), ("data", 8)):
        shape = GPT | {"layers": 1, "hidden": 36}
        found[f"a transformer over {axis} {size}"] = lambda axis=axis, size=size, shape=shape: _trainer(
            {axis: size}, shape, pipeline=ax.PipelineConfig(split="9,9")
        ).step(ids[:4])
        found[f"a loss over {axis} {size}"] = lambda axis=axis, size=size: _fitter({axis: size}).step(
            few | {"x": few["x"][:3]}
        )
    trainer, piped = _trainer({}), _trainer({"pipe": 2, "data": 2})
    fitter = _fitter({}, rows="parts")
    batches = (ids[:, :9], ids[0], ids.astype(float), "text", [], [[1, 2], [3]], ids - 1, ids[:0], {"x": ids}, ids[:3])
    for number, batch in enumerate(batches):
        if 0 < number < len(batches) - 1:  # a shorter sequence and fewer of them are fine
            found[f"step({number})"] = lambda batch=batch: trainer.step(batch)
            found[f"step({number}) over pipe 2 data 2"] = lambda batch=batch: piped.step(batch)
        found[f"step({number}) of a loss"] = lambda batch=batch: fitter.step(batch)
        found[f"goldfish({number})"] = lambda batch=batch: ax.goldfish(batch, k=2)
        found[f"pack({number})"] = lambda batch=batch: ax.models.pack(batch, 4)
        found[f"lora({number})"] = lambda batch=batch: ax.lora(batch, rank=4)
        found[f"parallelize({number})"] = lambda batch=batch: ax.parallelize(batch, ax.init(x=2))
        found[f"parallelize_linen({number})"] = lambda batch=batch: ax.parallelize_linen(net_loss, batch, grid, few)
        found[f"Generator({number})"] = lambda batch=batch: ax.Generator(batch, grid)
        found[f"plan({number})"] = lambda batch=batch: ax.plan(
            lambda: Net(nnx.Rngs(0)), net_loss, batch, machine="laptop", devices=2
        )
    generator = ax.Generator(_model(), grid, slots=1)
    more: dict[str, Callable[[], Any]] = {
        "goldfish, k": lambda: ax.goldfish(ids, k=1), "goldfish, h": lambda: ax.goldfish(ids, k=2, h=0),
        "lora, rank": lambda: ax.lora(_model(), rank=0), "lora, alpha": lambda: ax.lora(_model(), rank=2, alpha=-1),
        "lora, targets": lambda: ax.lora(_model(), rank=2, targets=["q", "gate"]), "latest": lambda: ax.latest("none"),
        "lora, dropout": lambda: ax.lora(_model(), rank=2, dropout=1.0), "load": lambda: trainer.load("none"),
        "loader, split": lambda: ax.Loader("data", split="test", seq_len=4, global_batch=2),
        "loader, rows": lambda: ax.Loader("data", seq_len=4, global_batch=2, rows=[5]),
        "loader, length": lambda: ax.Loader("data", seq_len=10**6, global_batch=2),
        "loader, path": lambda: ax.Loader("none", seq_len=4, global_batch=2), "preset": lambda: ax.models.preset("gpt"),
        "loader, batch": lambda: ax.Loader("data", seq_len=4, global_batch=0), "averaged": lambda: trainer.averaged,
        "from_pretrained": lambda: ax.models.from_pretrained("none", grid),
        "shape_of": lambda: ax.models.shape_of("none"), "save, step": lambda: trainer.save("out", -1),
        "save, keep": lambda: trainer.save("out", 1, keep=0),
        "save, iterator": lambda: trainer.save("out", 1, iterator=object),
        "set": lambda: trainer.set(learning_rate=1e-3), "evaluate nothing": lambda: trainer.evaluate([]),
        "evaluate, aux": lambda: trainer.evaluate([ids], aux=True),
        "evaluate no targets": lambda: trainer.evaluate([ids - 1]), "rows": lambda: trainer.rows(0),
        "report": lambda: ax.sharding_report(3), "offload": lambda: ax.offload(optax.adam(1.0), bucket=0),
        "offload, whole": lambda: ax.offload(optax.lbfgs()).init({"a": jnp.ones(3)}),
        "offload, ordinary arrays": lambda: ax.offload(optax.adam(1.0)).init({"a": np.ones(3)}),
        "tracked": lambda: ax.tracked(grid, "run.toml"),
        "tracked, class": lambda: ax.tracked(grid, "tracked", object()),
        "generate, nothing": lambda: generator.generate([[]], tokens=2),
        "generate, id": lambda: generator.generate([[99]], tokens=2),
        "generate, long": lambda: generator.generate([[1] * 9], tokens=20),
        "generate, samples": lambda: generator.generate([[1]], tokens=2, samples=0),
        "generate, tokens": lambda: generator.generate([[1]], tokens=0), "score": lambda: generator.score([[1] * 40]),
        "generator, slots": lambda: ax.Generator(_model(), ax.init(data=2), slots=3),
        "generator, length": lambda: ax.Generator(_model(), grid, length=99),
        "generator, pipe": lambda: ax.Generator(_model(), ax.init(pipe=2)),
        "generator, z": lambda: ax.Generator(_model(), ax.init(z=2)),
        "layers": lambda: ax.models.SequenceModel([1], len),
        "generator, dtype": lambda: ax.Generator(_model(), grid, dtype=int),
        "replicated": lambda: ax.replicated("text"),
        "plan, machine": lambda: ax.plan(lambda: Net(nnx.Rngs(0)), net_loss, few, machine="moon", devices=2),
        "plan, devices": lambda: ax.plan(lambda: Net(nnx.Rngs(0)), net_loss, few, machine="laptop", devices=0),
    }  # fmt: skip
    return found | more


def of_calls() -> Iterator[tuple[str, str]]:
    """Yield every wrong call, and the exception or what it gives without one."""
    for name, call in calls().items():
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                said = f"accepted: {type(call()).__name__}"
            except Exception as error:
                said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        jax.set_mesh(jax.sharding.Mesh(np.array(jax.devices()[:1]), ("none",)))
        yield name, re.sub(r"0x[0-9a-f]{6,}", "ADDRESS", said).replace(str(Path.cwd()), "DIR")
