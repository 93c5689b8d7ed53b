"""What the compiled decode of several tokens does: the cache stays in place, and little travels."""

import grids
import numpy as np
import pytest
from hlo.collectives import collectives
from hlo.program import arrays, parse
from tiny import LLAMA, model

import axonn_jax as ax
from axonn_jax import GridShape, Sampling
from axonn_jax.text.inference.slots import state
from axonn_jax.text.loki.attention import LokiAttention

pytestmark = pytest.mark.bits

WIDTH = 64
SIZES = {**LLAMA, "layers": 3, "head_dim": WIDTH, "vocab": 4096, "seq_len": 4096}
STEPS, SLOTS = 8, 2
GREEDY = Sampling(temperature=0)
DRAWN = Sampling(temperature=0.7, top_k=10, top_p=0.9)


def compiled(axes, sampling=GREEDY, attention=None, slots=SLOTS):
    """The program, and bytes of one array of a layer's cache on a device, the smallest."""
    generator = ax.Generator(model(**SIZES), grids.lay(axes), slots=slots, attention=attention)
    if attention is not None:
        generator.extras = [np.stack([np.eye(WIDTH, dtype=np.float32)] * 2)] * SIZES["layers"]
    store = generator._store
    store.reserve(SIZES["seq_len"])
    slots_now = state(generator._slots, generator.grid.mesh)
    decode = generator.programs.decode(sampling.form, STEPS, logs=False)
    given = (generator.params, generator.extras, store._caches, slots_now, sampling.numbers)
    size = min(array.addressable_shards[0].data.nbytes for array in store._caches[0])
    return decode.lower(*given).compile(), size


@pytest.mark.parametrize(
    ("axes", "attention", "slots"),
    [
        (GridShape(), None, 1),
        (GridShape(), None, 2),
        (GridShape(y=2), None, 2),  # a single KV head a device
        (GridShape(), LokiAttention(16, 0.25), 1),
        (GridShape(y=2), LokiAttention(16, 0.25, 16), 2),
    ],
    ids=["one slot", "two slots", "y 2", "loki, one slot", "loki, blocks, y 2"],
)
def test_the_cache_is_written_in_place(axes, attention, slots):
    program, size = compiled(axes, attention=attention, slots=slots)
    module = parse(program.as_text())
    copied = [
        one
        for computation in module.computations.values()
        for one in computation.instructions
        if one.opcode.startswith("copy") and any(array.bytes >= size for array in arrays(one.shape))
    ]
    assert not copied
    memory = program.memory_analysis()
    assert memory.alias_size_in_bytes >= SIZES["layers"] * 2 * size  # given back where they were
    if attention is None:  # Loki's are the places of the chosen, and rows of one head
        assert memory.temp_size_in_bytes < size / 4  # the scores of one layer


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_two_sums_a_layer_travel_along_y_and_candidates(sampling):
    program, _ = compiled(GridShape(y=2), sampling)
    found = collectives(program.as_text(), {"data": 1, "z": 1, "y": 2, "x": 1})
    assert {one.over for one in found} == {"y"}
    residual = SLOTS * SIZES["hidden"]
    sums = [one for one in found if one.operand.elements == residual]
    # Two a layer of attention and MLP, and one that joins the embedding's shards.
    assert len(sums) == 2 * SIZES["layers"] + 1
    assert {one.kind for one in sums} == {"all-reduce"}
    few = 2 * SLOTS * max(sampling.form.top_k, 1)  # candidates of both shards
    rest = [one for one in found if one not in sums]
    assert all(one.operand.elements <= few for one in rest)
    assert len(rest) <= 4
    # One loop runs all tokens: none of them is a call of its own.
    assert len({one.computation for one in sums}) == 1


def test_a_call_makes_so_many_tokens():
    calls = []
    generator = ax.Generator(model(**SIZES), grids.lay(GridShape()), slots=1, steps=STEPS)
    made, store = generator.programs.decode, generator._store
    call = store.call
    store.call = lambda program, *given: calls.append(program) or call(program, *given)
    generator.generate([[1, 2, 3]], tokens=2 * STEPS, sampling=GREEDY)
    assert calls.count(made(GREEDY.form, STEPS, logs=False)) == 2
