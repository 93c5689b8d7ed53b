"""scripts/bench/pipeline_memory: what it counts of a pipeline's programs is there."""

import pytest
from pipeline_memory import measure_pipeline as measure

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import describe_single_device
from axonn_jax.core.ops.costs import parameters

SHAPE = ModelShape(layers=2, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=128, seq_len=32)


@pytest.mark.slow
def test_a_pipelines_bytes_are_state_sums_and_what_its_programs_need():
    """Two places, one with the table and positions and one with the tied table again."""
    halves = parameters(describe_single_device(SHAPE)[1])
    first, last = (halves + SHAPE.hidden * size for size in (SHAPE.vocab + SHAPE.seq_len, SHAPE.vocab + 2))
    state, beside = measure(SHAPE, GridShape(pipe=2), 4, 1, "full")
    assert state in (12 * first, 12 * last)
    assert beside >= 4 * state / 12  # the sums of gradients, in whose place the reduced ones come
    assert measure(SHAPE, GridShape(pipe=2), 4, 1, "none")[1] >= beside
