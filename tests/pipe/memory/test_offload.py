"""Offloaded state: bytes on the host, programs that buckets share; `axonn_jax.offload` in a script of one's own."""

import dataclasses
import functools
import gc

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from trainers import ids, make_trainer, same

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.memory.offload import OffloadedOptimizer
from axonn_jax.core.memory.optimizer_state import DeviceOptimizer
from axonn_jax.core.memory.precision import precisions

SHAPE = dataclasses.replace(grids.LLAMA, layers=2, hidden=64, ffn=128, vocab=256, seq_len=16, tied=True)
SMALL = dataclasses.replace(grids.GPT, layers=2)  # its table is tied
BUCKET = 4000  # elements: fewer than any matrix has, so that all of them are cut


def made(grid, *, shape=SHAPE, optimizer=None, **options):
    options = {"precision": "bf16", "offload": "optimizer", "bucket": BUCKET} | options
    return make_trainer(shape, optimizer or optax.adamw(1e-3), grid, microbatches=2, clip=1.0, **options)


def batch(shape=SHAPE, seed=0):
    return ids(shape.vocab, 4, shape.seq_len + 1, seed=seed).astype(np.int32)


def updates(trainer):
    return [store.placement for store in trainer.engine.stores.values()]


def lines(update):
    """What is told of an update."""
    return [f"the update, bucket {number + 1} of {len(update.buckets)}" for number in range(len(update.buckets))]


class HostBytes:
    """Bytes in host memory of arrays that were not there before, each memory once: now, and the most that was seen."""

    def __init__(self, monkeypatch):
        gc.collect()
        self._before = jax.live_arrays()  # held, so that no later array has the id of one of these
        self._ids = {id(array) for array in self._before}
        self.most = 0
        for name in ("device_put", "make_array_from_single_device_arrays"):  # each move between host and device
            monkeypatch.setattr(jax, name, functools.partial(self._see, getattr(jax, name)))

    def now(self):
        arrays = [a for a in jax.live_arrays() if id(a) not in self._ids and a.sharding.memory_kind == "pinned_host"]
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())

    def during(self, act):
        gc.collect()
        self.most = self.now()
        act()
        return self.most

    def _see(self, make, *args, **options):
        result = make(*args, **options)
        self.most = max(self.most, self.now())
        return result


@pytest.mark.slow
@pytest.mark.parametrize("pipe", [1, 2])
def test_the_host_has_one_copy_of_the_state_whatever_happens(pipe, monkeypatch, tmp_path):
    count = HostBytes(monkeypatch)
    trainer = made(GridShape(pipe=pipe))
    held = sum(int(np.prod(shape)) for place in updates(trainer) for shape in place._shapes.values())
    trainer.step(batch())
    found = {
        "at rest": count.during(lambda: None),
        "in a step": count.during(lambda: trainer.step(batch())),
        "state_shapes": count.during(trainer.engine.state_shapes),
        "saving": count.during(lambda: trainer.save(tmp_path, 2)),
        "loading": count.during(lambda: trainer.load(tmp_path / "step_00000002")),
        "at rest again": count.during(lambda: trainer.step(batch()) and None),
    }
    each = {what: size / held for what, size in found.items()}
    buckets = 3 * 12 * BUCKET / held
    assert 12.0 <= each["at rest"] <= 12.1
    assert each["in a step"] <= 12.5 + buckets
    assert each["state_shapes"] <= 12.1
    assert each["saving"] <= 13 + buckets
    assert each["loading"] <= 13 + buckets
    trainer.close()


def programs(layers):
    """Compiled for the update of a model of so many layers, and what was told of it."""
    own = {"up": (64, 96), "down": (96, 64), "bias": (96,)}
    shapes = {f"{layer}.{name}": shape for layer in range(layers) for name, shape in own.items()} | {"table": (256, 64)}
    mesh, told = grids.lay(GridShape()).mesh, []
    layouts = {name: P() for name in shapes}
    update = OffloadedOptimizer(
        DeviceOptimizer(optax.adamw(1e-3), mesh, shapes, layouts, layouts, precisions("bf16"), bucket=7000)
    )
    update._progress = told.append
    model = update.start({name: jnp.ones(shape) for name, shape in shapes.items()})
    told.clear()
    update.apply_update(
        model, {name: jnp.ones(shape) for name, shape in shapes.items()}, np.float32(1), np.float32(0), np.bool_(True)
    )
    return len(update.programs.compiled), told, lines(update)


def test_layers_share_the_programs_of_their_update():
    few, many = programs(4), programs(12)
    assert few[0] == many[0] == 10  # first state and update of up, down, bias, and the table's two cuts
    assert few[1] == few[2]
    assert many[1] == many[2]
    assert len(few[1]) + 16 == len(many[1])  # an up and a down of each layer more


def test_parameters_that_an_optimizer_treats_apart_share_no_program():
    decayed = optax.adamw(1e-2, weight_decay=0.5, mask=lambda tree: {name: "attention" in name for name in tree})
    ways = {"bucket": 16_000_000}, {"offload": "none"}
    trainers = [made(GridShape(), shape=SMALL, optimizer=decayed, precision="fp32", **how) for how in ways]
    for trainer in trainers:
        trainer.step(batch(SMALL))
    same(trainers[0].engine.params, trainers[1].engine.params, atol=1e-6)


