"""`grid.shard_batch` on two processes: whole batches, and the rows of each."""

import json
import subprocess
import sys

import numpy as np
import pytest
from launched import MPIRUN, UNDER_MPIRUN, environment

import axonn_jax as ax

SCRIPT = """
import json
import numpy as np
import axonn_jax as ax

grid = ax.init(data=2)
whole = np.arange(8.0, dtype=np.float32)
rows = whole[4 * grid.rank : 4 * grid.rank + 4]
found = {}
for name, batch, local in (("whole", whole, False), ("rows", {"x": rows}, True), ("unlike", rows, False)):
    try:
        placed = grid.shard_batch(batch, local=local)
        placed = placed["x"] if isinstance(placed, dict) else placed
        found[name] = [placed.shape[0], placed.addressable_shards[0].data.tolist()]
    except ax.core.errors.UserError as error:
        found[name] = str(error)
print("FOUND", json.dumps([grid.rank, found]), flush=True)
"""


@UNDER_MPIRUN[0]
@UNDER_MPIRUN[1]
def test_a_process_passes_its_rows_or_the_same_batch_as_all():
    script = SCRIPT.replace("import axonn_jax as ax\n", "import axonn_jax as ax\nimport axonn_jax.core.errors\n", 1)
    words = [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", "2", sys.executable, "-c", script]
    ran = subprocess.run(words, capture_output=True, text=True, timeout=120, env=environment(), check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    found = dict(json.loads(line.split("FOUND ")[1]) for line in ran.stdout.splitlines() if "FOUND" in line)
    for rank, rows in enumerate(([0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0])):
        assert found[rank]["whole"] == found[rank]["rows"] == [8, rows]
        assert "local=True for the rows of each" in found[rank]["unlike"]


@pytest.mark.parametrize("rows", [8, 4])
def test_one_process_has_all_rows(rows):
    grid = ax.init(data=2, z=2)
    batch = {"x": np.arange(float(rows), dtype=np.float32), "scale": np.float32(2)}
    got, want = grid.shard_batch(batch, local=True), grid.shard_batch(batch)
    for name, value in want.items():
        np.testing.assert_array_equal(got[name], value)
        assert got[name].sharding == value.sharding
