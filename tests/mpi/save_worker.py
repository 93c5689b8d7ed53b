"""Two ranks save an array that is split over both; each writes down the files it reads to describe the checkpoint."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import axonn_jax as ax
from axonn_jax.checkpoint import manifest
from axonn_jax.checkpoint.save import Saver
from axonn_jax.distributed.host_sync import host_sync

folder = Path(sys.argv[1])
grid = ax.init(x=2)
read, checksum = [], manifest.checksum


def recording(file, *rest):
    read.append([file.name, Path(file.name).stat().st_size])
    return checksum(file, *rest)


manifest.checksum = recording
values = np.arange(60_000, dtype=np.float32)
split = NamedSharding(grid.mesh, PartitionSpec("x"))
saver = Saver(folder / "checkpoints", grid, host_sync(grid))
saver.save(1, {"params.w": jax.make_array_from_callback(values.shape, split, lambda index: values[index])}, {})
assert saver.settle() == ""
saver.close()
(folder / str(grid.rank)).write_text(json.dumps(read))
