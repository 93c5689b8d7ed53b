"""Optimizer state on the device and on the host: step time, device memory, what travels."""

import functools
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax
from axonn_jax.models import ModelShape, Transformer
from checks.rates import mean_seconds
from checks.report import Emit, Row, attempt

_BUCKET = {True: 50_000, False: 16_000_000}


def run(spec: dict[str, Any], emit: Emit) -> None:
    """One row a way of keeping the state that `spec` names."""
    for ways in spec["ways"]:
        attempt(emit, "offload", ways["name"], functools.partial(_measure, ways, spec))


def _measure(ways: dict[str, Any], spec: dict[str, Any]) -> Row:
    shape = ModelShape(**spec["shape"])
    grid = axonn_jax.init()
    trainer = axonn_jax.Trainer(
        lambda: Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1),
        grid,
        microbatches=ways["microbatches"],
        clip=1.0,
        memory=axonn_jax.MemoryConfig(precision="bf16", bucket=_BUCKET[spec["quick"]], **ways["options"]),
        tensor=axonn_jax.TensorConfig(scan_layers="no"),  # as offload needs, for the comparison's sake everywhere
    )
    rows = ways["microbatches"] * ways["rows"]
    batch = np.random.default_rng(0).integers(0, shape.vocab, (rows, shape.seq_len + 1), dtype=np.int32)
    losses = [float(trainer.step(batch)["loss"])]  # compiles
    trainer.step(batch)
    step_s = mean_seconds(
        lambda: trainer.step(batch), lambda: jax.block_until_ready(trainer.engine.train_state), spec["steps"]
    )
    losses.append(float(trainer.step(batch)["loss"]))
    found = trainer.engine.memory()[0]
    travelled = 2 * found["planned"]["host"]  # there and back
    figures = {
        "step_s": step_s,
        "tokens_per_s": rows * shape.seq_len / step_s,
        "peak_bytes": found["device_peak"],
        "memory": found,
        "travelled_bytes": travelled,
        "parameters": shape.params(),
        "losses": losses,
        **ways,
    }
    peak = "" if found["device_peak"] is None else f", peak {found['device_peak'] / 1e9:.1f} GB"
    counted = found["counted_between_steps"]
    note = (
        f"{step_s:.3f} s, {figures['tokens_per_s']:,.0f} tokens/s{peak}; "
        f"state {counted['device'] / 1e9:.2f} GB device, {counted['host'] / 1e9:.2f} GB host; "
        f"{travelled / 1e9:.2f} GB travel a step; loss {losses[0]:.3f} -> {losses[1]:.3f}"
    )
    learns = losses[1] < losses[0]
    kept = counted["device"] == found["planned"]["device"] - found["planned"]["gradients"]
    return Row("offload", ways["name"], "ok" if learns and kept else "failed", note, figures)
