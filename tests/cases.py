"""Training runs in which every two settings meet: the one list behind the default tests of whole training steps.

Each axis, precision, schedule and way to keep, cut or recompute meets each setting of every other one in at least one
case (`test_cases.py` counts them); what only three settings together break is for the products of `--all`.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import grids
import numpy as np
import optax
from flax import nnx
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import BlockComm
from axonn_jax.train.optimizer import decayed
from axonn_jax.train.trainer import Trainer

BUCKET = 8000
MICROBATCHES, ROWS = 2, 32
SHAPES = {
    "gpt": replace(grids.GPT, layers=2, seq_len=8, dropout=0.1),  # tied: both ends of a pipeline hold the table
    "llama": replace(grids.LLAMA, hidden=32, heads=8, kv_heads=4, ffn=64, layers=2, seq_len=8),
    "experts": replace(grids.DEEPSEEK, layers=2, seq_len=8),
}


@dataclass(frozen=True)
class Case:
    """The settings of a run; the first value of each in `SETTINGS` is the plain one."""

    model: str = "gpt"
    density: float = 1.0
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
        plain = Case()
        changed = [
            (f.name, getattr(self, f.name)) for f in fields(self) if getattr(self, f.name) != getattr(plain, f.name)
        ]
        return " ".join(f"{name} {value}" if isinstance(value, int | float) else str(value) for name, value in changed)

    @property
    def grid(self) -> GridShape:
        pipe = 1 if self.policy == "none" else 2
        return GridShape(pipe, self.data, self.z, self.y, self.x, expert=self.expert)


CASES = [
    Case(
        "gpt",
        z=2,
        y=2,
        x=2,
        precision="fp16",
        activations="dots",
        layers="scanned",
        parts="halves",
        reshard="step",
        comm="sequence",
    ),
    Case(
        "gpt",
        z=2,
        y=2,
        keep="offload",
        activations="save_collectives",
        parts="halves",
        reshard="backward",
        comm="sequence",
    ),
    Case("gpt", z=2, x=2, precision="bf16", activations="full", reshard="backward", comm="gather"),
    Case("gpt", policy="interleaved", data=2, x=2, keep="zero", activations="dots", comm="gather"),
    Case(
        "gpt",
        policy="message",
        data=2,
        y=2,
        precision="fp16",
        accumulate="compute",
        keep="both",
        activations="full",
        comm="sequence",
    ),
    Case("gpt", policy="message", z=2),
    Case(
        "llama",
        data=2,
        z=2,
        precision="fp16",
        keep="zero",
        activations="save_collectives",
        layers="scanned",
        reshard="backward",
    ),
    Case("llama", layers="scanned", parts="halves"),
    Case(
        "llama",
        data=2,
        z=2,
        y=2,
        precision="bf16",
        accumulate="compute",
        keep="zero",
        activations="full",
        layers="scanned",
        parts="halves",
        reshard="step",
        comm="sequence",
    ),
    Case(
        "llama",
        data=2,
        z=2,
        precision="bf16",
        accumulate="compute",
        keep="both",
        activations="dots",
        reshard="backward",
    ),
    Case("llama", policy="message", y=2, x=2, precision="bf16", accumulate="compute", keep="offload", comm="gather"),
    Case("llama", policy="interleaved", data=2, precision="fp16", keep="both"),
    Case("experts", expert=2, activations="full"),
    Case("experts", expert=2, z=2, x=2, keep="zero", layers="scanned", reshard="backward", comm="gather"),
    Case("experts", data=2, expert=2, z=2, keep="offload", activations="dots", reshard="step"),
    Case(
        "experts",
        expert=2,
        z=2,
        x=2,
        keep="both",
        activations="save_collectives",
        parts="halves",
        reshard="step",
        comm="gather",
    ),
    Case("experts", data=2, z=2, y=2, parts="halves", reshard="step", comm="sequence"),
    Case(
        "experts",
        policy="interleaved",
        expert=2,
        y=2,
        precision="bf16",
        accumulate="compute",
        activations="save_collectives",
        comm="sequence",
    ),
    Case("experts", policy="interleaved", z=2, x=2, precision="fp16", keep="offload", activations="full"),
    Case(
        "experts",
        policy="message",
        expert=2,
        x=2,
        precision="fp16",
        accumulate="compute",
        activations="save_collectives",
        comm="gather",
    ),
    Case("experts", policy="message", data=2, y=2, keep="zero", activations="dots"),
]
"""Of every run: every two of `SETTINGS`."""

MORE = [
    Case("gpt", z=2, y=2, activations="offload", reshard="step", comm="sequence"),
    Case("gpt", data=2, keep="zero", layers="scanned", parts="halves"),
    Case("gpt", z=2, y=2, x=2, keep="offload", activations="save_collectives", reshard="backward", comm="sequence"),
    Case("gpt", policy="zero-bubble", data=2, z=2, precision="bf16", accumulate="compute", activations="full"),
    Case("gpt", policy="interleaved", data=2, y=2, keep="both", activations="dots", comm="sequence"),
    Case("gpt", policy="zero-bubble", data=2, keep="offload", activations="dots"),
    Case("gpt", policy="interleaved", y=2, precision="fp16", accumulate="compute", activations="full", comm="sequence"),
    Case(
        "gpt",
        density=0.25,
        policy="message",
        x=2,
        precision="fp16",
        accumulate="compute",
        keep="offload",
        activations="offload",
        comm="gather",
    ),
    Case(
        "gpt",
        density=0.25,
        policy="interleaved",
        data=2,
        z=2,
        precision="bf16",
        accumulate="compute",
        keep="zero",
        activations="offload",
    ),
    Case("llama", z=2, precision="fp16", accumulate="compute", keep="offload", parts="halves", reshard="step"),
    Case("llama", z=2, activations="offload", layers="scanned", parts="halves", reshard="backward"),
    Case("llama", data=2, z=2, keep="both", activations="full", reshard="step"),
    Case("llama", policy="zero-bubble", y=2, x=2, activations="full", comm="gather"),
    Case("llama", policy="interleaved", x=2, activations="dots", comm="gather"),
    Case("llama", policy="zero-bubble", y=2, x=2, precision="bf16", keep="offload"),
    Case(
        "llama",
        density=0.25,
        policy="message",
        data=2,
        y=2,
        precision="bf16",
        keep="zero",
        activations="save_collectives",
        comm="sequence",
    ),
    Case("llama", density=0.25, policy="message", z=2, y=2, comm="sequence"),
    Case(
        "experts",
        data=2,
        z=2,
        precision="bf16",
        accumulate="compute",
        keep="both",
        activations="dots",
        parts="halves",
        reshard="backward",
    ),
    Case(
        "experts",
        expert=2,
        z=2,
        x=2,
        precision="bf16",
        accumulate="compute",
        activations="save_collectives",
        layers="scanned",
        parts="halves",
        reshard="step",
        comm="gather",
    ),
    Case("experts", data=2, z=2, x=2, precision="fp16", keep="both", reshard="backward", comm="gather"),
    Case("experts", policy="interleaved", expert=2, keep="offload"),
    Case("experts", policy="message", expert=2, keep="both", activations="dots"),
    Case("experts", policy="message", keep="offload", activations="full"),
    Case("experts", policy="interleaved", expert=2, keep="both", activations="save_collectives"),
    Case(
        "experts",
        policy="zero-bubble",
        data=2,
        x=2,
        precision="fp16",
        keep="zero",
        activations="save_collectives",
        comm="gather",
    ),
    Case(
        "experts",
        density=0.25,
        expert=2,
        z=2,
        y=2,
        keep="zero",
        activations="full",
        layers="scanned",
        parts="halves",
        reshard="backward",
        comm="sequence",
    ),
    Case(
        "experts",
        density=0.25,
        data=2,
        expert=2,
        z=2,
        precision="fp16",
        keep="zero",
        activations="dots",
        layers="scanned",
        reshard="step",
    ),
    Case(
        "experts",
        density=0.25,
        policy="zero-bubble",
        expert=2,
        y=2,
        keep="both",
        activations="offload",
        comm="sequence",
    ),
]
"""Of the long run: pruned parameters, zero-bubble and offloaded activations beside every other setting, too."""

SETTINGS: dict[str, tuple[Any, ...]] = {
    "model": ("gpt", "llama", "experts"),
    "policy": ("none", "message", "interleaved"),
    **dict.fromkeys(("data", "expert", "z", "y", "x"), (1, 2)),
    "precision": ("fp32", "bf16", "fp16"),
    "accumulate": ("fp32", "compute"),
    "keep": ("device", "zero", "offload", "both"),
    "activations": ("none", "full", "dots", "save_collectives"),
    "layers": ("unrolled", "scanned"),
    "parts": ("whole", "halves"),
    "reshard": ("forward", "backward", "step"),
    "comm": ("all_reduce", "gather", "sequence"),
}
FURTHER = {
    **SETTINGS,
    "density": (1.0, 0.25),
    "policy": (*SETTINGS["policy"], "zero-bubble"),
    "activations": (*SETTINGS["activations"], "offload"),
}
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
    options: dict[str, Any] = {"sub_batches": 2, "order": "package"} if case.parts == "halves" else {}
    return make_trainer(
        lambda: ax.models.Transformer(SHAPES[case.model], rngs=nnx.Rngs(0), comm=comm),
        optax.chain(optax.trace(0.0), optax.adamw(3e-3, weight_decay=0.1, mask=decayed)),
        grids.lay(case.grid),
        microbatches=MICROBATCHES,
        clip=0.5,
        seed=5,
        bucket=BUCKET,  # parameters are cut in the middle, and several share a bucket
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
        prune=ax.PruneConfig(density=case.density),
        **options,
    )


def batches(model: str, steps: int) -> np.ndarray:
    """Token ids [steps, ROWS, seq + 1] of a few batches that come again and again."""
    shape = SHAPES[model]
    few = np.random.default_rng(0).integers(0, shape.vocab, (4, ROWS, shape.seq_len + 1), dtype=np.int32)
    return few[np.arange(steps) % 4]
