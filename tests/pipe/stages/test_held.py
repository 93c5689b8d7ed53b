"""Bytes that microbatches in flight keep between tasks: live arrays of real steps beside what a pipeline states."""

import jax
import live
import numpy as np
import optax
import pipeline_memory as bounds
import pytest
from trainers import make_trainer

from axonn_jax import GridShape, PipelineConfig
from axonn_jax.models import ModelShape
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape

MICROBATCHES, ROWS = 8, 16
TIGHT, CHUNKED = 0.9, 0.75
"""What is reached of a bound at least; under `message` with several virtual stages a slow place is not the worst."""


def made(pipe, policy, chunks, activations, layers, in_flight):
    shape = ModelShape(layers=layers, hidden=32, heads=2, kv_heads=2, ffn=128, vocab=64, seq_len=32)
    pipeline = PipelineConfig(policy=policy, virtual_stages=chunks, in_flight=in_flight)
    options = {"microbatches": MICROBATCHES, "activations": activations, "precision": "fp32", "pipeline": pipeline}
    return make_trainer(shape, optax.sgd(1e-3), GridShape(pipe=pipe), **options)


def case(*given, slow=True):
    return pytest.param(*given, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(
    ("pipe", "policy", "chunks", "activations", "layers"),
    [
        case(3, "zero-bubble", 1, "none", 3, slow=False),
        case(2, "message", 1, "none", 2, slow=False),
        case(2, "message", 1, "none", 8),
        case(2, "message", 2, "none", 8),
        case(2, "1f1b", 1, "none", 8),
        case(4, "message", 1, "none", 8),
        case(4, "zero-bubble", 1, "none", 8),
        case(4, "1f1b", 1, "none", 8),
        case(2, "zero-bubble", 2, "none", 8),
        case(2, "interleaved", 2, "none", 8),
        case(2, "message", 1, "full", 8),
        case(2, "zero-bubble", 1, "full", 8),
        case(2, "zero-bubble", 2, "full", 8),
    ],
)
def test_live_arrays_at_task_starts_are_what_the_pipeline_states(pipe, policy, chunks, activations, layers):
    """Never more, whichever place is slow; and nearly as much where a place keeps more than messages.

    With `-s` it prints the bytes: stated, the most of a step, the most of steps in which each place in turn is slow.
    """
    in_flight = pipe if policy == "message" and chunks == 1 else 0
    trainer = made(pipe, policy, chunks, activations, layers, in_flight)
    batch = np.random.default_rng(0).integers(0, 64, (ROWS, 33)).astype(np.int32)
    parts, rows = trainer.engine._prepare(batch)
    peaks = live.Peaks(trainer, parts, jax.live_arrays())
    trainer.step(batch)
    usual = dict(peaks.most)
    for slow in parts.ranks:
        live.run_with_a_slow_place(trainer, parts, rows, slow)
    trainer.close()
    for place, rank in parts.ranks.items():
        stated = bounds.most_between_tasks(rank, trainer.engine.job.shape, trainer.engine.job.policy)
        row = (pipe, chunks, policy, activations, layers, place, stated, usual[place], peaks.most[place])
        print("", *row, "", sep=" | ")
        assert peaks.most[place] <= stated, place
        if any(max(bounds.held_pair(stage)) > 2**16 for stage in rank.stages.values()):
            assert peaks.most[place] >= (CHUNKED if policy == "message" and chunks > 1 else TIGHT) * stated, place


@pytest.mark.parametrize("policy", ["message", "gpipe", "1f1b", "interleaved", "zero-bubble"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
def test_equal_stages_hold_as_many_pairs_as_the_bounds_say(policy, chunks):
    if policy == "1f1b" and chunks > 1:
        return
    for microbatches in (1, 3, 8, 12):
        layout = PipelineShape(4, microbatches, chunks)
        for rank in range(4):
            rule = policy_of(policy)
            live_pairs, late = rule.live(layout, rank), rule.waiting(layout, rank)
            assert late == 0 or policy in ("message", "zero-bubble")
            most = bounds.most_held(rule, layout, rank, [bounds.Pair(1.0, 1.5)] * chunks)
            assert most <= live_pairs + 0.5 * late
            if chunks == 1 or policy == "message":
                assert most == live_pairs + 0.5 * late
            assert bounds.most_held(rule, layout, rank, [bounds.Pair(0.0, 1.0)] * chunks) <= late


def test_chunks_that_keep_more_are_alive_in_fewer_microbatches():
    """Five activations on two chunks are at most three of the first and two of the second."""
    layout = PipelineShape(2, 8, 2)
    message = policy_of("message")
    assert message.live(layout, 0) == 5
    assert bounds.most_held(message, layout, 0, [bounds.Pair(1.0, 1.0), bounds.Pair(10.0, 16.0)]) == 3 * 1 + 2 * 16
    assert bounds.most_held(message, layout, 0, [bounds.Pair(9.0, 9.0), bounds.Pair(1.0, 1.0)]) == 5 * 9
    assert (
        bounds.most_held(message, PipelineShape(2, 3, 2), 0, [bounds.Pair(9.0, 9.0), bounds.Pair(1.0, 1.0)])
        == 3 * 9 + 2 * 1
    )
    assert bounds.most_held(policy_of("gpipe"), layout, 0, [bounds.Pair(1.0, 0.0), bounds.Pair(10.0, 0.0)]) == 8 * 11
