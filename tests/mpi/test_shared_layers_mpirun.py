"""Layers that several stages of a pipeline use, one process a stage: gradients are those of one stage."""

import sys
from pathlib import Path

import numpy as np
import pytest
from launched import UNDER_MPIRUN, mpirun, succeeded
from shared_layers import CASES, check, gradients

pytestmark = UNDER_MPIRUN
QUICK = "both ways"


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case == QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_gradients_of_a_shared_layer_are_those_of_one_stage(case, tmp_path):
    uses, options = CASES[case]
    pipe = options["pipe"]
    words = (options.get("virtual_stages", 1), options["split"], options.get("policy", "message"))
    worker = (sys.executable, Path(__file__).with_name("shared_worker.py"), tmp_path, pipe, ",".join(map(str, uses)))
    succeeded(mpirun(pipe, *worker, *words))
    found = [dict(np.load(path)) for path in sorted(tmp_path.glob("*.npz"))]
    assert len(found) == pipe
    norms = {float(place.pop("norm")) for place in found}
    assert len(norms) == 1
    check((found, norms.pop()), gradients(uses))
