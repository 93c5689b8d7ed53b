"""A generator in a script: one use at a time, on its own grid, with new weights, and what it refuses at the call."""

import gc

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from tiny import LLAMA, PROMPTS, continued, model
from trainers import make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, Sampling, UserError
from axonn_jax.core.grid import build_grid
from axonn_jax.core.tensor.attention import causal_attention
from axonn_jax.core.tensor.kernel_choice import AttentionRule
from axonn_jax.text.inference.attend import attend_chunk
from axonn_jax.text.inference.slots import Request
from axonn_jax.text.loki.attention import LokiAttention

GREEDY = Sampling(temperature=0)
BUSY = "generator = 'in use': a generator without an unfinished stream"


@pytest.fixture(scope="module")
def made():
    return model(**LLAMA)


@pytest.fixture(scope="module")
def generator(made):
    return ax.Generator(made, grids.lay(GridShape()), slots=2)


def test_prompts_have_noise_of_their_own(generator):
    """Also one that comes again, which has further samples; a request alone has the text that it has in a list."""
    way, prompt = Sampling(temperature=1.5, top_k=0), tuple(PROMPTS[1])
    (first,), (second,) = generator.generate([prompt, prompt], tokens=12, sampling=way)
    assert first != second
    assert generator.generate([prompt], tokens=12, sampling=way, samples=2) == [[first, second]]
    alone = [token for piece in generator.stream([Request(prompt, 12, 1)], way) for token in piece.ids]
    assert alone == second
    assert way.key(0, prompt).tolist() != way.key(0, prompt[:-1]).tolist()


def test_a_stream_has_the_slots_until_it_ends(made, generator):
    whole = continued(made, [PROMPTS[1]], 40)[0]
    stream = generator.stream([Request(tuple(PROMPTS[1]), 40)], GREEDY)
    ids = next(stream).ids
    for other in (
        lambda: generator.stream([Request((7,), 5)]),
        lambda: generator.generate([[7]], tokens=5),
        lambda: generator.score([[4, 5, 6]]),
        lambda: generator.update(made),
    ):
        with pytest.raises(UserError, match=BUSY):
            other()
    assert ids + [token for piece in stream for token in piece.ids] == whole
    generator.score([[4, 5, 6]])


def test_a_stream_that_is_given_up_gives_the_slots_back(generator):
    requests = [Request((1, 2), 60)]
    stream, second = generator.stream(requests), generator.stream(requests)
    next(stream)
    with pytest.raises(UserError, match=BUSY):
        next(second)
    stream.close()
    stream = generator.stream(requests)
    next(stream)
    del stream
    gc.collect()
    with pytest.raises(ZeroDivisionError):
        next(generator.stream(requests, until=lambda *_: 1 / 0))
    generator.score([[4, 5, 6]])


def test_a_generator_goes_on_behind_another_mesh(made):
    """That of a newer grid, or a script's own; also with the weights of stages, each on a mesh of its own."""
    texts = continued(made, PROMPTS[:2], 8)
    grid = build_grid(GridShape(pipe=2), jax.devices()[2:4])
    trainer = make_trainer(model(**LLAMA), optax.adamw(1e-3), grid, microbatches=1)
    jax.set_mesh(grids.lay(GridShape(data=2, x=2)).mesh)
    older = ax.Generator(made, grids.lay(GridShape(y=2)), slots=2)
    assert [text for (text,) in older.generate(PROMPTS[:2], tokens=8, sampling=GREEDY)] == texts
    scores = older.score(PROMPTS[1:2])
    jax.set_mesh(jax.make_mesh((3,), ("batch",)))
    staged = ax.Generator(trainer.model, grids.lay(GridShape()), slots=2)
    for generator in (older, staged):
        found = generator.generate(PROMPTS[:2], tokens=8, sampling=Sampling(temperature=0, repetition_penalty=1.0))
        assert [text for (text,) in found] == texts
        np.testing.assert_allclose(generator.score(PROMPTS[1:2]), scores, atol=1e-5)
    older.update(trainer.model)
    assert [text for (text,) in older.generate(PROMPTS[:2], tokens=8, sampling=GREEDY)] == texts


def compiled(caplog):
    return [record.message[:80] for record in caplog.records if record.message.startswith("Compiling")]


