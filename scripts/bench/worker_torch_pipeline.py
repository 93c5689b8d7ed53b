"""A benchmark worker that trains the same model with torch.distributed.pipelining over ranks of one core each.

`worker_torch_pipeline.py world rank port --weights FILE [--split N] [--schedule NAME]`
"""

import argparse
import os

from workers import Task, pin, serve

pin()

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import pipelining
from torch_gpt import GPT, load

torch.set_num_threads(1)

SINGLE = {"1f1b": pipelining.Schedule1F1B, "gpipe": pipelining.ScheduleGPipe}
"""Schedules of one stage a rank."""
MULTI = {
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero-bubble": pipelining.ScheduleInterleavedZeroBubble,
    "zero-bubble-v": pipelining.ScheduleZBVZeroBubble,
}
"""Schedules that take a list of stages."""
STAGES_PER_RANK = {"interleaved": 2, "zero-bubble-v": 2}


class Stage(nn.Module):
    """A run of the model's blocks, with the embedding before the first and the head after the last."""

    def __init__(self, model: GPT, begin: int, end: int):
        super().__init__()
        self.first, self.last = begin == 0, end == len(model.blocks)
        self.blocks = model.blocks[begin:end]
        if self.first or self.last:
            self.table = model.table
        if self.first:
            self.positions = model.positions
        if self.last:
            self.norm = model.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, seq] token ids, or [batch, seq, hidden] -> [batch, seq, hidden], or logits."""
        if self.first:
            x = self.table(x) + self.positions.weight
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.table.weight) if self.last else x


def share(count: int, parts: int) -> list[int]:
    """As even a division as there is, the larger parts first."""
    return [count // parts + (i < count % parts) for i in range(parts)]


def place(schedule: str, layers: int, world: int, split: int) -> list[tuple[int, int, int]]:
    """Of every stage in order: its rank and its blocks' begin and end; rank 0 gets `split` blocks."""
    per_rank = STAGES_PER_RANK.get(schedule, 1)
    ranks = list(range(world)) * per_rank
    if schedule == "zero-bubble-v":
        ranks[world:] = reversed(range(world))
    counts = [share(n, per_rank) for n in (split, *share(layers - split, world - 1))]
    stages, begin = [], 0
    for rank in ranks:
        end = begin + counts[rank].pop(0)
        if end <= begin:
            raise SystemExit(f"error: --split {split} leaves a stage of {schedule} without blocks")
        stages.append((rank, begin, end))
        begin = end
    return stages


def main() -> None:
    """Builds this rank's stages and serves steps."""
    parser = argparse.ArgumentParser()
    parser.add_argument("world", type=int)
    parser.add_argument("rank", type=int)
    parser.add_argument("port")
    parser.add_argument("--weights", required=True)
    parser.add_argument("--split", type=int, default=0, help="blocks on rank 0 (default: an even share)")
    parser.add_argument("--schedule", choices=[*SINGLE, *MULTI], default="1f1b")
    arguments = parser.parse_args()
    task, world, rank = Task(), arguments.world, arguments.rank
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=arguments.port, GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", rank=rank, world_size=world)

    model = GPT(task)
    load(model, arguments.weights, task)
    placed = place(arguments.schedule, task.layers, world, arguments.split or task.layers // world)
    parts = {i: Stage(model, begin, end) for i, (owner, begin, end) in enumerate(placed) if owner == rank}
    cpu = torch.device("cpu")
    stages = [pipelining.PipelineStage(part, i, len(placed), cpu) for i, part in parts.items()]
    has_first, has_last, last_rank = 0 in parts, len(placed) - 1 in parts, placed[-1][0]
    # Every rank must take part in making the group. Where one rank holds both ends, it holds one table.
    ends = dist.new_group([0, last_rank]) if last_rank != 0 else None
    table = model.table.weight
    optimizer = torch.optim.AdamW(nn.ModuleList(parts.values()).parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)

    def loss_of(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(logits.flatten(0, 1), target.flatten()) / task.microbatches

    # The loss is scaled as in the serial worker: that saves the pass over all gradients that `scale_grads` takes, and
    # would take twice for a table that two stages of a rank share.
    if arguments.schedule in SINGLE:
        schedule = SINGLE[arguments.schedule](stages[0], task.microbatches, loss_of, scale_grads=False)
    else:
        schedule = MULTI[arguments.schedule](stages, task.microbatches, loss_of, scale_grads=False)
    batches = np.random.default_rng(0)

    def step() -> float:
        shape = (task.microbatches * task.microbatch, task.seq_len + 1)
        batch = torch.from_numpy(batches.integers(0, task.vocab, shape))
        optimizer.zero_grad(set_to_none=True)
        losses: list[torch.Tensor] = []
        schedule.step(
            *([batch[:, :-1]] if has_first else []),
            target=batch[:, 1:] if has_last else None,
            losses=losses,
            return_outputs=False,  # or the logits of all microbatches stay alive
        )
        if ends is not None and (has_first or has_last):
            dist.all_reduce(table.grad, group=ends)
        total = torch.stack(losses).sum().detach() if has_last else torch.zeros(())
        dist.broadcast(total, last_rank)
        optimizer.step()
        return total.item()

    serve(step)


if __name__ == "__main__":
    main()
