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
    model: Any = side.model_of(job, apart=True)
    mesh = init_device_mesh("cpu", (2,))
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


CONTESTANTS = (
    Contestant(
        "torch-tp", "torch", tensor, "https://docs.pytorch.org/tutorials/intermediate/TP_tutorial.html", ("L1",),
        (tensor, plan_of), serial="torch-serial", weights=1 / 2, moments=1 / 2,
    ),
)  # fmt: skip