WAYS = {
    "fp32": {"offload": "none", "precision": "fp32"},
    "bf16": {"offload": "none"},
    "fp16": {"offload": "none", "precision": "fp16"},
    "zero": {"offload": "none", "precision": "fp32", "zero": 1},
    "offload": {"precision": "fp32", "bucket": 16_000_000},
    "offload, cut": {"precision": "fp32", "bucket": 1000},
    "offload bf16": {"accumulate": "compute"},
    "offload fp16": {"precision": "fp16"},
    "offload zero": {"zero": 1, "bucket": 1000},
}


@functools.cache
def trained(way):
    """A tied pipeline after 60 steps."""
    replicas = 1 + WAYS[way].get("zero", 0)
    trainer = made(GridShape(pipe=2, data=replicas), shape=SMALL, optimizer=optax.adamw(3e-3), **WAYS[way])
    for step in range(60):
        trainer.step(np.concatenate([batch(SMALL, step)] * replicas))
    return trainer


@pytest.mark.parametrize(
    "way", [pytest.param(way, marks=() if way == "offload, cut" else pytest.mark.slow) for way in WAYS]
)
def test_a_table_at_both_ends_stays_one(way):
    trainer = trained(way)
    tables = [place.weights["embedding.table"] for place in trainer.engine.stores.values()]
    assert np.asarray(tables[0]).tobytes() == np.asarray(tables[1]).tobytes()
    first, last = trainer.engine._states.by_rank().values()
    for name, value in first.items():
        if "embedding" in name:
            both = [np.asarray(materialize(v)).tobytes() for v in (value, last[name])]
            assert both[0] == both[1], name


def test_the_status_of_a_pipeline_moves_with_every_bucket():
    trainer, moved = trained("offload, cut"), []
    status = trainer.engine._links.status
    now = status.now
    status.now = lambda *args, **kw: (moved.append(kw.get("running", "")), now(*args, **kw))
    trainer.step(batch(SMALL))
    told = [what for what in moved if what.startswith("the update, bucket")]
    assert told == [line for place in updates(trainer) for line in lines(place)]


def tree():
    mesh = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("a", "b"))
    keys = jax.random.split(jax.random.key(0), 3)
    return {
        "dense": [
            jax.device_put(jax.random.normal(keys[0], (8, 6)), NamedSharding(mesh, P("a", "b"))),
            jax.device_put(jax.random.normal(keys[1], (6,)), NamedSharding(mesh, P("b"))),
        ],
        "head": jax.device_put(jax.random.normal(keys[2], (6, 4)), NamedSharding(mesh, P(None, "a"))),
    }


def by_dims(params):
    return jax.tree.map(lambda p: p.ndim >= 2, params)


ADAMW = optax.adamw(1e-2, weight_decay=0.1, mask=by_dims)


@pytest.mark.parametrize(("plain", "bucket"), [(ADAMW, 1), (ADAMW, 30), (ADAMW, 1000), (optax.lamb(1e-2), 30)])
def test_it_gives_optax_updates_and_keeps_moments_on_the_host(plain, bucket):
    params, mine = tree(), tree()
    wrapped = ax.offload(plain, bucket=bucket)
    state, here = plain.init(params), wrapped.init(mine)
    for step in range(3):
        grads = jax.tree.map(lambda p, step=step: jnp.sin(p + step), params)
        with jax.numpy_dtype_promotion("standard"):
            want, state = jax.jit(plain.update)(grads, state, params)
        got, here = wrapped.update(grads, here, mine)
        params, mine = optax.apply_updates(params, want), optax.apply_updates(mine, got)
    for (path, a), b in zip(jax.tree.leaves_with_path(mine), jax.tree.leaves(params), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, err_msg=str(path))  # a few roundings
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    moments = [leaf for leaf in jax.tree.leaves(here) if leaf.ndim]
    assert {leaf.sharding.memory_kind for leaf in moments} == {"pinned_host"}
    assert sum(leaf.size for leaf in moments) == 2 * sum(leaf.size for leaf in jax.tree.leaves(params))


def test_what_it_cannot_do_is_said():
    with pytest.raises(ax.UserError, match="clip_by_global_norm"):
        ax.offload(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    wrapped = ax.offload(optax.sgd(0.1, momentum=0.9))
    state = wrapped.init(tree())
    for call in (
        wrapped.init,
        lambda params: ax.offload(optax.sgd(0.1)).init(params),
        lambda _: wrapped.init(tree()),
        lambda _: wrapped.update(tree(), state, tree()),
        lambda params: wrapped.update(params, state, params),
    ):
        with pytest.raises(ax.UserError, match=r"inside jax.jit.*outside of it"):
            jax.jit(call)(tree())
    other = {"other": jnp.ones(3)}
    for says, call in {
        "state of other parameters": lambda: wrapped.update(other, state, other),
        "params of other parameters": lambda: wrapped.update(tree(), state, other),
        "optimizer = 'function': an optax transformation": lambda: ax.offload(optax.adam),
        "bucket = 0: an integer of at least 1": lambda: ax.offload(optax.sgd(0.1), bucket=0),
        r"params\['a'\] = 'ndarray': an array of jax": lambda: wrapped.init({"a": np.ones(3)}),
    }.items():
        with pytest.raises(ax.UserError, match=says):
            call()
