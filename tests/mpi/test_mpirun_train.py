"""`mpirun -n N axonn-jax train` gives the one-process loss curve."""

import json
import platform
import subprocess
import sys

import numpy as np
import pytest
from launched import MPIRUN, UNDER_MPIRUN, environment

pytestmark = UNDER_MPIRUN

CONFIG = """
[model]
layers = 2
hidden = 64
heads = 4
seq_len = 64

[data]
path = "{data}"

[train]
steps = 10
global_batch = 8
microbatches = {microbatches}
lr = 3e-3
warmup = 2
eval_every = 5
eval_batches = 2
"""


def train(folder, prepared, *, ranks=1, microbatches=1, **axes):
    config = folder / f"run{ranks}.toml"
    config.write_text(CONFIG.format(data=prepared, microbatches=microbatches))
    run = folder / f"{ranks}-{'-'.join(f'{k}{v}' for k, v in axes.items())}"
    flags = [word for axis, size in axes.items() for word in (f"--grid.{axis}", str(size))]
    command = [sys.executable, "-m", "axonn_jax.cli.main", "train", str(config), "--log.dir", str(run), *flags]
    if ranks > 1:
        command = [MPIRUN, "--oversubscribe", "-n", str(ranks), *command]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    curve = [r["loss"] for r in records if "loss" in r]
    held_out = [r["eval_loss"] for r in records if "eval_loss" in r]
    return curve, held_out, done.stderr, run


@pytest.fixture(scope="module")
def one_process(prepared, tmp_path_factory):
    return train(tmp_path_factory.mktemp("one"), prepared)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_the_heap_is_one_arena(tmp_path):
    # In an arena that MPI's threads bring, large blocks would be mapped and unmapped each time.
    script = tmp_path / "arenas.py"
    script.write_text(
        "import ctypes, os, re, sys\n"
        "import jax.numpy as jnp\n"
        "import axonn_jax\n"
        "axonn_jax.init(pipe=2)\n"
        "(jnp.ones((512, 512)) @ jnp.ones((512, 512))).block_until_ready()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.fopen.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]\n"
        "path = sys.argv[1] + os.environ['OMPI_COMM_WORLD_RANK']\n"
        "file = libc.fopen(path.encode(), b'w')\n"
        "libc.malloc_info(0, file)\n"
        "libc.fclose(file)\n"
    )
    command = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, str(script), str(tmp_path / "arenas-")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert (tmp_path / f"arenas-{rank}").read_text().count("<heap nr=") == 1


# The same arithmetic as across virtual devices: see CURVE_TOLERANCE in tests/train/test_trainer.py.
TOLERANCE = 2e-6


@pytest.mark.parametrize(
    ("ranks", "axes"),
    [(2, {"data": 2}), (2, {"x": 2}), (4, {"z": 2, "x": 2}), (4, {"data": 2, "y": 2})],
    ids=["n2-data2", "n2-x2", "n4-z2x2", "n4-data2y2"],
)
def test_mpirun_gives_the_one_process_curve(ranks, axes, prepared, one_process, tmp_path):
    curve, held_out, err, run = train(tmp_path, prepared, ranks=ranks, microbatches=2, **axes)
    np.testing.assert_allclose(curve, one_process[0], rtol=TOLERANCE)
    np.testing.assert_allclose(held_out, one_process[1], rtol=TOLERANCE)
    assert len(curve) == 10
    assert curve[-1] < curve[0] - 0.5
    assert f"{ranks} processes on 1 host(s), by MPI" in err
    assert err.count("step 10/10") == 1  # only rank 0 speaks
    assert {path.name for path in run.iterdir()} >= {"config.toml", "metrics.jsonl", "loss.png", "checkpoints"}


def test_a_grid_that_does_not_fit_the_ranks_is_one_line_and_status_2(prepared, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(data=prepared, microbatches=1))
    command = [MPIRUN, "--oversubscribe", "-n", "2", sys.executable, "-m", "axonn_jax.cli.main", "train", str(config)]
    done = subprocess.run(
        [*command, "--grid.x", "4", "--log.dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        env=environment(),
        timeout=200,
    )
    assert done.returncode == 2
    ours = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert len(ours) == 1, done.stderr
    assert "grid" in ours[0]
    assert "2 cpu device(s) in 2 process(es)" in ours[0]
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "run").exists()
