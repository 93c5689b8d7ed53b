"""A script for `mpirun`: saves of which some fail in the second process while it copies; prints what each said."""

import json
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax._src import distributed
from jax.sharding import NamedSharding, PartitionSpec

import axonn_jax as ax
from axonn_jax.core import compat
from axonn_jax.core.checkpoint import orbax
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import host_sync

grid = ax.init(x=2)
client, early = distributed.global_state.client, compat.FailingBarrier()
while grid.rank == 0 and not client.key_value_dir_get("axonn_jax/barrier/"):
    time.sleep(0.02)  # the first process begins its first save last: the other waits for it already
early.begin(0)
early(key="early", timeout_ms=10_000)

copy, failing = orbax.snapshot, (2, 4)
split = NamedSharding(grid.mesh, PartitionSpec("x"))
values = np.arange(64, dtype=np.float32)
saver = Saver(Path(sys.argv[1]), grid, host_sync(grid))
said, keys = [], []
for step in range(1, 7):

    def snapshot(state, step=step):
        if grid.rank == 1 and step in failing:
            raise OSError(28, "No space left on device")
        return copy(state)

    orbax.snapshot = snapshot
    saver.save(step, {"params.w": jax.make_array_from_callback(values.shape, split, lambda index: values[index])}, {})
    said.append(saver.settle())
    keys.append(len(client.key_value_dir_get("axonn_jax/")))
saver.close()
print(json.dumps({"rank": grid.rank, "said": said, "keys": keys[-2:]}), flush=True)
