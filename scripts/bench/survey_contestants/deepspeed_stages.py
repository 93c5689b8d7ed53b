"""DeepSpeed: stages 0 to 3 of ZeRO over gloo, torch's AdamW inside."""

from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner


def stage(job: Job, *, level: int) -> Runner:
    """An engine that accumulates, clips and updates by its configuration."""
    import deepspeed
    from surveying import torch_side as side
    from surveying.workloads import CLIP

    side.start(job)
    model = side.model_of(job)
    count = job.microbatches(sharing=2)
    config = {
        "train_micro_batch_size_per_gpu": job.rows // 2 // count,
        "gradient_accumulation_steps": count,
        "gradient_clipping": CLIP,
        "zero_optimization": {"stage": level},
    }
    optimizer = side.adamw(model.parameters(), fused=True)
    engine, optimizer, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    steps = 0

    def step(batch: Any) -> float:
        nonlocal steps
        side.set_rate(job, optimizer, steps)
        steps += 1
        total = 0.0
        for rows in side.parts(batch, job.rank, 2, count):
            loss = side.loss_of(job, engine, rows)
            engine.backward(loss)
            engine.step()
            total += loss.item() / count
        return side.mean_of(total, 2)

    def evaluate(batch: Any) -> float:
        import torch

        with torch.no_grad():
            (rows,) = side.parts(batch, job.rank, 2, 1)
            return side.mean_of(side.loss_of(job, engine, rows).item(), 2)

    return Runner(step, evaluate, lambda: held(engine))


def held(engine: Any) -> int:
    """Bytes of parameters, of the float32 copies that ZeRO's optimizers keep, and of AdamW's moments."""
    import torch

    tensors = [getattr(one, "ds_tensor", one) for one in engine.module.parameters()]
    optimizer = engine.optimizer
    if hasattr(optimizer, "partition_size") or hasattr(optimizer, "fp32_partitioned_groups_flat"):
        tensors += getattr(optimizer, "single_partition_of_fp32_groups", [])
        tensors += getattr(optimizer, "fp32_partitioned_groups_flat", [])
    inner = getattr(optimizer, "optimizer", optimizer)
    tensors += [v for of in inner.state.values() for v in of.values() if isinstance(v, torch.Tensor)]
    stores = {one.data_ptr(): one.numel() * one.element_size() for one in tensors if one.numel()}
    return sum(stores.values())


def _made(level: int) -> Contestant:
    return Contestant(
        f"deepspeed-{level}", "deepspeed", partial(stage, level=level), "https://www.deepspeed.ai/tutorials/zero/",
        ("L1", "L2", "V1"), (stage,), serial="torch-serial", needs="deepspeed",
        weights=1 / 2 if level == 3 else 1.0, moments=1 / 2 if level else 1.0,
    )  # fmt: skip


CONTESTANTS = tuple(map(_made, range(4)))
