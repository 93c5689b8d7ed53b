"""Dispatch with a capacity: with room for all it is the gathers', with less a rule drops tokens, and it sends less."""

import re
from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from axonn_jax import Generator, GridShape, MoeConfig, PipelineConfig, Trainer
from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.experts import capacity
from axonn_jax.core.experts.capacity import by_capacity, slots_of
from axonn_jax.core.experts.router import Routing
from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import split_module
from axonn_jax.core.tensor.specs import shard_mapped

ROOM = MoeConfig(dispatch="capacity", capacity=2.0)  # of 4 experts a token takes 2: for every token of a device


@pytest.mark.parametrize(
    ("axes", "layout", "options"),
    [
        (GridShape(), {}, {}),
        (GridShape(1, 1, 1, 2, 2, expert=2), {}, {}),
        (GridShape(1, 1, 1, 2, 2, expert=2), {"comm": BlockComm(sequence_split=True)}, {"activations": "full"}),
        (GridShape(1, 2, 1, 2, 2), {}, {"activations": "save_collectives"}),
        (GridShape(1, 1, 2, 1, expert=4), {}, {}),
    ],
)
def test_with_room_for_all_it_computes_the_plain_model(axes, layout, options):
    got = grids.gradients(grids.MIXTRAL, axes, layout={"moe": ROOM, **layout}, **options)
    grids.check_gradients(got, grids.reference("mixtral"))


def plain(x, choices, weights, experts, slots):
    """Each expert e multiplies by e + 1; it takes first choices, then second ones, in the order of the tokens."""
    taken, y = [0] * experts, np.zeros_like(x)
    for which in range(choices.shape[1]):
        for token, expert in enumerate(choices[:, which]):
            if taken[expert] < slots:
                y[token] += weights[token, which] * (expert + 1) * x[token]
            taken[expert] += 1
    return y


def test_tokens_without_a_slot_are_dropped_by_the_rule():
    rng = np.random.default_rng(0)
    x, weights = rng.normal(size=(32, 8)).astype(np.float32), rng.uniform(size=(32, 2)).astype(np.float32)
    choices = np.stack([np.minimum(rng.poisson(0.7, 32), 2), np.full(32, 3)], 1).astype(np.int32)
    slots = slots_of(32, 2, 4, 0.9)
    assert slots == 15  # of 14.4
    scales = jnp.arange(1.0, 5.0)[:, None, None]
    y = by_capacity(x, Routing(choices, weights, weights), lambda s: s * scales, 4, 0.9, sequence_split=False)
    want = plain(x, choices, weights, 4, slots)
    np.testing.assert_allclose(y, want, rtol=1e-6, atol=1e-6)
    assert (np.abs(want).sum(1) == 0).any()  # some token found no slot at all


def sent(y):
    """Bytes of the all-to-alls of one device in a compiled forward pass, expert 2."""
    grid, tokens, hidden = grids.lay(GridShape(1, 1, 1, y, expert=2)), 64, 16

    def local(x, choices, weights):
        routing = Routing(choices, weights, weights)
        return by_capacity(x, routing, lambda s: s, 4, 1.0, sequence_split=False)

    split = P(BATCH_AXES)
    region = shard_mapped(local, grid.mesh, (split, split, split), split)
    shapes = [jax.ShapeDtypeStruct((2 * tokens, size), dtype) for size, dtype in ((hidden, "f4"), (2, "i4"), (2, "f4"))]
    text = jax.jit(region).lower(*shapes).compile().as_text()
    found = re.findall(r"= \(?f32\[([\d,]+)\][^=]* all-to-all\(", text)
    assert found
    return sum(4 * int(np.prod(list(map(int, dims.split(","))))) for dims in found)


def test_dropping_duplicates_divides_what_is_exchanged(monkeypatch):
    assert sent(1) == 2 * sent(2) == 4 * sent(4)
    monkeypatch.setattr(capacity, "drops_duplicates", lambda sequence_split: False)
    assert sent(2) == sent(1)


def communicated(layers, activations):
    """All-to-alls, and all-reduces of whole activations over `y`, that a step is written with."""
    axes, shape = GridShape(1, 1, 1, 2, expert=2), replace(grids.MIXTRAL, layers=layers)
    grid = grids.lay(axes)
    parts = split_module(grids.model_on(shape, grid, moe=MoeConfig(dispatch="capacity")))
    program = StageProgram(parts, grid, memory=MemoryConfig(activations=activations))
    tokens = jax.ShapeDtypeStruct((1, 8, shape.seq_len + 1), jnp.int32, sharding=program.batch_sharding())
    text = jax.jit(program.gradients).lower(parts.params, tokens, None).as_text()
    reduced = re.findall(r"stablehlo\.all_reduce.*?-> tensor<([\dx]+)xf32>", text, re.S)
    large = [dims for dims in reduced if dims.count("x") == 2 and dims.endswith(f"x{shape.hidden}")]
    return np.array([text.count("stablehlo.all_to_all"), len(large)])


def test_kept_communication_is_a_third_less(monkeypatch):
    """TED, section on communication-aware checkpointing: six of each kind a layer under recomputation, four with it."""
    monkeypatch.setattr(capacity, "drops_duplicates", lambda sequence_split: False)
    for activations, each in (("full", 6), ("save_collectives", 4)):
        one_layer = communicated(2, activations) - communicated(1, activations)
        np.testing.assert_array_equal(one_layer, [each, each], activations)


@pytest.mark.parametrize("axes", [GridShape(expert=2, y=2), GridShape(pipe=2)], ids=grids.name)
def test_evaluation_drops_no_token(axes):
    """Nor does its loss depend on later tokens; rows of 13 tokens, which `y` does not divide."""
    tokens = np.random.default_rng(0).integers(0, grids.MIXTRAL.vocab, (8, 14))
    losses = []
    for moe in (MoeConfig(), MoeConfig(dispatch="capacity", capacity=0.3)):
        model = Transformer(grids.MIXTRAL, rngs=nnx.Rngs(0), moe=moe)
        pipeline = PipelineConfig(policy="1f1b")
        trainer = Trainer(model, optax.sgd(1e-30), grids.lay(axes), microbatches=2, pipeline=pipeline)
        trained = float(trainer.step(tokens)["loss"])
        losses.append(trainer.evaluate([tokens]))
        assert (trained == pytest.approx(losses[-1], rel=1e-6)) != moe.drops
        trainer.close()
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_generation_drops_no_token():
    model = Transformer(grids.MIXTRAL, rngs=nnx.Rngs(0), moe=MoeConfig(dispatch="capacity", capacity=0.3))
    texts = [list(range(1, 12)), list(range(20, 30))]
    made = Generator(model, grids.lay(GridShape(expert=2, y=2)), slots=2)
    (alone,) = Generator(Transformer(grids.MIXTRAL, rngs=nnx.Rngs(0)), grids.lay(GridShape())).score(texts[:1])
    np.testing.assert_allclose(made.score(texts)[0], alone, atol=1e-4)


def test_slots_are_bounded_by_tokens():
    assert slots_of(4, 2, 2, 8.0) == 4
