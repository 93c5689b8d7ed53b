"""PyTorch in one process, and data-parallel: DDP, FSDP2 and ZeroRedundancyOptimizer over gloo."""

from contextlib import nullcontext
from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner

ALL = ("L1", "L2", "V1", "M1")
DOCS = "https://docs.pytorch.org/docs/2.13/"
TUTORIALS = "https://docs.pytorch.org/tutorials/"


def serial(job: Job, *, compiled: bool = False, experts: str = "") -> Runner:
    """One process, eager or by `torch.compile`; experts by one of transformers' implementations."""
    from surveying import torch_side as side

    side.start(job)
    model: Any = side.model_of(job)
    if experts:
        model.set_experts_implementation(experts)
    if compiled:
        import torch

        model = torch.compile(model)
    return side.looped(job, model, side.adamw(model.parameters(), fused=True))


def ddp(job: Job) -> Runner:
    """Replicas that all-reduce gradients with the last microbatch's backward pass."""
    from surveying import torch_side as side
    from torch.nn.parallel import DistributedDataParallel

    side.start(job)
    model = DistributedDataParallel(side.model_of(job), gradient_as_bucket_view=True)
    optimizer = side.adamw(model.parameters(), fused=True)
    return side.looped(job, model, optimizer, sharing=2, quiet=lambda last: nullcontext() if last else model.no_sync())


def zero(job: Job) -> Runner:
    """DDP whose optimizer state is divided: ZeRO-1."""
    import torch
    from surveying import torch_side as side
    from surveying.workloads import BETAS, DECAY, EPS
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    side.start(job)
    model = DistributedDataParallel(side.model_of(job), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        model.parameters(), torch.optim.AdamW, lr=0.0, betas=BETAS, eps=EPS, weight_decay=DECAY, fused=True
    )
    return side.looped(job, model, optimizer, sharing=2, quiet=lambda last: nullcontext() if last else model.no_sync())


def fsdp2(job: Job) -> Runner:
    """`fully_shard` of every block and of the whole, gradients reduced with the last microbatch."""
    from surveying import torch_side as side
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    side.start(job)
    model: Any = side.model_of(job)
    mesh = init_device_mesh("cpu", (2,))
    for block in blocks_of(model):
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def quiet(last: bool) -> Any:
        model.set_requires_gradient_sync(last)
        return nullcontext()

    return side.looped(job, model, side.adamw(model.parameters(), fused=True), sharing=2, quiet=quiet)


def blocks_of(model: Any) -> Any:
    """The repeated layers of the survey's models."""
    if hasattr(model, "model"):
        return model.model.layers
    return model.blocks if hasattr(model, "blocks") else [*model.convolutions, *model.dense]


CONTESTANTS = (
    Contestant(
        "torch-serial", "torch", serial, TUTORIALS + "beginner/introyt/trainingyt.html", ALL, (serial,), 1,
        weights=1.0, moments=1.0,
    ),
    Contestant(
        "torch-serial-compile", "torch", partial(serial, compiled=True),
        TUTORIALS + "intermediate/torch_compile_tutorial.html", ("L1",), (serial,), 1, weights=1.0, moments=1.0,
    ),
    Contestant(
        "torch-ddp", "torch", ddp, TUTORIALS + "intermediate/ddp_tutorial.html", ALL, (ddp,), serial="torch-serial",
        weights=1.0, moments=1.0,
    ),
    Contestant(
        "torch-zero", "torch", zero, TUTORIALS + "recipes/zero_redundancy_optimizer.html", ALL, (zero,),
        serial="torch-serial", weights=1.0, moments=1 / 2,
    ),
    Contestant(
        "torch-fsdp2", "torch", fsdp2, TUTORIALS + "intermediate/FSDP_tutorial.html", ALL, (fsdp2, blocks_of),
        serial="torch-serial", weights=1 / 2, moments=1 / 2,
    ),
)  # fmt: skip
