"""A benchmark worker that trains the same model in PyTorch: `worker_torch.py [world rank port] --weights FILE`."""

import contextlib
import os
import sys

from workers import Task, pin, serve

pin()

import numpy as np
import torch
from torch import nn
from torch_gpt import GPT, load

torch.set_num_threads(1)


def main() -> None:
    """Builds the task's model and serves steps; `world rank port` joins a DDP group over gloo."""
    task, arguments = Task(), sys.argv[1:]
    model: nn.Module = GPT(task)
    load(model, arguments[arguments.index("--weights") + 1], task)
    world, rank = 1, 0
    if arguments[0].isdigit():
        world, rank, port = map(int, arguments[:3])
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
        torch.distributed.init_process_group("gloo", rank=rank, world_size=world)
        model = nn.parallel.DistributedDataParallel(model)
    if "--compile" in arguments:
        model = torch.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4, (0.9, 0.95), 1e-8, 0.1, fused=True)
    batches, share = np.random.default_rng(0), task.microbatches // world

    def step() -> float:
        shape = (task.microbatches, task.microbatch, task.seq_len + 1)
        batch = torch.from_numpy(batches.integers(0, task.vocab, shape))[rank * share : (rank + 1) * share]
        optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for number, tokens in enumerate(batch):
            last = number == share - 1
            with contextlib.nullcontext() if world == 1 or last else model.no_sync():
                loss = model(tokens) / share
                loss.backward()
            total += loss.item()
        optimizer.step()
        return total

    serve(step)


main()
