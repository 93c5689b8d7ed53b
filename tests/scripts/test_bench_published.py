"""scripts/bench/published: machine files hold what it calibrates, and its verdicts stay what the results page says."""

import importlib.util
import sys
from importlib.machinery import SourceFileLoader
from pathlib import Path

import pytest

from axonn_jax.planner.machine import load_machine

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench" / "published"


@pytest.fixture(scope="module")
def published():
    loader = SourceFileLoader("bench_published", str(SCRIPT))
    spec = importlib.util.spec_from_loader(loader.name, loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[loader.name] = module
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        loader.exec_module(module)
        yield module
    finally:
        sys.dont_write_bytecode = writes
        del sys.modules[loader.name]


def test_machine_files_hold_the_calibrated_shares(published):
    for name, share in published.calibrate().items():
        assert load_machine(name).matmul.sustained == pytest.approx(share, abs=0.001)


def test_what_calibrates_is_not_judged(published):
    listed = {(row.model, row.devices, row.published) for row in published.others()}
    for first in (published.A100_ROWS[0], published.H100_ROWS[0]):
        assert (f"mpt-{first[0]}", first[1], first[5]) not in listed


def test_other_systems_are_predicted(published):
    found = published.others()
    assert published.median_error(found) < 0.05
    assert max(abs(row.error) for row in found) < 0.17


def test_the_headline_comparisons_have_their_direction_and_size(published):
    megatron, overlap = published.headlines().values()
    assert megatron == pytest.approx(1.26, rel=0.1)
    assert overlap == pytest.approx(1.53, rel=0.1)


def test_axonn_on_summit(published):
    found = [row for row in published.rows() if row.machine == "summit"]
    assert len(found) == 4
    assert all(abs(row.error) < 0.07 for row in found)
