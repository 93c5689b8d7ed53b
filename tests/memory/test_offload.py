"""Offloaded state: bytes on the host in every situation, programs that buckets share, copies that stay equal."""

import dataclasses
import functools
import gc

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx

from axonn_jax.grid import GridShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.trainer import Trainer

SHAPE = dataclasses.replace(grids.LLAMA, layers=4, hidden=64, ffn=128, vocab=256, seq_len=16, tied=True)
BUCKET = 4000  # elements: fewer than any matrix has, so that all of them are cut


def made(grid, *, shape=SHAPE, optimizer=None, **options):
    model = functools.partial(Transformer, shape)
    options = {"precision": "bf16", "offload": "optimizer", "bucket": BUCKET} | options
    optimizer = optimizer or optax.adamw(1e-3)
    return Trainer(lambda: model(rngs=nnx.Rngs(0)), optimizer, grids.lay(grid), microbatches=2, clip=1.0, **options)


def batch(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).integers(0, shape.vocab, (4, shape.seq_len + 1)).astype(np.int32)


def updates(trainer):
    return [h._update for h in trainer.holdings.values()] if hasattr(trainer, "holdings") else [trainer._update]


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


@pytest.mark.parametrize("pipe", [1, 2])
def test_the_host_has_one_copy_of_the_state_whatever_happens(pipe, monkeypatch, tmp_path):
    count = HostBytes(monkeypatch)
    trainer = made(GridShape(pipe=pipe))
    held = sum(int(np.prod(shape)) for place in updates(trainer) for shape in place._shapes.values())
    trainer.step(batch())
    found = {
        "at rest": count.during(lambda: None),
        "in a step": count.during(lambda: trainer.step(batch())),
        "state_shapes": count.during(trainer.state_shapes),
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
