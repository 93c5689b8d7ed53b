"""Groups of equal layers in a stage: which there are, and that compiling a stage does not take longer with depth."""

import dataclasses
from itertools import pairwise

import grids
import jax.numpy as jnp
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.distributed.gossip import Awaited
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.declared.segments import transformer_segments
from axonn_jax.core.tensor.params import shapes_of, split_module
from axonn_jax.pipe.schedule.partition import group_count, group_ranges, group_size
from axonn_jax.pipe.schedule.tasks import Message, PipelineShape
from axonn_jax.pipe.stages.build import plan
from axonn_jax.pipe.stages.executor import awaited
from axonn_jax.pipe.stages.trace import StepShape

GPT = dataclasses.replace(grids.GPT, dropout=0.1)


def planned(blocks, *, virtual_stages=1, base=GPT):
    """A pipeline of two ranks of a model whose stages have so many blocks; ends are stages' ends."""
    stages = 2 * virtual_stages
    shape = dataclasses.replace(base, layers=blocks * stages)
    model = nnx.eval_shape(lambda: ax.models.Transformer(shape, rngs=nnx.Rngs(0)))
    parts = shapes_of(split_module(model), jnp.dtype("float32"))
    cuts = [0, *(1 + 2 * blocks * stage for stage in range(1, stages)), 2 + 2 * blocks * stages]
    ranges = [range(first, last) for first, last in pairwise(cuts)]
    work = StepShape(2, shape.seq_len + 1, 4, jnp.dtype("float32"), "none", jnp.dtype("float32"))
    grid = grids.lay(GridShape(pipe=2))
    stages = plan(parts, grid, PipelineShape(2, 4, virtual_stages), ranges, work, keyed=shape.dropout > 0)
    return stages, parts, ranges


def compiled(stage):
    """Segments that are compiled for a stage: those of its different stretches."""
    return sum(len(stretch.segments) for stretch in {id(group.stretch): group.stretch for group in stage}.values())


def test_sixteen_blocks_compile_like_four():
    few, _, _ = planned(4)
    many, _, _ = planned(16)
    for stage in (0, 1):
        assert compiled(many[stage]) <= compiled(few[stage])
        assert len(many[stage]) > len(few[stage]) == 1


def test_virtual_stages_of_a_rank_share_programs():
    stages, _, _ = planned(2, virtual_stages=4)
    inner = [stages[place].pop() for place in (2, 4, 6)]  # of rank 0, without its first
    assert len({id(group.stretch) for group in inner}) == 1
    assert [group.layer_offset for group in inner] == [0, 4, 8]


@pytest.mark.parametrize("blocks", [6, 10])
def test_layers_of_one_program_see_the_same_tokens(blocks):
    """Of windows in every other layer, groups of three layers would run a window in the place of none."""
    shape = dataclasses.replace(grids.LLAMA, window=4, window_period=2)
    stages, _, _ = planned(blocks, base=shape)
    for group in (group for stage in stages for group in stage):
        for layer in {(number - 1) // 2 for number in group.stretch.segments}:
            assert shape.attention_rule(layer) == shape.attention_rule(layer + group.layer_offset)


@pytest.mark.parametrize("blocks", [1, 4, 5, 6, 7, 9, 11, 16])
def test_every_stage_runs_on_all_its_parameters_once(blocks):
    stages, parts, ranges = planned(blocks)
    segments = transformer_segments(dataclasses.replace(grids.GPT, layers=2 * blocks))
    for stage, whole in zip(stages, ranges, strict=True):
        names = [name for group in stage for name in group.names]
        assert len(names) == len(set(names))
        prefixes = {segments[i].layer for i in whole if segments[i].layer}
        expected = {n for n in parts.params if any(n.startswith(f"{prefix}.") for prefix in prefixes)}
        assert {name for name in names if name.startswith("blocks.")} == expected
        for group in stage:
            for name, own in zip(group.stretch.names, group.names, strict=True):
                assert (parts.params[name].shape, parts.specs[name]) == (parts.params[own].shape, parts.specs[own])
                assert name.split(".")[2:] == own.split(".")[2:]


@pytest.mark.parametrize(
    ("kinds", "sizes"),
    [
        ("e" + "am" * 4 + "h", [10]),
        ("e" + "am" * 16 + "h", [1, 8, 8, 8, 8, 1]),
        ("am" * 6, [6, 6]),
        ("m" + "am" * 7, [6, 6, 2, 1]),
        ("l" * 10, [3, 3, 3, 1]),
        ("abcdefgh", [8]),
        ("l" * 8 + "e" + "k" * 6, [4, 4, 1, 3, 3]),
    ],
)
def test_groups_of_a_stage(kinds, sizes):
    found = group_ranges(["" if kind in "eh" else kind for kind in kinds], range(len(kinds)))
    assert [len(group) for group in found] == sizes
    assert [i for group in found for i in group] == list(range(len(kinds)))


@pytest.mark.parametrize("halves", range(2, 40))
def test_counts_are_those_of_the_groups(halves):
    groups = group_ranges(list("am" * 20), range(halves))
    assert group_count(halves / 2) == len(groups)
    assert max(map(len, groups)) == (halves if halves < 10 else 2 * group_size(halves // 2))


@pytest.mark.parametrize(
    ("message", "name", "pp_rank"),
    [
        (Message("forward", 3, 5), "the activations of microbatch 5 from stage 2", 0),
        (Message("backward", 2, 1), "the gradient of microbatch 1 from stage 3", 1),
    ],
)
def test_a_heartbeat_names_the_message_that_a_rank_waits_for(message, name, pp_rank):
    assert awaited(message, PipelineShape(2, 8, 2)) == Awaited(name, pp_rank)
