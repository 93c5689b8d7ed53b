"""PyTorch's tensor parallelism: DTensor plans of `parallelize_module`, the vocabulary split too."""

from typing import Any

from surveying.contestant import Contestant, Job, Runner


def tensor(job: Job) -> Runner:
    """Column-wise and row-wise linear layers in every block, and a loss over a split vocabulary."""
    import torch
    import torch.distributed as dist
    from surveying import torch_side as side
    from surveying.workloads import CLIP
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel, parallelize_module

    side.start(job)
    model: Any = side.model_of(job)
    mesh = init_device_mesh("cpu", (2,))
    model = split_gpt(model, job)
    parallelize_module(model, mesh, plan_of())
    model.head.weight = model.table.weight  # tied again: both are split over rows
    split, whole = divided(model)
    optimizer = side.adamw([{"params": split}, {"params": whole}], foreach=False)

    def clip() -> None:
        parts = [[local(one.grad) for one in group] for group in (split, whole)]
        sums = [torch.stack([part.square().sum() for part in each]).sum() for each in parts]
        dist.all_reduce(sums[0])
        scale = (CLIP / ((sums[0] + sums[1]).sqrt() + 1e-6)).clamp(max=1.0)
        for part in (*parts[0], *parts[1]):
            part.mul_(scale)

    return side.looped(job, model, optimizer, clip=clip, in_loss=loss_parallel)


def local(grad: Any) -> Any:
    """This process's part of a gradient."""
    return grad.to_local() if hasattr(grad, "to_local") else grad


def divided(model: Any) -> tuple[list[Any], list[Any]]:
    """Parameters that are split, and those that both processes have: PyTorch mixes them in no operation."""
    from torch.distributed.tensor import DTensor, Shard

    parameters = list(model.parameters())
    is_split = [isinstance(one, DTensor) and any(isinstance(p, Shard) for p in one.placements) for one in parameters]
    pairs = list(zip(parameters, is_split, strict=True))
    return [one for one, split in pairs if split], [one for one, split in pairs if not split]


def plan_of() -> dict[str, Any]:
    """Layouts by module, as in the tutorial's Llama."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

    rows = RowwiseParallel(input_layouts=Replicate())
    last = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    block = {name: ColwiseParallel() for name in ("query", "key", "value", "up")}
    block |= {name: RowwiseParallel() for name in ("out", "down")}
    return {"table": rows, "head": last, **{f"blocks.*.{name}": style for name, style in block.items()}}


def split_gpt(model: Any, job: Job) -> Any:
    """The GPT with queries, keys and values in layers of their own: a fused one cannot be split by columns."""
    import torch
    import torch.nn.functional as F
    from torch import nn

    width = job.workload.shape().head_dim

    class Block(nn.Module):
        def __init__(self, old: Any):
            super().__init__()
            self.attention_norm, self.mlp_norm = old.attention_norm, old.mlp_norm
            self.out, self.up, self.down = old.out, old.up, old.down
            weights, biases = old.qkv.weight.chunk(3), old.qkv.bias.chunk(3)
            self.query, self.key, self.value = (self.linear(*pair) for pair in zip(weights, biases, strict=True))

        @staticmethod
        def linear(weight: torch.Tensor, bias: torch.Tensor) -> nn.Linear:
            made = nn.Linear(weight.shape[1], weight.shape[0])
            made.weight = nn.Parameter(weight.detach().clone())
            made.bias = nn.Parameter(bias.detach().clone())
            return made

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = self.attention_norm(x)
            q, k, v = (f(h).unflatten(-1, (-1, width)).transpose(1, 2) for f in (self.query, self.key, self.value))
            attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(attended.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.mlp_norm(x)), approximate="tanh"))

    class Split(nn.Module):
        def __init__(self, old: Any):
            super().__init__()
            self.table, self.positions, self.norm = old.table, old.positions, old.norm
            self.blocks = nn.ModuleList(Block(one) for one in old.blocks)
            self.head = nn.Linear(old.table.weight.shape[1], old.table.weight.shape[0], bias=False)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens[:, :-1]) + self.positions.weight
            for block in self.blocks:
                x = block(x)
            logits = self.head(self.norm(x))
            return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    return Split(model)


CONTESTANTS = (
    Contestant(
        "torch-tp", "torch", tensor, "https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html", ("L1",),
        (tensor, plan_of, split_gpt), serial="torch-serial", weights=1 / 2, moments=1 / 2,
    ),
)  # fmt: skip
