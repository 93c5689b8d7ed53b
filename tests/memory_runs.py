"""A small model trained under options of precision, offload and ZeRO-1."""

import numpy as np
import optax
import pytest
from trainers import ids, make_trainer

from axonn_jax.core.engines.optimizer import decayed
from axonn_jax.models import ModelShape

SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, seq_len=16,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=True,
)  # fmt: skip
STEPS = 4
BUCKET = 1000  # parameters are cut in the middle, and several share a bucket
ADAMW = optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
WAYS = {
    "zero": {"zero": 1},
    "offload": {"offload": "optimizer", "bucket": BUCKET},
    "both": {"zero": 1, "offload": "optimizer", "bucket": BUCKET},
    "both in the compute precision": {"zero": 1, "offload": "optimizer", "bucket": BUCKET, "accumulate": "compute"},
}


slow = pytest.mark.slow


def batches(count=STEPS):
    return ids(SHAPE.vocab, count, 16, SHAPE.seq_len + 1).astype(np.int32)


def made(grid, optimizer=ADAMW, **options):
    return make_trainer(SHAPE, optimizer, grid, microbatches=4, **{"clip": 0.5} | options)
