"""A benchmark worker that trains a mixture of experts: `worker_experts.py ours|torch EXPERTS WEIGHTS [...]`.

With 0 experts it is the dense model of equal active FLOPs. `torch` is followed by transformers' implementation, `ours`
by an axis of two ranks, this one's rank, and a port; each rank then has the whole batch of one.
"""

import sys
from typing import Any

import numpy as np
from workers import Task, pin, serve

pin()

PER_TOKEN, FFN = 2, 512


def ours(task: Task, experts: int, weights: str, axis: str = "", rank: str = "0", port: str = "") -> Any:
    """A step of this package, which alone writes its first weights under Hugging Face's names."""
    import optax
    from flax import nnx

    import axonn_jax as ax
    from axonn_jax.models.huggingface import to_huggingface

    joined = {"coordinator": f"127.0.0.1:{port}", "num_processes": 2, "process_id": int(rank), axis: 2} if axis else {}
    grid = ax.init(**joined)
    ffn = FFN if experts else PER_TOKEN * FFN
    shape = ax.models.ModelShape(
        task.layers, task.hidden, task.heads, task.heads, ffn, task.vocab, task.seq_len,
        positions="rope", norm="rmsnorm", mlp="swiglu", bias="none", tied=False, experts=experts,
    )  # fmt: skip
    trainer = ax.Trainer(
        ax.models.Transformer(shape, rngs=nnx.Rngs(0)),
        optax.adamw(3e-4, 0.9, 0.95, weight_decay=0.1),
        grid,
        microbatches=task.microbatches,
        memory=ax.MemoryConfig(precision="fp32"),
    )
    if experts and not axis:
        np.savez(weights, **to_huggingface({k: np.asarray(v) for k, v in trainer.engine.params.items()}, shape))
    ranks = 2 if axis else 1
    rows = trainer.rows(ranks * task.microbatch * task.microbatches)
    return lambda batch: float(trainer.step(np.tile(batch, (ranks, 1))[rows])["loss"])


def theirs(task: Task, experts: int, weights: str, implementation: str) -> Any:
    """A step of transformers' Mixtral in PyTorch, from the same weights."""
    import torch
    import transformers

    torch.set_num_threads(1)
    config = transformers.MixtralConfig(
        num_hidden_layers=task.layers, hidden_size=task.hidden, num_attention_heads=task.heads,
        num_key_value_heads=task.heads, intermediate_size=FFN, vocab_size=task.vocab,
        max_position_embeddings=task.seq_len, num_local_experts=experts, num_experts_per_tok=PER_TOKEN,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4}, rms_norm_eps=1e-5,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.set_experts_implementation(implementation)
    _load(model, dict(np.load(weights)), experts)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)

    def step(batch: np.ndarray) -> float:
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for rows in torch.from_numpy(batch.reshape(task.microbatches, -1, task.seq_len + 1)):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()) / task.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    return step


def _load(model: Any, weights: dict[str, np.ndarray], experts: int) -> None:
    """Files name every expert's tensors; transformers 5 holds them together."""
    import torch

    held = {name.replace("block_sparse_moe", "mlp"): value for name, value in weights.items()}
    for name, param in model.named_parameters():
        home, _, kind = name.rpartition(".")
        if kind in ("gate_up_proj", "down_proj"):
            parts = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            each = [np.concatenate([held[f"{home}.{e}.{part}.weight"] for part in parts]) for e in range(experts)]
            value = np.stack(each)
        else:
            value = held[name]
        with torch.no_grad():
            param.copy_(torch.from_numpy(value))


def main() -> None:
    """Builds the model and serves steps."""
    task, (kind, experts, weights, *rest) = Task(), sys.argv[1:]
    step = ours(task, int(experts), weights, *rest) if kind == "ours" else theirs(task, int(experts), weights, *rest)
    batches = np.random.default_rng(0)
    size = (task.microbatch * task.microbatches, task.seq_len + 1)
    serve(lambda: step(batches.integers(0, task.vocab, size)))


main()
