"""This package on a model of plain Flax: `parallelize` and `Trainer(loss=)`."""

from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner
from surveying.workloads import BETAS, CLIP, DECAY, rate


def train(job: Job, axes: dict[str, int], memory: dict[str, Any]) -> Any:
    """Make the trainer: the code that a user writes."""
    import jax.numpy as jnp
    import optax
    from survey_contestants.ours import joined
    from surveying import plain_models as models

    import axonn_jax as ax

    grid = ax.init(**axes, **joined(job, axes))
    example = jnp.zeros((job.rows, 32, 32, 1))
    model = ax.parallelize(models.model_of(job), grid, call=lambda model: model(example))
    optimizer = optax.adamw(lambda step: rate(step, jnp), *BETAS, weight_decay=DECAY)
    memory_config = ax.MemoryConfig(precision="fp32", **memory)
    return ax.Trainer(model, optimizer, grid, loss=models.loss_of, clip=CLIP, memory=memory_config)


def build(job: Job, *, axes: dict[str, int], memory: dict[str, Any]) -> Runner:
    """A step on a grid."""
    import jax

    trainer = train(job, axes, memory)

    def mine(batch: Any) -> Any:
        rows = trainer.rows(len(batch["label"]))
        return {name: array[rows] for name, array in batch.items()}

    def step(batch: Any) -> float:
        loss = float(trainer.step(mine(batch))["loss"])
        jax.block_until_ready(list(trainer.engine.params.values()))
        return loss

    def state() -> int:
        leaves = jax.tree.leaves([store.model for store in trainer.engine.stores.values()])
        return sum(shard.data.nbytes for array in leaves for shard in array.addressable_shards)

    return Runner(step, lambda batch: trainer.evaluate([mine(batch)]), state)


def _made(name: str, axes: dict[str, int], peers: tuple[str, ...], **memory: Any) -> Contestant:
    return Contestant(
        name, "axonn_jax", partial(build, axes=axes, memory=memory), "examples/cnn.py", ("V1",), (train,),
        ranks=2 if axes else 1, peers=peers, serial="flax-serial" if axes else "",
    )  # fmt: skip


CONTESTANTS = (
    _made("flax-serial", {}, ("torch-serial", "jax-serial")),
    _made("flax-data", {"data": 2}, ("torch-ddp", "jax-data")),
    _made("flax-zero", {"data": 2}, ("torch-zero", "jax-data"), zero=1),
    _made("flax-z", {"z": 2}, ("torch-fsdp2", "torch-ddp", "jax-fsdp")),
    _made("flax-x", {"x": 2}, ("jax-data",)),
)
