"""A small state on a grid of two, the saver that writes it, and small disks to write it on."""

import subprocess
from contextlib import contextmanager

import grids
import jax
import jax.numpy as jnp
import pytest
from jax import NamedSharding, P

from axonn_jax.core.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.core.checkpoint.restore import validated
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import LocalSync
from axonn_jax.core.grid import GridShape

GRID = GridShape(1, 1, 1, 1, 2)


def state(step=0):
    grid = grids.lay(GRID)
    kernel = jnp.arange(4096, dtype=jnp.float32).reshape(64, 64) + step
    return {
        "params.kernel": jax.device_put(kernel, NamedSharding(grid.mesh, P("x"))),
        "params.bias": jax.device_put(jnp.ones(8) * step, NamedSharding(grid.mesh, P())),
        "optimizer.0.count": jax.device_put(jnp.int32(step), NamedSharding(grid.mesh, P())),
    }


@contextmanager
def saver(folder, said=None, **options):
    made = Saver(folder, grids.lay(GRID), LocalSync(), warn=(said if said is not None else []).append, **options)
    yield made
    made.close()


def check_files(path):
    """The manifest of a checkpoint of which every file is as it was written."""
    return validated(path, LocalSync())


def faults(path):
    """What is wrong with a checkpoint, nothing if it is valid."""
    try:
        check_files(path)
    except CorruptCheckpoint as fault:
        return str(fault)
    return ""


def names(folder):
    return sorted(path.name for path in folder.iterdir())


@contextmanager
def disk_of(size, path):
    """A file system of its own; skips where none can be mounted."""
    path.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], capture_output=True)
    if done.returncode:
        pytest.skip("no file system can be mounted here")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)
