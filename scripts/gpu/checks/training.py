"""Training throughput of this package, and what its compiled step consists of."""

import functools
import math
import re
import time
from collections import Counter
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax
from axonn_jax.models import ModelShape, Transformer
from checks.rates import mean_seconds, rates
from checks.report import Emit, Row, attempt, throughput_note
from checks.sizes import TrainConfig


def run(spec: dict[str, Any], emit: Emit) -> None:
    """One row a configuration; the compiled program's facts go to the section `program`."""
    for number, fields in enumerate(spec["configs"]):
        config = TrainConfig(**fields)
        trace = spec["trace"] if number == 0 else None
        attempt(emit, "training", config.name, functools.partial(_measure, config, spec, trace, emit))


def _measure(config: TrainConfig, spec: dict[str, Any], trace: str | None, emit: Emit) -> Row:
    shape = ModelShape(**spec["shape"])
    sequences = config.microbatch * config.accumulate
    start = time.perf_counter()
    grid = axonn_jax.init()
    device = grid.mesh.devices.flat[0]
    trainer = axonn_jax.Trainer(
        Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adamw(1e-4, b1=0.9, b2=0.95, weight_decay=0.1),
        grid,
        microbatches=config.accumulate,
        clip=1.0,
        memory=axonn_jax.MemoryConfig(precision="bf16", activations=config.activations),
    )
    batch = np.random.default_rng(0).integers(0, shape.vocab, (sequences, shape.seq_len + 1), dtype=np.int32)
    jax.block_until_ready(trainer.engine.train_state)
    ready = time.perf_counter()
    compiled = trainer.engine.compiled_step(batch)
    compile_s = time.perf_counter() - ready
    attempt(emit, "program", config.name, lambda: _program(config, compiled))

    def step() -> Any:
        return trainer.step(batch)["loss"]

    def wait() -> None:
        jax.block_until_ready(trainer.engine.train_state)

    first_loss = float(step())
    for _ in range(spec["warm_up"] - 1):
        step()
    step_s = mean_seconds(step, wait, spec["steps"])
    if trace is not None:
        with jax.profiler.trace(trace):
            step()
            step()
            wait()
    last_loss = float(step())

    stats = device.memory_stats() or {}
    figures = {
        **rates(shape, config, step_s, spec),
        "init_s": ready - start,
        "compile_s": compile_s,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "bytes_limit": stats.get("bytes_limit"),
        "parameters": shape.params(),
        "losses": [first_loss, last_loss],
    }
    # The loss of one repeated batch must fall: a fast step that computes nonsense is no result.
    learns = math.isfinite(last_loss) and last_loss < first_loss
    note = throughput_note(figures) + ("" if learns else f"; loss {first_loss:.3f} -> {last_loss:.3f}")
    return Row("training", config.name, "ok" if learns else "failed", note, figures)


_MEMORY = ("argument", "output", "alias", "temp", "generated_code")


def _program(config: TrainConfig, compiled: jax.stages.Compiled) -> Row:
    """Memory by XLA's own account, and calls of libraries by name."""
    memory = compiled.memory_analysis()
    sizes = {name: getattr(memory, f"{name}_size_in_bytes", None) for name in _MEMORY}
    sizes["peak"] = getattr(memory, "peak_memory_in_bytes", None)
    facts = hlo_facts(compiled.as_text() or "")
    calls = Counter(facts["custom_calls"]) + Counter(facts["fusion_kinds"])
    fused = sum(count for target, count in calls.items() if "fmha" in target.lower())
    gigabytes = ", ".join(f"{name} {size / 1e9:.2f}" for name, size in sizes.items() if size is not None)
    shown = ", ".join(f"{count} {target}" for target, count in calls.most_common(8))
    note = f"GB: {gigabytes}; {shown or 'no library calls'}; {facts['fusions']} fusions"
    status: Any = "ok"
    if jax.default_backend() == "gpu" and fused == 0:
        status, note = "failed", f"no call of cuDNN's fused attention; {note}"
    figures = {"memory_bytes": sizes, "fused_attention_calls": fused, **facts}
    return Row("program", config.name, status, note, figures)


def _counts(names: list[str]) -> dict[str, int]:
    return dict(Counter(names).most_common())


def hlo_facts(text: str) -> dict[str, Any]:
    """Counts from optimised HLO text; what a loop calls is counted once."""
    return {
        # e.g. __cudnn$fmhaSoftmax, __cudnn$fmhaSoftmaxBackward, __cublas$lt$matmul
        "custom_calls": _counts(re.findall(r'custom_call_target="([^"]+)"', text)),
        # e.g. __triton_gemm: matmuls that XLA's own kernels won
        "fusion_kinds": _counts(re.findall(r'"kind":"(__[^"]+)"', text)),
        "fusions": text.count(" fusion("),
        "loops": text.count(" while("),
        "hlo_bytes": len(text),
    }
