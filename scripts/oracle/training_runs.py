"""Training runs from Python whose losses `same` compares to the bit: grids, memory, schedules, models of others.

Only documented names are used, so that the file runs before and after modules have moved.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx

import axonn_jax as ax

STEPS, ROWS, VOCAB = 3, 16, 64
Metrics = Mapping[str, Any]

GPT: dict[str, Any] = {
    "layers": 2, "hidden": 32, "heads": 4, "kv_heads": 4, "ffn": 64, "vocab": VOCAB, "seq_len": 16, "dropout": 0.1,
}  # fmt: skip
LLAMA = GPT | {
    "kv_heads": 2, "dropout": 0.0, "positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none",
    "tied": False,
}  # fmt: skip
GEMMA = LLAMA | {"norm": "rmsnorm_1p", "mlp": "geglu", "tied": True, "head_dim": 16}
EXPERTS = LLAMA | {"experts": 4, "experts_per_token": 2}
DEEPSEEK = LLAMA | {
    "experts": 8, "experts_per_token": 2, "shared_experts": 1, "expert_ffn": 32, "moe_first": 1,
    "router": "sigmoid", "router_scale": 2.5, "router_groups": 4, "router_groups_kept": 2,
}  # fmt: skip


@dataclass(frozen=True)
class TransformerRun:
    """Settings of a run of `models.Transformer`; tables are those of `ax.Trainer`."""

    shape: Mapping[str, Any] = field(default_factory=lambda: GPT)
    grid: Mapping[str, int] = field(default_factory=dict)
    memory: Mapping[str, Any] = field(default_factory=dict)
    tensor: Mapping[str, Any] = field(default_factory=dict)
    pipeline: Mapping[str, Any] = field(default_factory=lambda: {"policy": "1f1b", "channel": "local"})
    prune: Mapping[str, Any] = field(default_factory=dict)
    moe: Mapping[str, Any] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)
    microbatches: int = 2
    ema: float = 0.0

    def trainer(self) -> ax.Trainer:
        """Make the trainer."""
        shape, moe = ax.models.ModelShape(**self.shape), ax.MoeConfig(**self.moe)

        def model() -> Any:
            return ax.models.Transformer(shape, rngs=nnx.Rngs(0), moe=moe)

        return ax.Trainer(
            ax.lora(model, **self.lora) if self.lora else model,
            optax.adamw(3e-3, weight_decay=0.1),
            ax.init(**self.grid),
            microbatches=self.microbatches,
            clip=0.5,
            ema=self.ema,
            seed=5,
            memory=ax.MemoryConfig(**({"bucket": 8000} | dict(self.memory))),  # several parameters share a bucket
            tensor=ax.TensorConfig(**self.tensor),
            pipeline=ax.PipelineConfig(**self.pipeline),
            prune=ax.PruneConfig(**self.prune),
        )

    @property
    def batches(self) -> list[Any]:
        """Batches of the steps."""
        return token_batches()


def token_batches() -> list[Any]:
    """Token ids [rows, seq + 1] of the steps, some of them no targets."""
    rng = np.random.default_rng(0)
    batches = [rng.integers(0, VOCAB, (ROWS, 17)) for _ in range(STEPS)]
    batches[1][::3, 9:] = -1
    return batches


FIXED = {"policy": "1f1b", "channel": "local"}
TRANSFORMERS = {
    "serial GPT": TransformerRun(microbatches=1),
    "data 2": TransformerRun(grid={"data": 2}),
    "z 2": TransformerRun(LLAMA, {"z": 2}),
    "y 2": TransformerRun(grid={"y": 2}),
    "x 2": TransformerRun(LLAMA, {"x": 2}),
    "data 2 z 2 y 2": TransformerRun(LLAMA, {"data": 2, "z": 2, "y": 2}),
    "z 2 y 2 x 2, bf16": TransformerRun(
        GEMMA, {"z": 2, "y": 2, "x": 2}, {"precision": "bf16", "accumulate": "compute"}
    ),
    "pipe 2": TransformerRun(grid={"pipe": 2}, microbatches=4),
    "pipe 2 x 2, zero-bubble": TransformerRun(
        LLAMA, {"pipe": 2, "x": 2}, pipeline={"policy": "zero-bubble"}, microbatches=4
    ),
    "pipe 2 data 2, interleaved, offload": TransformerRun(
        LLAMA | {"layers": 4}, {"pipe": 2, "data": 2}, {"offload": "optimizer", "activations": "full"},
        pipeline={"policy": "interleaved", "virtual_stages": 2}, microbatches=4,
    ),
    "pipe 2, gpipe, experts": TransformerRun(
        EXPERTS, {"pipe": 2, "expert": 2}, pipeline={"policy": "gpipe"}, microbatches=4
    ),
    "experts over expert 2 y 2": TransformerRun(EXPERTS, {"expert": 2, "y": 2}),
    "experts with capacity": TransformerRun(
        EXPERTS, {"expert": 2, "data": 2}, {"activations": "save_collectives"}, moe={"dispatch": "capacity"}
    ),
    "DeepSeek's router": TransformerRun(DEEPSEEK, moe={"balance_rate": 0.001}),
    "pruned over data 2": TransformerRun(LLAMA, {"data": 2}, prune={"density": 0.25}),
    "pruned at step 1, globally": TransformerRun(
        GPT, {"z": 2}, {"precision": "bf16", "zero": 1},
        prune={"density": 0.5, "at_step": 1, "scope": "global", "method": "random"},
    ),
    "pruned over pipe 2": TransformerRun(LLAMA, {"pipe": 2}, prune={"density": 0.25}, microbatches=4),
    "offload, bf16": TransformerRun(LLAMA, {"z": 2}, {"precision": "bf16", "offload": "optimizer"}),
    "ZeRO over data 2, fp16": TransformerRun(grid={"data": 2}, memory={"precision": "fp16", "zero": 1}),
    "ZeRO and offload": TransformerRun(LLAMA, {"data": 2}, {"zero": 1, "offload": "optimizer", "activations": "dots"}),
    "scanned, full recomputation": TransformerRun(
        LLAMA, {"z": 2}, {"activations": "full", "reshard_after": "backward"}, {"scan_layers": "yes"}
    ),
    "gathered once a step": TransformerRun(
        GPT, {"z": 2, "y": 2}, {"reshard_after": "step", "activations": "save_collectives"}
    ),
    "halves in the package's order": TransformerRun(
        LLAMA, {"y": 2, "x": 2}, tensor={"sub_batches": 2, "order": "package"}
    ),
    "adapters over y 2": TransformerRun(LLAMA, {"y": 2}, lora={"rank": 4, "dropout": 0.1}),
    "averaged weights": TransformerRun(ema=0.9),
}  # fmt: skip
CHECKPOINTS = ("z 2", "pipe 2", "pruned over data 2", "adapters over y 2")
"""Runs of which `same write` leaves a checkpoint, for `same compare` to go on from."""


class Net(nnx.Module):
    """A network with state, random numbers and layers of several kinds."""

    def __init__(self, rngs: nnx.Rngs):
        self.first, self.norm = nnx.Linear(16, 64, rngs=rngs), nnx.BatchNorm(64, rngs=rngs)
        self.dropout, self.last = nnx.Dropout(0.1, rngs=rngs), nnx.Linear(64, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.last(self.dropout(nnx.relu(self.norm(self.first(x)))))


def cross_entropy(logits: jax.Array, batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the mean loss of a classifier."""
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]))


