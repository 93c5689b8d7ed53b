"""Pretrained directories under mpirun: a process reads the bytes of its shards."""

import sys
from pathlib import Path

import pretrained
import pytest
from launched import UNDER_MPIRUN, mpirun, succeeded

pytestmark = UNDER_MPIRUN
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
