"""This package: its own transformer in a `Trainer`, in one process and on grids of two."""

from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner
from surveying.workloads import BETAS, CLIP, DECAY, rate

LANGUAGE = ("L1",)


def train(job: Job, axes: dict[str, int], memory: dict[str, Any]) -> Any:
    """Make the trainer: the code that a user writes."""
    import jax.numpy as jnp
    import optax
    from flax import nnx

    import axonn_jax as ax

    grid = ax.init(**axes, **joined(job, axes))
    model = partial(ax.models.Transformer, job.workload.shape())
    optimizer = optax.adamw(lambda step: rate(step, jnp), *BETAS, weight_decay=DECAY)
    return ax.Trainer(
        lambda: model(rngs=nnx.Rngs(job.data.seed)),
        optimizer,
        grid,
        microbatches=microbatches(job, axes),
        clip=CLIP,
        memory=ax.MemoryConfig(precision="fp32", **memory),
    )


def joined(job: Job, axes: dict[str, int]) -> dict[str, Any]:
    """Arguments of `ax.init` that name the other process; none of a pipeline, which mpirun starts."""
    if job.world == 1 or axes.get("pipe", 1) > 1:
        return {}
    return {"coordinator": f"127.0.0.1:{job.port}", "num_processes": job.world, "process_id": job.rank}


def microbatches(job: Job, axes: dict[str, int]) -> int:
    """Parts of the batch on a device: the size of a part is the same on all grids."""
    sharing = axes.get("data", 1) * axes.get("z", 1)
    return max(1, job.workload.microbatches * job.rows // job.workload.rows // sharing)


def build(job: Job, *, axes: dict[str, int], memory: dict[str, Any] | None = None) -> Runner:
    """A step on a grid."""
    import jax

    trainer = train(job, axes, memory or {})
    if "pipe" not in axes:
        check_weights(job, trainer.engine.params)

    def step(batch: Any) -> float:
        loss = float(trainer.step(batch[trainer.rows(len(batch))])["loss"])
        jax.block_until_ready(list(trainer.engine.params.values()))
        return loss

    def state() -> int:
        leaves = jax.tree.leaves([store.model for store in trainer.engine.stores.values()])
        return sum(shard.data.nbytes for array in leaves for shard in array.addressable_shards)

    return Runner(step, lambda rows: trainer.evaluate([rows[trainer.rows(len(rows))]]), state)


def check_weights(job: Job, params: Any) -> None:
    """Compare with the file, or write it where there is none."""
    import numpy as np

    path = job.data.weights()
    if not path.exists():
        np.savez(path, **{name: np.asarray(value) for name, value in params.items()})
        return
    kept = np.load(path)
    for name, value in params.items():
        for shard in value.addressable_shards:
            if not np.array_equal(np.asarray(shard.data), kept[name][shard.index]):
                raise RuntimeError(f"{name} is not as in {path.name}")


def _made(name: str, axes: dict[str, int], peers: tuple[str, ...], where: tuple[str, ...], **memory: Any) -> Contestant:
    made = partial(build, axes=axes, memory=memory)
    return Contestant(
        name, "axonn_jax", made, "docs/train.md", where, (train,), ranks=2 if axes else 1, mpi="pipe" in axes,
        peers=peers, serial="ours-serial" if axes else "",
    )  # fmt: skip


CONTESTANTS = (
    _made("ours-serial", {}, ("torch-serial", "jax-serial"), LANGUAGE),
    _made("ours-data", {"data": 2}, ("torch-ddp", "jax-data"), LANGUAGE),
    _made("ours-zero", {"data": 2}, ("torch-zero", "jax-data"), LANGUAGE, zero=1),
    _made("ours-z", {"z": 2}, ("torch-fsdp2", "torch-ddp", "jax-fsdp"), LANGUAGE),
    _made("ours-y", {"y": 2}, ("torch-tp", "jax-tensor"), LANGUAGE),
    _made("ours-x", {"x": 2}, ("torch-tp", "jax-tensor"), LANGUAGE),
    _made("ours-pipe", {"pipe": 2}, ("torch-pp-1f1b", "torch-pp-interleaved", "torch-pp-zbv"), LANGUAGE),
    _made("ours-pipe-offload", {"pipe": 2}, ("torch-pp-1f1b",), LANGUAGE, offload="optimizer"),
)  # fmt: skip
