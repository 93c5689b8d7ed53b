"""PyTorch's part of the survey: models with the file's weights, the loss, the rate, and a loop over microbatches."""

import os
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from surveying.contestant import Job, Runner
from surveying.workloads import BETAS, CLIP, DECAY, EPS
from torch import nn

CPU = torch.device("cpu")


def start(job: Job) -> None:
    """One thread, and the process group over gloo where there are others."""
    torch.set_num_threads(1)
    if job.world > 1:
        names = {"RANK": job.rank, "LOCAL_RANK": job.rank, "WORLD_SIZE": job.world}  # as torchrun sets them
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=job.port, GLOO_SOCKET_IFNAME="lo")
        dist.init_process_group("gloo", rank=job.rank, world_size=job.world)


def model_of(job: Job, *, apart: bool = False) -> nn.Module:
    """The workload's model with the first weights, whole in this process; a GPT's layers `apart` to be split."""
    weights = dict(np.load(job.data.weights()))
    if job.workload.is_gpt:
        from torch_gpt import GPT, load

        return load(GPT(job.workload.shape(), apart=apart), weights)
    if job.workload.name == "V1":
        return VGG(weights)
    return _of_transformers(job, weights)


def _of_transformers(job: Job, weights: dict[str, np.ndarray]) -> nn.Module:
    import transformers

    from axonn_jax.files.huggingface.entries import to_huggingface

    shape = job.workload.shape()
    sizes: dict[str, Any] = {
        "num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "intermediate_size": shape.ffn, "vocab_size": shape.vocab,
        "max_position_embeddings": shape.seq_len, "rms_norm_eps": shape.norm_eps, "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
    }  # fmt: skip
    if shape.experts:
        experts = {"num_local_experts": shape.experts, "num_experts_per_tok": 2}
        config: Any = transformers.MixtralConfig(**sizes, **experts)
    else:
        config = transformers.LlamaConfig(**sizes)
    model: nn.Module = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="sdpa", dtype=torch.float32
    )
    named = {name.replace("block_sparse_moe", "mlp"): a for name, a in to_huggingface(weights, shape).items()}
    for name, param in model.named_parameters():
        home, _, kind = name.rpartition(".")
        value = named.get(name)
        if value is None:  # transformers holds all experts' matrices in one tensor, files hold them one by one
            parts = ("w1", "w3") if kind == "gate_up_proj" else ("w2",)
            each = [[named[f"{home}.{e}.{part}.weight"] for part in parts] for e in range(shape.experts)]
            value = np.stack([np.concatenate(one) for one in each])
        with torch.no_grad():
            param.copy_(torch.from_numpy(np.array(value)))
    return model


class VGG(nn.Module):
    """Eight convolutions in four groups with a pooling behind each, and two dense layers."""

    def __init__(self, weights: Mapping[str, np.ndarray]):
        super().__init__()
        kernels = [weights[f"convolutions.{i}.kernel"] for i in range(8)]
        self.convolutions = nn.ModuleList(nn.Conv2d(k.shape[2], k.shape[3], 3, padding=1) for k in kernels)
        self.dense = nn.ModuleList([nn.Linear(256, 128), nn.Linear(128, 10)])
        for group in ("convolutions", "dense"):
            for i, layer in enumerate(getattr(self, group)):
                kernel = torch.from_numpy(weights[f"{group}.{i}.kernel"])
                with torch.no_grad():
                    layer.weight.copy_(kernel.permute(3, 2, 0, 1) if kernel.ndim == 4 else kernel.T)
                    layer.bias.copy_(torch.from_numpy(weights[f"{group}.{i}.bias"]))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """[batch, 32, 32, 1] -> logits."""
        x = images.permute(0, 3, 1, 2)
        for number, convolution in enumerate(self.convolutions):
            x = F.relu(convolution(x))
            x = F.max_pool2d(x, 2) if number % 2 else x
        x = x.permute(0, 2, 3, 1).flatten(1)  # features in the order of the Flax model
        return self.dense[1](F.relu(self.dense[0](x)))


def loss_of(job: Job, model: nn.Module, rows: Any) -> torch.Tensor:
    """Mean loss of rows."""
    if job.workload.is_gpt:
        return model(rows)
    if job.workload.name == "V1":
        return F.cross_entropy(model(rows["image"]), rows["label"].long())
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def adamw(parameters: Any, **more: Any) -> torch.optim.Optimizer:
    """The optimizer that all have."""
    return torch.optim.AdamW(parameters, RATE_BEFORE, BETAS, EPS, DECAY, **more)


RATE_BEFORE = 0.0
"""Rate until `set_rate` gives the first step's."""


def set_rate(job: Job, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Give the optimizer a step's learning rate."""
    for group in optimizer.param_groups:
        group["lr"] = float(job.workload.rate(step))


def mean_of(value: float, sharing: int) -> float:
    """Mean over processes that share the batch: one all-reduce of 4 bytes."""
    if sharing == 1:
        return value
    summed = torch.tensor(value)
    dist.all_reduce(summed)
    return summed.item() / sharing


def parts(batch: Any, rank: int, sharing: int, count: int) -> list[Any]:
    """Microbatches of a rank, of those that share the batch."""
    if isinstance(batch, dict):
        cut = {name: np.array_split(a, sharing * count)[rank * count : (rank + 1) * count] for name, a in batch.items()}
        return [{name: torch.from_numpy(cut[name][i]) for name in cut} for i in range(count)]
    cut_rows = np.array_split(batch, sharing * count)[rank * count : (rank + 1) * count]
    return [torch.from_numpy(rows) for rows in cut_rows]


def looped(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    sharing: int = 1,
    quiet: Callable[[bool], AbstractContextManager[Any]] = lambda last: nullcontext(),
    clip: Callable[[], Any] | None = None,
    in_loss: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Runner:
    """Steps of a model: accumulate over microbatches, clip, update; `sharing` processes share the batch.

    `quiet` gives the context of a microbatch, told whether it is the last; `in_loss` one for loss and backward.
    """
    steps = 0
    count = job.microbatches(sharing)
    rank = job.rank if sharing > 1 else 0

    def step(batch: Any) -> float:
        nonlocal steps
        set_rate(job, optimizer, steps)
        steps += 1
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        rows = parts(batch, rank, sharing, count)
        for number, one in enumerate(rows):
            with quiet(number == len(rows) - 1), in_loss():
                loss = loss_of(job, model, one) / len(rows)
                loss.backward()
            total += whole(loss.detach()).item()
        if job.workload.clip:
            (clip or (lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP)))()
        optimizer.step()
        return mean_of(total, sharing)

    def evaluate(batch: Any) -> float:
        with torch.no_grad(), in_loss():
            (rows,) = parts(batch, rank, sharing, 1)
            return mean_of(whole(loss_of(job, model, rows)).item(), sharing)

    return Runner(step, evaluate, lambda: state_bytes(model, optimizer))


def whole(value: Any) -> torch.Tensor:
    """A tensor of all processes' parts."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters and of the optimizer's tensors in this process."""
    if hasattr(optimizer, "optim"):
        optimizer = optimizer.optim  # ZeroRedundancyOptimizer's own part
    state = [value for of in optimizer.state.values() for value in of.values() if isinstance(value, torch.Tensor)]
    local = [value.to_local() if hasattr(value, "to_local") else value for value in [*model.parameters(), *state]]
    return sum(value.numel() * value.element_size() for value in local)
