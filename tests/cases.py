"""Training runs in which every two settings meet: the one list behind the default tests of whole training steps.

Each axis, precision, schedule and way to keep, cut or recompute meets each setting of every other one in at least one
case (`test_cases.py` counts them); what only three settings together break is for the products of `--all`.
"""

from dataclasses import dataclass, replace
from typing import Any

import grids
import numpy as np
import optax
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, Trainer
from axonn_jax.core.engines.optimizer import decayed
from axonn_jax.core.models.block_comm import BlockComm

MICROBATCHES, ROWS, BUCKET = 2, 32, 8000
SHAPES = {
    "gpt": replace(grids.GPT, layers=2, seq_len=8, dropout=0.1),  # tied: both ends of a pipeline hold the table
    "llama": replace(grids.LLAMA, hidden=32, heads=8, kv_heads=4, ffn=64, layers=2, seq_len=8),
    "experts": replace(grids.DEEPSEEK, layers=2, seq_len=8),
}
AXES = ("data", "expert", "z", "y", "x")
SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "llama", "experts"),
    "policy": ("none", "message", "interleaved"),
    **dict.fromkeys(AXES, (1, 2)),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulate": ("fp32", "compute"),
    "keep": ("device", "zero", "offload", "both"),
    "activations": ("none", "full", "dots", "save_collectives"),
    "layers": ("unrolled", "scanned"),
    "parts": ("whole", "halves"),
    "reshard": ("forward", "backward", "step"),
    "comm": ("all_reduce", "gather", "sequence"),
}
"""The settings of every run, the plain one first."""
FURTHER = {
    **SETTINGS,
    "weights": ("dense", "pruned"),
    "policy": (*SETTINGS["policy"], "zero-bubble"),
    "activations": (*SETTINGS["activations"], "offload"),
}
"""Those of the long run."""


@dataclass(frozen=True)
class Case:
    """The settings of a run; `words` names those that are not plain, an axis standing for two devices along it."""

    words: str
    model: str
    weights: str = "dense"
    policy: str = "none"
    data: int = 1
    expert: int = 1
    z: int = 1
    y: int = 1
    x: int = 1
    precision: str = "fp32"
    accumulate: str = "fp32"
    keep: str = "device"
    activations: str = "none"
    layers: str = "unrolled"
    parts: str = "whole"
    reshard: str = "forward"
    comm: str = "all_reduce"

    def __str__(self) -> str:
        return self.words

    @property
    def grid(self) -> GridShape:
        pipe = 1 if self.policy == "none" else 2
        return GridShape(pipe, self.data, self.z, self.y, self.x, expert=self.expert)


def case(words: str) -> Case:
    """Returns the case of some words: the model, axes, values of settings; `name=value` where two settings share it."""
    names = {value: name for name, values in reversed(FURTHER.items()) for value in values if isinstance(value, str)}
    given: dict[str, Any] = {}
    for word in words.split():
        name, _, value = word.rpartition("=")
        given[name or (word if word in AXES else names[word])] = 2 if word in AXES else value
    return Case(words, **given)


