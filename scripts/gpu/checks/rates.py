"""From a step's time to tokens a second and shares of the peak. No jax: the PyTorch worker uses it too."""

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from axonn_jax.core.hardware import peak_flops
from axonn_jax.models import ModelShape
from checks.sizes import TrainConfig


def mean_seconds(step: Callable[[], Any], wait: Callable[[], Any], steps: int) -> float:
    """Return the seconds of a step: the mean over `steps` with one wait at the end, so that the host runs ahead."""
    wait()
    begin = time.perf_counter()
    for _ in range(steps):
        step()
    wait()
    return (time.perf_counter() - begin) / steps


def hardware_flops(shape: ModelShape, sequences: int, activations: str) -> int:
    """FLOPs of a step with what the policy computes again: whole blocks, or (`dots`) attention alone."""
    attention = shape.layers * sequences * 4 * shape.seq_len**2 * shape.heads * shape.head_dim
    again = attention if activations == "dots" else 0
    return shape.step_flops(sequences, recompute=activations == "full") + again


def rates(shape: ModelShape, config: TrainConfig, step_s: float, spec: dict[str, Any]) -> dict[str, Any]:
    """Tokens a second and shares of the published peak and of the measured ceiling, of a row's configuration."""
    sequences, activations = config.microbatch * config.accumulate, config.activations
    peak, ceiling = peak_flops(spec["kind"]), spec["ceiling"]
    model, hardware = shape.step_flops(sequences) / step_s, hardware_flops(shape, sequences, activations) / step_s
    return {
        "step_s": step_s,
        "tokens_per_s": sequences * shape.seq_len / step_s,
        "model_flops_per_s": model,
        "hardware_flops_per_s": hardware,
        "mfu": None if peak is None else model / peak,
        "hfu": None if peak is None else hardware / peak,
        "of_ceiling": None if ceiling is None else hardware / ceiling,
        **asdict(config),
    }