def net_loss(model: Any, batch: Any) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Return the loss and the accuracy."""
    logits = model(batch["x"])
    return cross_entropy(logits, batch), {"accuracy": jnp.mean(logits.argmax(-1) == batch["label"])}


def class_batches() -> list[Any]:
    """Batches of a classifier."""
    rng = np.random.default_rng(1)
    return [
        {"x": rng.normal(size=(ROWS, 16)).astype(np.float32), "label": rng.integers(0, 8, ROWS)} for _ in range(STEPS)
    ]


def nnx_trainer(grid: Mapping[str, int], **options: Any) -> ax.Trainer:
    """Make a trainer of `Net`."""
    return ax.Trainer(Net(nnx.Rngs(0)), optax.adamw(3e-3), ax.init(**grid), loss=net_loss, clip=0.5, **options)


LINEN = linen.Sequential([linen.Dense(64), linen.LayerNorm(), linen.relu, linen.Dense(8)])


def linen_loss(params: Any, batch: Any) -> jax.Array:
    """Return the loss of the Linen module."""
    return cross_entropy(LINEN.apply(params, batch["x"]), batch)  # type: ignore[arg-type]


def linen_trainer(grid: Mapping[str, int], *, split: bool = False) -> ax.Trainer:
    """Make a trainer of a Linen loss, parallelized by name or by the trainer."""
    batch = class_batches()[0]
    params = LINEN.init(jax.random.key(0), batch["x"])
    laid, loss = ax.init(**grid), linen_loss
    if split:
        loss, params = ax.parallelize_linen(linen_loss, params, laid, batch)
    return ax.Trainer(params, optax.adamw(3e-3), laid, loss=loss, microbatches=2)


def sequence_trainer(grid: Mapping[str, int]) -> ax.Trainer:
    """Make a trainer of a list of layers."""

    def model() -> ax.models.SequenceModel:
        rngs = nnx.Rngs(0)
        middle = [nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 32, rngs=rngs)) for _ in "123"]
        layers = [nnx.Embed(VOCAB, 32, rngs=rngs), *middle, nnx.Linear(32, VOCAB, rngs=rngs)]
        return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)

    return ax.Trainer(model, optax.adam(1e-2), ax.init(**grid), microbatches=4, pipeline=ax.PipelineConfig(**FIXED))


OTHERS: dict[str, tuple[Callable[[], ax.Trainer], Callable[[], list[Any]]]] = {
    "NNX over data 2": (lambda: nnx_trainer({"data": 2}, microbatches=2), class_batches),
    "NNX over z 2 x 2, ZeRO and offload": (
        lambda: nnx_trainer({"data": 2, "z": 2, "x": 2}, memory=ax.MemoryConfig(zero=1, offload="optimizer")),
        class_batches,
    ),
    "NNX, whole rows, bf16, pruned": (
        lambda: nnx_trainer(
            {"data": 2, "y": 2}, rows="whole", memory=ax.MemoryConfig(precision="bf16"), prune=ax.PruneConfig(0.5)
        ),
        class_batches,
    ),
    "Linen over data 2": (lambda: linen_trainer({"data": 2}), class_batches),
    "Linen over z 2 y 2": (lambda: linen_trainer({"z": 2, "y": 2}, split=True), class_batches),
    "list of layers": (lambda: sequence_trainer({"data": 2}), token_batches),
    "list of layers over pipe 2 z 2": (lambda: sequence_trainer({"pipe": 2, "z": 2}), token_batches),
}


def parts(name: str) -> tuple[Callable[[], ax.Trainer], list[Any]]:
    """Return what makes the trainer of a run, and its batches."""
    if name in TRANSFORMERS:
        return TRANSFORMERS[name].trainer, TRANSFORMERS[name].batches
    make, batches = OTHERS[name]
    return make, batches()


def figures(metrics: Metrics) -> list[str]:
    """Return every number of a step as hexadecimal text."""
    flat = jax.tree.leaves_with_path(dict(metrics))
    return [f"{jax.tree_util.keystr(path, simple=True)} {float(value).hex()}" for path, value in flat]


def trained(name: str) -> Iterator[tuple[ax.Trainer, list[list[str]]]]:
    """Yield the trainer of a run behind its steps and an evaluation, with their numbers."""
    make, batches = parts(name)
    trainer = make()
    found = [figures(trainer.step(batch)) for batch in batches]
    found.append([f"evaluation {float(trainer.evaluate(batches[:1])).hex()}"])
    yield trainer, found
    trainer.close()


def own_loop() -> list[list[str]]:
    """Train a parallelized module by an ordinary script."""
    batch = class_batches()[0]
    grid = ax.init(z=2, x=2)
    model: Any = ax.parallelize(Net(nnx.Rngs(0)), grid, call=lambda model: model(jnp.asarray(batch["x"])))
    optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model: Any, optimizer: Any, batch: Any) -> jax.Array:
        (loss, _), grads = nnx.value_and_grad(net_loss, has_aux=True)(model, batch)
        optimizer.update(model, grads)
        return loss

    report = str(ax.sharding_report(model)).splitlines()
    return [
        *([line] for line in report),
        *([float(step(model, optimizer, grid.shard_batch(b))).hex()] for b in [batch] * 3),
    ]
