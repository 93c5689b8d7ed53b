"""The yardstick: the same GPT in plain PyTorch, trained the way PyTorch users do it.

float32 parameters under bf16 autocast, fused AdamW, `torch.compile` over the whole model, fused attention, and
activation checkpointing of whole blocks where ours recomputes them. The residual stream is bf16, as ours is.
"""

import functools
import importlib.util
import math
import time
from typing import Any

from axonn_jax.models import ModelShape
from checks.rates import mean_seconds, rates
from checks.report import Emit, Row, Skip, attempt, first_line, out_of_memory, throughput_note
from checks.sizes import TrainConfig


def run(spec: dict[str, Any], emit: Emit) -> None:
    """One row a configuration, with the ratio to ours where ours was measured."""
    for fields, ours in zip(spec["configs"], spec["ours"], strict=True):
        config = TrainConfig(**fields)
        attempt(emit, "torch", config.name, functools.partial(_measure, config, ours, spec))


def unsuitable(shape: ModelShape) -> str:
    """Why this model has no PyTorch counterpart here, or an empty string."""
    gpt = (shape.positions, shape.norm, shape.mlp, shape.tied) == ("learned", "layernorm", "gelu", True)
    return "" if gpt and shape.kv_heads == shape.heads else "written for GPT shapes only"


def _measure(config: TrainConfig, ours: dict[str, Any] | None, spec: dict[str, Any]) -> Row:
    shape = ModelShape(**spec["shape"])
    if importlib.util.find_spec("torch") is None:
        raise Skip("PyTorch is not installed")
    if unsuitable(shape):
        raise Skip(unsuitable(shape))
    import torch

    if not torch.cuda.is_available() and not spec["rehearse_torch"]:
        raise Skip("no GPU" if not spec["gpu"] else f"this PyTorch ({torch.__version__}) has no CUDA")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.set_float32_matmul_precision("high")
    torch.manual_seed(0)
    note, compiled = "", device == "cuda"
    try:
        figures = _train(shape, config, device, compiled, spec)
    except Exception as error:
        if not compiled or out_of_memory(error):
            raise
        note, compiled = f"; eager, torch.compile failed: {first_line(error)[:120]}", False
    if note:  # outside the handler, whose traceback would keep the failed attempt's memory alive
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        figures = _train(shape, config, device, compiled, spec)
    figures |= {"device": device, "compiled": compiled, "torch": torch.__version__, "cuda": torch.version.cuda}
    if ours is not None:
        if figures["parameters"] != ours["parameters"]:
            raise ValueError(f"not the same model: {figures['parameters']} parameters, ours {ours['parameters']}")
        figures["ratio"] = ours["tokens_per_s"] / figures["tokens_per_s"]
        note = f"; ours / torch = {figures['ratio']:.3f}{note}"
    elif not note:
        note = "; ours was not measured"
    if device == "cpu":
        note += "; eager on the CPU, a rehearsal"
    return Row("torch", config.name, "ok", throughput_note(figures) + note, figures)


def _train(shape: ModelShape, config: TrainConfig, device: str, compiled: bool, spec: dict[str, Any]) -> dict[str, Any]:
    import torch

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    start = time.perf_counter()
    from torch_gpt import GPT

    with torch.device(device):
        model = GPT(shape, recompute=config.activations == "full", stream=torch.bfloat16)
        tokens = torch.randint(0, shape.vocab, (config.accumulate, config.microbatch, shape.seq_len + 1))
    optimizer = torch.optim.AdamW(
        model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda" or None
    )
    forward = torch.compile(model) if compiled else model
    wait()
    ready = time.perf_counter()

    def step() -> Any:
        total = 0.0
        for batch in tokens:
            with torch.autocast(device, torch.bfloat16):
                loss = forward(batch) / config.accumulate
            loss.backward()
            total = total + loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total

    losses = [float(step())]
    compile_s = time.perf_counter() - ready
    for _ in range(spec["warm_up"] - 1):
        step()
    step_s = mean_seconds(step, wait, spec["steps"])
    losses.append(float(step()))
    if not (math.isfinite(losses[-1]) and losses[-1] < losses[0]):
        raise ValueError(f"the loss of one repeated batch went from {losses[0]:.3f} to {losses[-1]:.3f}")

    return {
        **rates(shape, config, step_s, spec),
        "init_s": ready - start,
        "compile_s": compile_s,
        "peak_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else None,
        "parameters": sum(p.numel() for p in model.parameters()),
        "losses": losses,
    }
