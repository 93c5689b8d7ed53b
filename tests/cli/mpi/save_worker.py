"""Two ranks save an array that is split over both; each writes down the files it reads to describe the checkpoint.

Then another saver saves it again, for which the second rank writes late.
"""

import asyncio
import json
import sys
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

import axonn_jax as ax
from axonn_jax.core.checkpoint import manifest, orbax
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import host_sync

folder = Path(sys.argv[1])
grid = ax.init(x=2)
read, checksum = [], manifest.checksum


def recording(file, *rest):
    read.append([file.name, Path(file.name).stat().st_size])
    return checksum(file, *rest)


manifest.checksum = recording
values = np.arange(60_000, dtype=np.float32)
split = NamedSharding(grid.mesh, PartitionSpec("x"))


def save(step):
    saver = Saver(folder / "checkpoints", grid, host_sync(grid))
    saver.save(step, {"params.w": jax.make_array_from_callback(values.shape, split, lambda index: values[index])}, {})
    assert saver.settle() == ""
    saver.close()


class Late(orbax._Arrays):
    async def serialize(self, *arguments):
        await asyncio.sleep(2)
        return await super().serialize(*arguments)


save(1)
(folder / str(grid.rank)).write_text(json.dumps(read))
if grid.rank == 1:
    orbax._Arrays = Late
save(2)
