"""Offloaded state on disk: the same training, and a whole update there whenever the process dies."""

import os
import signal
import subprocess
import sys
import textwrap
import time

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.memory.store import DiskStore, read_disk
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.trainer import Trainer


def test_it_trains_as_in_host_memory(tmp_path):
    def losses(**options):
        grid = grids.lay(GridShape(data=2, x=2))
        make = lambda: Transformer(grids.GPT, rngs=nnx.Rngs(0))  # noqa: E731
        options |= {"zero": 1, "offload": "optimizer", "bucket": 3000, "precision": "bf16"}
        trainer = Trainer(make, optax.adamw(1e-2), grid, **options)
        batch = np.random.default_rng(0).integers(0, 64, (8, 17))
        found = [float(trainer.step(batch)["loss"]) for _ in range(3)]
        return found, {name: np.asarray(value) for name, value in trainer.params.items()}

    mine, weights = losses(offload_to=tmp_path)
    theirs, expected = losses()
    assert mine == theirs
    for name, value in expected.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    updates, files = read_disk(tmp_path / "place_000" / "process_00000")
    assert updates == 3
    # Masters and two moments of every parameter, float32, over all devices.
    sizes = sum(data.size for data in files.values())
    assert sizes >= 3 * 4 * sum(value.size for value in expected.values())


def test_a_directory_that_cannot_be_written_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"memory.offload_to = .*a directory that can be written"):
        DiskStore(tmp_path / "file", NamedSharding(grids.lay(GridShape()).mesh, P("data")))


# Every number of an update is the update's own: a mixture of two would show.
WRITER = """
import sys
from pathlib import Path
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
from axonn_jax.grid import GridShape, build_grid
from axonn_jax.memory.store import DiskStore
sharding = NamedSharding(build_grid(GridShape(), jax.devices()).mesh, P("data"))
store = DiskStore(Path(sys.argv[1]), sharding)
update = 0
while True:
    for number in range(4):
        store.put(number, {"mu": jnp.full(200_000, update, jnp.float32), "nu": jnp.full(200_000, -update, jnp.float32)})
    store.commit(4)
    update += 1
    if update == 2:
        print("ready", flush=True)
"""


@pytest.mark.parametrize("kills", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_a_kill_in_the_middle_of_an_update_leaves_the_one_before(tmp_path, kills):
    rng = np.random.default_rng(0)
    process = None
    for kill in range(kills):
        if process is None or kill % 4 == 0:  # a fresh directory now and then; starting jax is most of the time
            directory = tmp_path / str(kill)
        env = os.environ | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", textwrap.dedent(WRITER), str(directory)]
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0, 0.2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        update, files = read_disk(directory)
        assert update >= 1
        assert len(files) == 8
        for name, data in files.items():
            value = update if "mu" in name else -update
            assert set(np.unique(data.view(np.float32))) == {np.float32(value)}, name


def test_an_altered_file_is_named(tmp_path):
    sharding = NamedSharding(grids.lay(GridShape()).mesh, P("data"))
    store = DiskStore(tmp_path, sharding)
    store.put(0, {"mu": jax.numpy.ones(10)})
    store.commit(1)
    (path,) = tmp_path.glob("bucket_*")
    path.write_bytes(path.read_bytes()[:-1] + b"x")
    with pytest.raises(ValueError, match=r"bucket_00000\.mu\.0 is not as it was written"):
        read_disk(tmp_path)
