"""The recipe of docs/launch.md: each process loads its own rows, by Grain and by torch."""

import json
import subprocess
import sys
from importlib.util import find_spec

import numpy as np
import pytest
from launched import MPIRUN, ROOT, UNDER_MPIRUN, environment

SCRIPT = """
import json, sys
import optax
from flax import nnx
import axonn_jax as ax

RECIPE

grid = ax.init(data=2)
model, loss = nnx.Linear(4, 3, rngs=nnx.Rngs(0)), lambda model, x: (model(x) ** 2).mean()
trainer = ax.Trainer(model, optax.adam(0.1), grid, loss=loss, microbatches=2)
dataset = np.random.default_rng(0).normal(size=(30, 4)).astype(np.float32)
loader = {"grain": grain_loader, "torch": torch_loader}[sys.argv[1]](dataset, numbers_of(trainer, dataset, 8, epoch=1))
losses = [float(trainer.step(rows)["loss"]) for rows in loader]
if grid.rank == 0:
    print("FOUND", json.dumps(losses), flush=True)
trainer.close()
"""


def recipe() -> str:
    """The code of the page."""
    page = (ROOT / "docs/launch.md").read_text()
    return page.split("## Data by process")[1].split("```python\n")[1].split("```")[0]


@pytest.mark.parametrize(
    "kind",
    ["grain", pytest.param("torch", marks=pytest.mark.skipif(find_spec("torch") is None, reason="needs torch"))],
)
@UNDER_MPIRUN[0]
@UNDER_MPIRUN[1]
def test_two_processes_load_their_rows_of_what_one_loads(kind):
    words, found = [sys.executable, "-c", SCRIPT.replace("RECIPE", recipe()), kind], []
    for launcher in ([], [MPIRUN, "--oversubscribe", "--bind-to", "none", "-n", "2"]):
        ran = subprocess.run(
            [*launcher, *words], capture_output=True, text=True, timeout=180, env=environment(), check=False
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        found.append(json.loads(ran.stdout.split("FOUND ")[1].splitlines()[0]))
    assert len(found[0]) == 3
    np.testing.assert_allclose(*found, rtol=1e-6)