def test_new_weights_compile_nothing_again(caplog):
    grid = grids.lay(GridShape(y=2))
    trainer = make_trainer(grids.make_model(ax.models.ModelShape(**LLAMA), grid), optax.sgd(1.0), grid, microbatches=1)
    generator = ax.Generator(trainer.model, grid, slots=2)
    drawn = [generator.generate(PROMPTS[:3], tokens=8, sampling=GREEDY)]
    for number in range(2):
        trainer.step(np.random.default_rng(number).integers(0, 97, (4, 33)).astype(np.int32))
        weights = trainer.model
        generator.release()
        with pytest.raises(UserError, match="model = 'deleted'"):
            generator.score(PROMPTS[2:3])
        with jax.log_compiles():
            generator.update(weights)
            drawn.append(generator.generate(PROMPTS[:3], tokens=8, sampling=GREEDY))
    assert not compiled(caplog)
    assert drawn[0] != drawn[1] != drawn[2]
    assert drawn[2] == ax.Generator(trainer.model, grid, slots=3).generate(PROMPTS[:3], tokens=8, sampling=GREEDY)
    with pytest.raises(UserError, match=r"model = 'model.layers = 3 \(2 there\)': a model of the sizes"):
        generator.update(model(**LLAMA | {"layers": 3}))


def test_a_second_list_compiles_nothing_again(made, caplog):
    generator = ax.Generator(made, grids.lay(GridShape(data=2)), slots=2, steps=8)
    generator.generate([PROMPTS[1]], tokens=8)
    with jax.log_compiles():
        generator.generate([PROMPTS[1][:-1]], tokens=40)
    assert not compiled(caplog)


def test_a_padded_vocabulary_takes_a_penalty():
    """A trainer's table has rows for its own grid, of which the generator's may need fewer."""
    grid = grids.lay(GridShape(z=2, y=2))
    trainer = make_trainer(grids.make_model(ax.models.ModelShape(**LLAMA), grid), optax.sgd(1.0), grid, microbatches=1)
    way = Sampling(temperature=0, repetition_penalty=1.3)
    wanted, found = (
        ax.Generator(trainer.model, grids.lay(axes), slots=1).generate(PROMPTS[1:3], tokens=8, sampling=way)
        for axes in (GridShape(), GridShape(y=2))
    )
    assert wanted == found


def test_weights_that_a_trainer_has_taken_are_named():
    grid = grids.lay(GridShape())
    made = grids.make_model(ax.models.ModelShape(**LLAMA), grid)
    generator = ax.Generator(made, grid, slots=1)
    made.embedding.table.get_value().delete()
    with pytest.raises(UserError, match="model = 'deleted'"):
        generator.generate([[1]], tokens=2)


def test_arrays_are_lists_of_tokens(generator):
    prompt = np.array(PROMPTS[1])
    wanted = generator.generate([PROMPTS[1]], tokens=np.int64(8), sampling=GREEDY)
    assert generator.generate(prompt[None], tokens=8, sampling=GREEDY) == wanted
    for given in (prompt, jax.numpy.asarray(prompt), PROMPTS[1]):
        assert [piece.ids for piece in generator.stream([Request(given, 8)], GREEDY)] == wanted[0]
    (scores,) = generator.score([prompt])
    np.testing.assert_array_equal(scores, generator.score([PROMPTS[1]])[0])


CALLS = {
    "samples = 0: an integer of at least 1": lambda g: g.generate([[1]], tokens=5, samples=0),
    "samples = 1.5: ": lambda g: g.generate([[1]], tokens=5, samples=1.5),
    "prompt = 'abc': a list of token ids": lambda g: g.generate(["abc"], tokens=5),
    "prompt = 1: a list of token ids": lambda g: g.generate([1, 2, 3], tokens=5),
    r"prompt = \[1.5, 2.0\]: a list of token ids": lambda g: g.generate([[1.5, 2.0]], tokens=5),
    "prompt = -4: token ids below model.vocab = 97": lambda g: g.generate([[1, -4]], tokens=5),
    "tokens = 5.0: an integer of at least 1": lambda g: g.generate([[1]], tokens=5.0),
    "tokens = None: an integer": lambda g: g.generate([[1]], tokens=None),
    "sampling.top_k = 2.5: an integer from 0": lambda g: g.generate([[1]], tokens=5, sampling=Sampling(top_k=2.5)),
    "sampling.seed = 1.0: an integer": lambda g: g.generate([[1]], tokens=5, sampling=Sampling(seed=1.0)),
    "sampling.top_p = None: a number": lambda g: g.generate([[1]], tokens=5, sampling=Sampling(top_p=None)),
    "sampling = 0.7: an ax.Sampling": lambda g: g.generate([[1]], tokens=5, sampling=0.7),
    r"request = \[1, 2\]: a Request": lambda g: g.stream([[1, 2]]),
    "requests = 3: a list": lambda g: g.stream(3),
    "prompts = None: a list": lambda g: g.generate(None, tokens=5),
    "texts = 7: a list": lambda g: g.score(7),
    "sample = -1: an integer of at least 0": lambda g: g.stream([Request((1,), 5, -1)]),
    "sampling.top_p = 7: a number above 0": lambda g: g.stream([Request((1,), 5)], Sampling(top_p=7)),
    "text = 500: token ids below": lambda g: g.score([[1, 500, 3]]),
    "text = -4: token ids below": lambda g: g.score([[1, -4, 2]]),
    "text = 'ab': a list of token ids": lambda g: g.score(["ab"]),
}


