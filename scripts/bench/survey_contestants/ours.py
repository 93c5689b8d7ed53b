"""This package: its own transformer, and a model of plain Flax, in one process and on grids of two."""

from functools import partial
from pathlib import Path
from typing import Any

from surveying.contestant import Contestant, Job, Runner
from surveying.workloads import BETAS, DECAY

ALL = ("L1", "L2", "V1", "M1")
LANGUAGE = ("L1", "L2", "M1")


def train(job: Job, axes: dict[str, int], microbatches: int, memory: Any, pipeline: Any, *, plain: bool) -> Any:
    """Make the trainer of a model, this package's or somebody's Flax model: the code that a user writes."""
    import jax.numpy as jnp
    import optax

    import axonn_jax as ax

    grid = ax.init(**axes, **joined(job, axes))
    model, loss = model_of(job, grid, plain=plain)
    return ax.Trainer(
        model,
        optax.adamw(lambda step: job.workload.rate(step, jnp), *BETAS, weight_decay=DECAY),
        grid,
        loss=loss,
        microbatches=microbatches,
        clip=job.workload.clip,
        memory=ax.MemoryConfig(precision="fp32", **memory),
        pipeline=ax.PipelineConfig(**pipeline),
    )


def model_of(job: Job, grid: Any, *, plain: bool) -> tuple[Any, Any]:
    """A transformer and its own loss; or a model of plain Flax and one, which in a pipeline the trainer splits."""
    import jax.numpy as jnp
    from flax import nnx
    from surveying import plain_models as models

    import axonn_jax as ax

    if plain:
        return models.model_of(job), models.loss_of
    if job.workload.is_language:
        shape = job.workload.shape()
        return lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(job.data.seed), **balance(job)), None
    example = jnp.zeros((job.rows, 32, 32, 1))
    return ax.parallelize(models.model_of(job), grid, call=lambda model: model(example)), models.loss_of


def joined(job: Job, axes: dict[str, int]) -> dict[str, Any]:
    """Arguments of `ax.init` that name the other process; none of a pipeline, which mpirun starts."""
    if job.world == 1 or axes.get("pipe", 1) > 1:
        return {}
    return {"coordinator": f"127.0.0.1:{job.port}", "num_processes": job.world, "process_id": job.rank}


def balance(job: Job) -> dict[str, Any]:
    """No loss that evens out experts' loads: not all contestants have the same one."""
    from axonn_jax.core.experts.shape import MoeConfig

    return {"moe": MoeConfig(balance_weight=0.0)} if job.workload.sizes.get("experts") else {}


def build(
    job: Job,
    *,
    axes: dict[str, int],
    memory: dict[str, Any],
    microbatches: int = 0,
    pipeline: dict[str, Any] = {},  # noqa: B006
    straggler: float = 0.0,
    timeline: str = "",
    plain: bool = False,
) -> Runner:
    """A step on a grid, in microbatches as large as all contestants' or in so many.

    `straggler` are mean seconds that the last rank sleeps before a task, `timeline` is a folder for the last steps',
    `plain` takes the language model of plain Flax in place of this package's.
    """
    import jax

    alike = job.microbatches(axes.get("data", 1) * axes.get("z", 1) * axes.get("expert", 1))
    trainer = train(job, axes, microbatches or alike, memory, pipeline, plain=plain)
    if straggler:
        from surveying.slow import slow_down

        slow_down(trainer, job, straggler)
    if job.workload.is_language and "pipe" not in axes:
        check_weights(job, trainer.engine.params)

    def mine(batch: Any) -> Any:
        return jax.tree.map(lambda array: array[trainer.rows(len(array))], batch)

    def step(batch: Any) -> float:
        loss = float(trainer.step(mine(batch))["loss"])
        jax.block_until_ready(list(trainer.engine.params.values()))
        return loss

    def state() -> int:
        leaves = jax.tree.leaves([store.model for store in trainer.engine.stores.values()])
        return sum(shard.data.nbytes for array in leaves for shard in array.addressable_shards)

    def finish() -> None:
        if timeline:
            trainer.engine.write_timeline(Path(timeline))

    return Runner(step, lambda batch: trainer.evaluate([mine(batch)]), state, finish)


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


def planned(job: Job) -> Runner:
    """A step as `axonn-jax plan` picks it."""
    return build(job, **job.choice)


def _made(
    heat: str, name: str, axes: dict[str, int], peers: tuple[str, ...], where: tuple[str, ...], **memory: Any
) -> Contestant:
    split = any(axis in axes for axis in "zyx")
    weights, moments = (1 / 2 if split else 1.0, 1 / 2 if split or "zero" in memory else 1.0)
    return Contestant(
        name, "axonn_jax", partial(build, axes=axes, memory=memory), "docs/train.md, examples/cnn.py", where, (train,),
        ranks=2 if axes else 1, mpi="pipe" in axes, heat=heat, peers=peers, serial="ours-serial" if axes else "",
        weights=None if "pipe" in axes else weights, moments=moments,
    )  # fmt: skip


CONTESTANTS = (
    _made("serial", "ours-serial", {}, ("torch-serial", "jax-serial"), ALL),
    _made("data", "ours-data", {"data": 2}, ("torch-ddp", "jax-data", "deepspeed-0"), ALL),
    _made("data", "ours-zero", {"data": 2}, ("torch-zero", "jax-data", "deepspeed-1", "deepspeed-2"), ALL, zero=1),
    _made("shard", "ours-z", {"z": 2}, ("torch-fsdp2", "torch-ddp", "jax-fsdp", "deepspeed-3"), ALL),
    _made("tensor", "ours-y", {"y": 2}, ("torch-tp", "jax-tensor"), LANGUAGE),
    _made("tensor", "ours-x", {"x": 2}, ("torch-tp", "jax-tensor"), ALL),
    _made("pipe", "ours-pipe", {"pipe": 2}, ("torch-pp-1f1b", "torch-pp-interleaved", "torch-pp-zbv"), ("L1",)),
    _made("pipe", "ours-pipe-offload", {"pipe": 2}, ("torch-pp-1f1b",), ("L1",), offload="optimizer"),
    Contestant(
        "ours-best", "axonn_jax", planned, "docs/plan.md", ("L1",), (train,), mpi=True, serial="ours-serial",
        heat="plan", peers=("ours-data", "ours-zero", "ours-z", "ours-pipe"), asks_planner=True,
    ),
)  # fmt: skip
