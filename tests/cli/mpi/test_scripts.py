"""Scripts that use the package as a library, in several processes: they compute what one process does."""

import json
import sys
from pathlib import Path

import loss_worker
import numpy as np
import pretrained
import pytest
import shapes_worker
from launched import UNDER_MPIRUN, mpirun, objects, succeeded
from shared_layers import CASES, check, gradients

import axonn_jax as ax

pytestmark = UNDER_MPIRUN


def test_two_processes_train_a_module_as_one_does(tmp_path):
    (got,) = objects(succeeded(mpirun(2, sys.executable, loss_worker.__file__, tmp_path / "two")).stdout)
    grid = ax.init()
    want = loss_worker.curve([grid] * 3, tmp_path / "one")
    np.testing.assert_allclose(got, want, rtol=3e-6)


SIZES = [8, 16, 8, 4, 16]  # three, of which the worker keeps two


# Each of four processes compiles the programs of four pipes.
@pytest.mark.parametrize("channel", ["mpi4py", pytest.param("mpi4jax", marks=pytest.mark.slow)])
def test_many_batch_shapes_train_as_in_one_process(channel):
    words = [sys.executable, shapes_worker.__file__, json.dumps(SIZES), "pipe=2,x=2", channel]
    (got,), want = objects(succeeded(mpirun(4, *words)).stdout), shapes_worker.losses(SIZES, ax.init(pipe=1))
    assert len(got) == len(SIZES)
    for here, there in zip(got, want, strict=True):
        assert here == pytest.approx(there, rel=3e-6)


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


WORKER = [sys.executable, str(Path(__file__).with_name("pretrained_worker.py"))]
QWEN = pretrained.CONFIGS["qwen3"] | {"num_attention_heads": 4, "vocab_size": 515}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return pretrained.write_model(tmp_path_factory.mktemp("mpi") / "hf", QWEN, pretrained.weights(QWEN), files=3)


def of_each(words):
    """The share of the bytes that each process read, and the loss of its step."""
    lines = [line.split()[1:] for line in succeeded(words).stdout.splitlines() if line.startswith("process")]
    return [float(share) for share, _ in lines], [float(loss) for _, loss in lines]


@pytest.mark.slow
def test_each_process_reads_its_shards_and_all_compute_the_same(model):
    _, (want,) = of_each([*WORKER, str(model), "pipe=1"])
    for axes, most in (("z=2,y=2", 0.3), ("pipe=2,y=2", 0.5)):  # both stages have the tied table
        shares, losses = of_each(mpirun(4, *WORKER, model, axes))
        assert len(shares) == 4
        assert max(shares) <= most
        assert losses == pytest.approx([want] * 4, rel=3e-6)
