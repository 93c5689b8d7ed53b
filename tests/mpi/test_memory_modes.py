"""Offload, ZeRO and fp16 in runs of several processes: the curve of one process without them."""

import numpy as np
import pytest
from launched import CONFIG, UNDER_MPIRUN, command, curves, finished

pytestmark = UNDER_MPIRUN

OFFLOAD = {"memory_offload": "optimizer", "memory_bucket": 3000, "tensor_scan_layers": "no"}
FP16 = {"memory_precision": "fp16"}
CASES = {
    "n2 data 2, offload": (2, {"grid_data": 2, **OFFLOAD}),
    "n2 data 2, offload and ZeRO, fp16": (2, {"grid_data": 2, "memory_zero": 1, **OFFLOAD, **FP16}),
    "n4 pipe 2 x 2, offload": (4, {"grid_pipe": 2, "grid_x": 2, **OFFLOAD}),
    "n4 pipe 2 data 2, ZeRO, fp16": (4, {"grid_pipe": 2, "grid_data": 2, "memory_zero": 1, **FP16}),
    "n4 pipe 2 data 2, all": (4, {"grid_pipe": 2, "grid_data": 2, "memory_zero": 1, **OFFLOAD, **FP16}),
}
SLOW = ("n2 data 2, offload and ZeRO, fp16", "n4 pipe 2 data 2, ZeRO, fp16", "n4 pipe 2 data 2, all")
# Of fp32 the order of sums, as between grids of one process; of fp16 roundings (5e-4) of gradients.
TOLERANCE = {"fp32": 2e-6, "fp16": 3e-3}


@pytest.fixture(scope="module")
def one_process(prepared, tmp_path_factory):
    folder = tmp_path_factory.mktemp("one")
    config = folder / "c.toml"
    config.write_text(CONFIG.format(data=prepared, layers=2))
    done = finished(command(config, folder / "run", train_steps=10))
    assert done.returncode == 0, done.stderr[-3000:]
    return config, curves(folder / "run")[0]


@pytest.mark.parametrize("case", [pytest.param(c, marks=[pytest.mark.slow] if c in SLOW else []) for c in CASES])
def test_mpirun_gives_the_one_process_curve(case, one_process, tmp_path, monkeypatch):
    monkeypatch.setenv("JAX_LOG_COMPILES", "1")
    config, want = one_process
    ranks, options = CASES[case]
    done = finished(command(config, tmp_path / "run", ranks, train_steps=10, **options))
    assert done.returncode == 0, done.stderr[-3000:]
    found = curves(tmp_path / "run")[0]
    np.testing.assert_allclose(found, want, rtol=TOLERANCE[options.get("memory_precision", "fp32")])
    assert "Compiling jit(" in done.stderr
    assert "device_put" not in done.stderr  # a move between host and devices is no program among the others