CASES = [case(words) for words in (
    "gpt z y x fp16 dots scanned halves step sequence",
    "gpt z y offload save_collectives halves backward sequence",
    "gpt z x bf16 full backward gather",
    "gpt interleaved data x zero dots gather",
    "gpt message data y fp16 compute both full sequence",
    "gpt message z",
    "llama data z fp16 zero save_collectives scanned backward",
    "llama scanned halves",
    "llama data z y bf16 compute zero full scanned halves step sequence",
    "llama data z bf16 compute both dots backward",
    "llama message y x bf16 compute offload gather",
    "llama interleaved data fp16 both",
    "experts expert full",
    "experts expert z x zero scanned backward gather",
    "experts data expert z offload dots step",
    "experts expert z x both save_collectives halves step gather",
    "experts data z y halves step sequence",
    "experts interleaved expert y bf16 compute save_collectives sequence",
    "experts interleaved z x fp16 offload full",
    "experts message expert x fp16 compute save_collectives gather",
    "experts message data y zero dots",
)]  # fmt: skip
"""Of every run: every two of `SETTINGS`."""
MORE = [case(words) for words in (
    "gpt z y activations=offload step sequence",
    "gpt data zero scanned halves",
    "gpt z y x offload save_collectives backward sequence",
    "gpt zero-bubble data z bf16 compute full",
    "gpt interleaved data y both dots sequence",
    "gpt zero-bubble data offload dots",
    "gpt interleaved y fp16 compute full sequence",
    "gpt pruned message x fp16 compute offload activations=offload gather",
    "gpt pruned interleaved data z bf16 compute zero activations=offload",
    "llama z fp16 compute offload halves step",
    "llama z activations=offload scanned halves backward",
    "llama data z both full step",
    "llama zero-bubble y x full gather",
    "llama interleaved x dots gather",
    "llama zero-bubble y x bf16 offload",
    "llama pruned message data y bf16 zero save_collectives sequence",
    "llama pruned message z y sequence",
    "experts data z bf16 compute both dots halves backward",
    "experts expert z x bf16 compute save_collectives scanned halves step gather",
    "experts data z x fp16 both backward gather",
    "experts interleaved expert offload",
    "experts message expert both dots",
    "experts message offload full",
    "experts interleaved expert both save_collectives",
    "experts zero-bubble data x fp16 zero save_collectives gather",
    "experts pruned expert z y zero full scanned halves backward sequence",
    "experts pruned data expert z fp16 zero dots scanned step",
    "experts pruned zero-bubble expert y both activations=offload sequence",
)]  # fmt: skip
"""Of the long run: every two of `FURTHER`."""

PIPED = {"policy": FURTHER["policy"][1:]}
APART: list[tuple[dict[str, Any], dict[str, Any]]] = [
    (PIPED, {"layers": ["scanned"], "parts": ["halves"], "reshard": ["backward", "step"]}),
    ({"layers": ["scanned"]}, {"keep": ["offload", "both"]}),
    ({"precision": ["fp32"]}, {"accumulate": ["compute"]}),
    ({"expert": [2]}, {"model": ["gpt", "llama"]}),
    ({"z": [1]}, {"reshard": ["backward", "step"]}),
    ({"x": [1]}, {"comm": ["gather"]}),
    ({"y": [1]}, {"comm": ["sequence"]}),
]
"""Settings that are refused together, or of which one does nothing beside the other."""


def apart(one: tuple[str, Any], other: tuple[str, Any]) -> bool:
    """True if two settings, each a name and a value, never are in one case."""
    return any(
        a[0] in these and a[1] in these[a[0]] and b[0] in those and b[1] in those[b[0]]
        for these, those in APART
        for a, b in ((one, other), (other, one))
    )


def trainer(case: Case) -> Trainer:
    """A trainer of the case, whose optimizer keeps the last gradients beside AdamW's state."""
    comm = BlockComm(case.comm == "gather", case.comm == "gather", case.comm == "sequence")

    def make() -> ax.models.Transformer:
        return ax.models.Transformer(SHAPES[case.model], rngs=nnx.Rngs(0), comm=comm)

    options: dict[str, Any] = {"sub_batches": 2, "order": "package"} if case.parts == "halves" else {}
    return make_trainer(
        ax.lora(make, rank=4) if case.weights == "lora" else make,
        optax.chain(optax.trace(0.0), optax.adamw(3e-3, weight_decay=0.1, mask=decayed)),
        grids.lay(case.grid),
        microbatches=MICROBATCHES,
        clip=0.5,
        seed=5,
        bucket=BUCKET,  # several parameters share a bucket
        precision=case.precision,
        accumulate=case.accumulate,
        zero=int(case.keep in ("zero", "both")),
        offload="optimizer" if case.keep in ("offload", "both") else "none",
        activations=case.activations,
        scan_layers="yes" if case.layers == "scanned" else "no",
        reshard_after=case.reshard,
        sequence_parallel=case.comm == "sequence",
        pipeline=ax.PipelineConfig(
            policy="message" if case.policy == "none" else case.policy,
            virtual_stages=2 if case.policy == "interleaved" else 1,
        ),
        prune=ax.PruneConfig(density=0.25 if case.weights == "pruned" else 1.0),
        **options,
    )


def batches(model: str, steps: int) -> np.ndarray:
    """Token ids [steps, ROWS, seq + 1] of a few batches that come again and again."""
    shape = SHAPES[model]
    few = np.random.default_rng(0).integers(0, shape.vocab, (4, ROWS, shape.seq_len + 1), dtype=np.int32)
    return few[np.arange(steps) % 4]
