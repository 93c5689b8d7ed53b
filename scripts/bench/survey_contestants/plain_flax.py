"""Plain Flax with automatic partitioning: an NNX model, NamedSharding on parameters, `jax.jit`."""

from functools import partial
from typing import Any

from surveying.contestant import Contestant, Job, Runner

JAX_DOCS = "https://docs.jax.dev/en/latest/notebooks/Distributed_arrays_and_automatic_parallelization.html"
FLAX_DOCS = "https://flax.readthedocs.io/en/stable/guides/flax_gspmd.html"


def build(job: Job, *, layout: str) -> Runner:
    """A jitted step over a mesh of the processes' devices."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from flax import nnx
    from jax.sharding import NamedSharding
    from jax.sharding import PartitionSpec as P
    from surveying import plain_models as models
    from surveying.workloads import BETAS, CLIP, DECAY

    if job.world > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"127.0.0.1:{job.port}", job.world, job.rank)
    mesh = jax.sharding.Mesh(np.array(jax.devices()), ("d",))
    graph, values = nnx.split(models.model_of(job))
    specs = models.layouts(values, layout)

    def placed(value: Any, spec: Any) -> Any:
        whole = np.asarray(value)
        return jax.make_array_from_callback(whole.shape, NamedSharding(mesh, spec), lambda index: whole[index])

    params = jax.tree.map(placed, values, specs)
    optimizer = optax.chain(
        optax.clip_by_global_norm(CLIP),
        optax.adamw(lambda step: job.workload.rate(step, jnp), *BETAS, weight_decay=DECAY),
    )
    first = jax.eval_shape(optimizer.init, params)
    kept = optax.tree_map_params(optimizer, lambda _, spec: spec, first, specs, transform_non_params=lambda _: P())
    named = partial(jax.tree.map, lambda spec: NamedSharding(mesh, spec), is_leaf=lambda leaf: isinstance(leaf, P))
    state = jax.jit(optimizer.init, out_shardings=named(kept))(params)
    rows = P(None, "d") if layout != "tensor" else P()

    def loss_of(params: Any, batch: Any) -> Any:
        return models.loss_of(nnx.merge(graph, params), batch)

    @partial(jax.jit, donate_argnums=(0, 1), out_shardings=(named(specs), named(kept), None))
    def update(params: Any, state: Any, batch: Any) -> Any:
        def add(sums: Any, rows: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(params, rows)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, params))
        count = jax.tree.leaves(batch)[0].shape[0]
        if count == 1:  # without a loop, in which XLA's CPU backend has slow convolutions
            sums, _ = add(zeros, jax.tree.map(lambda a: a[0], batch))
        else:
            sums, _ = jax.lax.scan(add, zeros, batch)
        loss, grads = jax.tree.map(lambda sum_: sum_ / count, sums)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    sharing = job.world if layout != "tensor" else 1
    count = job.microbatches(sharing)

    def parts(batch: Any, count: int) -> Any:
        return jax.tree.map(lambda a: placed(a.reshape(count, -1, *a.shape[1:]), rows), batch)

    def step(batch: Any) -> float:
        nonlocal params, state
        params, state, loss = update(params, state, parts(batch, count))
        jax.block_until_ready(params)
        return float(loss)

    evaluated = jax.jit(lambda params, batch: loss_of(params, jax.tree.map(lambda a: a[0], batch)))

    def held() -> int:
        return sum(one.data.nbytes for a in jax.tree.leaves((params, state)) for one in a.addressable_shards)

    return Runner(step, lambda batch: float(evaluated(params, parts(batch, 1))), held)


def _made(name: str, layout: str, where: tuple[str, ...], ranks: int = 2) -> Contestant:
    follows = FLAX_DOCS if layout == "tensor" else JAX_DOCS
    return Contestant(
        name,
        "jax",
        partial(build, layout=layout),
        follows,
        where,
        (build,),
        ranks,
        serial="jax-serial" if ranks > 1 else "",
        weights=1.0 if layout == "data" else 1 / 2,
        moments=1.0 if layout == "data" else 1 / 2,
    )


CONTESTANTS = (
    _made("jax-serial", "data", ("L1", "V1"), ranks=1),
    _made("jax-data", "data", ("L1", "V1")),
    _made("jax-fsdp", "fsdp", ("L1", "V1")),
    _made("jax-tensor", "tensor", ("L1",)),
)
