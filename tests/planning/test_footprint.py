"""Memory of choices: what ranks of a pipeline keep, what is gathered, reduced and updated."""

from dataclasses import replace

import pytest

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.planning.block_memory import block_activations
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.memory_model import MemoryModel
from axonn_jax.planning.request import Candidate, PlanRequest

A100 = load_machine("perlmutter")
JOB = PlanRequest(preset("gpt-5b"), A100, 256, "bf16")


def test_a_pipeline_computes_a_group_of_layers_again_as_a_whole():
    """The backward program has all of a group's activations at once; a microbatch in flight keeps groups' inputs alone.

    Six and a half blocks of a stage are groups of three, three and a half behind the embedding; half of them are one.
    """
    shape, tokens = JOB.shape, 2 * JOB.shape.seq_len
    whole = block_activations(shape, 1, 1, 2, "none")
    footprint = MemoryModel(replace(JOB, batch=128))
    assert footprint.ranks.loads(4)[0].blocks == 6.5
    for stages, blocks, inputs in (
        (1, 3, 6 * 3),
        (2, 3.25, 11),
    ):  # (stage, microbatch) pairs alive at once, groups each
        one = footprint.memory(Candidate(GridShape(pipe=4), 64, "full", stages))
        again = blocks * whole.saved + whole.working
        assert one.activations == pytest.approx(tokens * (again + inputs * whole.entry))


def test_a_pipeline_keeps_what_no_elementwise_operation_gives():
    """Of a block two inputs of norms, QKV (3), attention's result and the MLP's width (4); not what GELU gives."""
    shape, tokens = JOB.shape, 2 * JOB.shape.seq_len
    footprint = MemoryModel(replace(JOB, batch=128, policy="1f1b"))
    one = footprint.memory(Candidate(GridShape(pipe=4), 64))
    block, blocks = block_activations(shape, 1, 1, 2, "none"), footprint.ranks.loads(4)[0].blocks
    kept = 4 * blocks * (10 * 2 * shape.hidden + 4 * shape.heads)
    assert one.activations == pytest.approx(tokens * (kept + 6 * 2 * shape.hidden + block.working))


@pytest.mark.parametrize(("policy", "waits"), [("message", None), ("zero-bubble", 2), ("1f1b", 0)])
def test_a_weight_gradient_that_waits_keeps_both_operands_of_its_products(policy, waits):
    """Of a block at the second of eight places 16 streams for 10, beside what 1F1B keeps; at the first nothing more."""
    shape, tokens = JOB.shape, 2 * JOB.shape.seq_len
    choice, footprint = Candidate(GridShape(pipe=8), 64), MemoryModel(replace(JOB, batch=128, policy=policy))
    block = block_activations(shape, 1, 1, 2, "none")
    assert block.waiting == 16 * 2 * shape.hidden
    first, second = footprint.ranks.loads(8)[:2]
    before, live = (policy_of(policy).live(PipelineShape(8, 64), place) for place in (0, 1))
    late = live if waits is None else waits
    one = second.blocks * (10 * 2 * shape.hidden + 4 * shape.heads)
    kept = live * one + late * (second.blocks * block.waiting - one)
    working = block.working + 6 * 2 * shape.hidden + (second.blocks * block.released if late else 0)
    assert footprint._memory(choice, second).activations == pytest.approx(tokens * (kept + working))
    whole = before * first.blocks * (10 * 2 * shape.hidden + 4 * shape.heads) + 6 * 2 * shape.hidden + block.working
    assert footprint._memory(choice, first).activations == pytest.approx(tokens * whole)


def test_a_pipelines_gradients_take_the_place_of_their_sums_unless_scattered():
    job = replace(JOB, batch=16, shape=replace(JOB.shape, seq_len=64), bucket=1)  # of activations next to nothing
    held = max(load.params for load in MemoryModel(job).ranks.loads(4))
    for zero, beside in ((0, 0.0), (1, 4 * held / 2)):
        one = MemoryModel(job).memory(Candidate(GridShape(pipe=4, data=2), 8, "full", zero=zero))
        assert one.gradients == pytest.approx(4 * held)
        assert one.activations + one.gathered + one.buffers == pytest.approx(max(one.activations, beside), rel=1e-6)


def test_where_a_pipeline_computes_again_its_backwards_are_whole():
    none, full = (Candidate(GridShape(pipe=4), 16, activations) for activations in ("none", "full"))
    assert JOB.schedule(none).splits
    assert not JOB.schedule(full).splits
    assert replace(JOB, policy="zero-bubble").schedule(full).splits
    assert not replace(JOB, split=False).schedule(none).splits
    for in_flight, bounds in ((4, [4, 1]), (0, [6, 3])):
        choices = [Candidate(GridShape(pipe=4), 16, policy, in_flight=in_flight) for policy in ("none", "full")]
        assert [MemoryModel(JOB).live(choice, 3) for choice in choices] == bounds


def test_memory_is_the_same_whatever_grid_was_asked_for_before():
    """Grids that divide data * z differently share what microbatches keep, unless `z` decides how features split."""
    shape = replace(JOB.shape, ffn=4 * JOB.shape.hidden + 4)
    job = replace(JOB, shape=shape, batch=64, residual_comm="auto")
    choices = [
        Candidate(GridShape(pipe, data, z, 1, 4), 2, "full") for pipe in (1, 2) for data, z in ((4, 1), (2, 2), (1, 4))
    ]
    assert len({job.comm(one.grid, "full") for one in choices}) > 1
    shared = MemoryModel(job)
    assert [shared.memory(one) for one in choices] == [MemoryModel(job).memory(one) for one in choices]