@pytest.mark.parametrize("says", CALLS)
def test_a_call_that_cannot_be_is_refused_when_it_is_made(generator, says):
    with pytest.raises(UserError, match=f"^{says}"):
        CALLS[says](generator)


@pytest.mark.parametrize(
    ("says", "options"),
    [
        ("limit = -1: an integer of at least 1", {"limit": -1}),
        ("limit = 0: an integer of at least 1", {"limit": 0}),
        ("stops = 97: token ids below model.vocab = 97", {"stops": [97]}),
        ("stops = -2: token ids", {"stops": [-2]}),
        ("steps = 0: an integer of at least 1", {"steps": 0}),
        ("slots = 2.0: an integer of at least 1", {"slots": 2.0}),
        ("length = 1: an integer of at least 2", {"length": 1}),  # a prompt and a token
        ("attention = 'loki': an instance of FullAttention or None", {"attention": "loki"}),
        ("extras = 3: a list", {"extras": 3}),
        ("dtype = 'int8': float32, bfloat16 or float16", {"dtype": "int8"}),
        ("dtype = 'floaty': float32", {"dtype": "floaty"}),
    ],
)
def test_a_generator_that_cannot_be(made, says, options):
    with pytest.raises(UserError, match=says):
        ax.Generator(made, grids.lay(GridShape()), **options)


def test_a_generator_without_a_grid(made):
    with pytest.raises(UserError, match=r"grid = 'NoneType': a grid, as ax\.init returns one"):
        ax.Generator(made, None)


def test_another_model_and_loki_without_components(made):
    grid = grids.lay(GridShape())
    with pytest.raises(UserError, match="model = 'Linear': an instance of Transformer or the path of a directory"):
        ax.Generator(nnx.Linear(2, 2, rngs=nnx.Rngs(0)), grid)
    generator = ax.Generator(made, grid, attention=LokiAttention(4, 0.5))
    for use in (lambda: generator.stream([Request((1,), 5)]), lambda: generator.score([[1, 2]])):
        with pytest.raises(UserError, match="extras = None: components of every layer for loki"):
            use()


def test_loki_does_not_rank_capped_scores():
    capped = model(**LLAMA | {"attention_cap": 5.0})
    with pytest.raises(UserError, match="attention = 'loki': full for a model with scores capped at 5"):
        ax.Generator(capped, grids.lay(GridShape()), slots=2, attention=LokiAttention(2, 0.5))


@pytest.mark.parametrize("rule", [AttentionRule(), AttentionRule(20, 0.5), AttentionRule(0, 0.5)], ids=str)
def test_a_later_chunk_of_a_prompt_attends_as_the_whole_prompt(rule):
    draw, start = np.random.default_rng(0), 32
    q, k, v = (jnp.asarray(draw.standard_normal((1, 48, heads, 8)), jnp.float32) for heads in (4, 2, 2))
    whole = causal_attention(q, k, v, rule=rule)[:, start:]
    by_head = [jnp.moveaxis(a, 2, 1) for a in (k, v)]
    old = tuple(jnp.pad(a[:, :, :start], ((0, 0), (0, 0), (0, 64 - start), (0, 0))) for a in by_head)
    part = attend_chunk(q[:, start:], tuple(a[:, :, start:] for a in by_head), old, jnp.int32(start), rule)
    np.testing.assert_allclose(part, whole, atol=16 * grids.EPS * float(jnp.abs(whole).max()))
