"""PyTorch's pipelines: 1F1B, interleaved 1F1B and the zero-bubble schedules of torch.distributed.pipelining."""

from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner

DOCS = "https://docs.pytorch.org/docs/2.13/distributed.pipelining.html"
ON_RANK_0 = 5
"""Blocks of 8 on rank 0: the head is worth more than a block; 4 was slower (`scripts/bench/pipeline`)."""
SINGLE = {"1f1b": "Schedule1F1B", "gpipe": "ScheduleGPipe"}
"""Schedules of one stage a rank."""
MULTI = {
    "interleaved": "ScheduleInterleaved1F1B", "zero-bubble": "ScheduleInterleavedZeroBubble",
    "zero-bubble-v": "ScheduleZBVZeroBubble",
}  # fmt: skip
"""Schedules that take a list of stages."""
STAGES_PER_RANK = {"interleaved": 2, "zero-bubble-v": 2}


def share(count: int, parts: int) -> list[int]:
    """As even a division as there is, the larger parts first."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def place(schedule: str, layers: int, world: int) -> list[tuple[int, int, int]]:
    """Of every stage in order: its rank and its blocks' begin and end."""
    per_rank = STAGES_PER_RANK.get(schedule, 1)
    ranks = list(range(world)) * per_rank
    if schedule == "zero-bubble-v":
        ranks[world:] = reversed(range(world))
    counts = [share(n, per_rank) for n in (ON_RANK_0, *share(layers - ON_RANK_0, world - 1))]
    stages, begin = [], 0
    for rank in ranks:
        end = begin + counts[rank].pop(0)
        stages.append((rank, begin, end))
        begin = end
    return stages


def pipe(job: Job, *, schedule: str) -> Runner:
    """Stages of the GPT; the norm for clipping is taken over both ranks, the tied table counted once."""
    import torch
    import torch.distributed as dist
    import torch.nn.functional as F
    from surveying import torch_side as side
    from surveying.workloads import CLIP
    from torch import nn
    from torch.distributed import pipelining
    from torch_gpt import Stage

    side.start(job)
    model: Any = side.model_of(job)
    placed = place(schedule, len(model.blocks), job.world)
    stages = {i: Stage(model, begin, end) for i, (owner, begin, end) in enumerate(placed) if owner == job.rank}
    made = [pipelining.PipelineStage(part, i, len(placed), side.CPU) for i, part in stages.items()]
    last_rank, table = placed[-1][0], model.table.weight
    has_first, has_last, twice = 0 in stages, len(placed) - 1 in stages, last_rank != 0
    mine = nn.ModuleList(stages.values())
    parameters = list(mine.parameters())
    optimizer = side.adamw(parameters, fused=True)
    count = job.microbatches()

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / count

    # The loss is scaled: that saves the pass over all gradients that `scale_grads` takes, and would take twice for a
    # table that two stages of a rank share.
    kind = getattr(pipelining, {**SINGLE, **MULTI}[schedule])
    runs = kind(made[0] if schedule in SINGLE else made, count, loss_of, scale_grads=False)

    def clip() -> None:
        norms = [one.grad.square().sum() for one in parameters if not (twice and has_last and one is table)]
        total = torch.stack(norms).sum()
        dist.all_reduce(total)
        scale = (CLIP / (total.sqrt() + 1e-6)).clamp(max=1.0)
        for one in parameters:
            one.grad.mul_(scale)

    def mean(losses: list[torch.Tensor]) -> float:
        total = torch.stack(losses).sum().detach() if has_last else torch.zeros(())
        dist.broadcast(total, last_rank)
        return float(total.item())

    def call(run: Any, batch: Any) -> float:
        tokens, losses = torch.from_numpy(batch), []
        run(
            *([tokens[:, :-1]] if has_first else []), target=tokens[:, 1:] if has_last else None, losses=losses,
            return_outputs=False,  # or the logits of all microbatches stay alive
        )  # fmt: skip
        return mean(losses)

    steps = 0

    def step(batch: Any) -> float:
        nonlocal steps
        side.set_rate(job, optimizer, steps)
        steps += 1
        optimizer.zero_grad(set_to_none=True)
        loss = call(runs.step, batch)
        if twice:
            dist.all_reduce(table.grad)
        if job.workload.clip:
            clip()
        optimizer.step()
        return loss

    def evaluate(batch: Any) -> float:
        with torch.no_grad():
            size = job.rows
            return float(
                sum(call(runs.eval, batch[i : i + size]) for i in range(0, len(batch), size)) / (len(batch) / size)
            )

    return Runner(step, evaluate, lambda: side.state_bytes(mine, optimizer))


CONTESTANTS = tuple(
    Contestant(name, "torch", partial(pipe, schedule=schedule), DOCS, ("L1",), (pipe,), serial="torch-serial")
    for name, schedule in (
        ("torch-pp-1f1b", "1f1b"), ("torch-pp-interleaved", "interleaved"), ("torch-pp-zbv", "zero-bubble-v"),
    )
)  # fmt: skip
