"""Packed rows: several documents in one, each as if it were alone, and a loss over the targets that count."""

import functools
from collections import defaultdict
from dataclasses import replace

import grids
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.grid import build_grid
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.packed import counted_targets, documents_of, pack
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.tensor.params import split_module

GPT = replace(grids.GPT, seq_len=16)
LLAMA = replace(grids.LLAMA, heads=8, window=5)
SHAPES = {"gpt": GPT, "llama": LLAMA}
LENGTHS = [(7, 4, 6), (17,), (2, 15), (5, 5, 5), (1, 3, 9), (16,), (8, 8), (3, 3, 3, 3)]


def documents(vocab):
    draw = np.random.default_rng(5)
    return [[draw.integers(0, vocab, size).tolist() for size in sizes] for sizes in LENGTHS]


def alone(shape, kinds, weights=None):
    """The same of each document in a row of its own, summed with a model that knows nothing of packing."""
    model = grids.model_on(shape, grids.lay(GridShape()))
    parts = split_module(model)
    alike = defaultdict(list)  # documents of one length are a batch: each length is traced once
    for row, sizes in enumerate(kinds):
        for number, ids in enumerate(sizes):
            weight = np.ones(len(ids)) if weights is None else np.asarray(weights[row][number], float)
            alike[len(ids)].append((ids, weight))
    count = sum(weight[1:].sum() for batch in alike.values() for _, weight in batch)

    def total(params):
        losses, merged = 0.0, parts.merge(params)
        for length, batch in alike.items():
            if length > 1:
                words, weight = (jnp.asarray(each) for each in zip(*batch, strict=True))
                x = merged.embed(words[:, :-1], jnp.float32)
                for block in merged.blocks:
                    x = block(x)
                losses += merged.total_loss(x, words[:, 1:], weight[:, 1:])
        return losses / count

    with jax.default_device(jax.devices()[0]):
        loss, grads = jax.jit(jax.value_and_grad(total))(parts.params)
    grads = {name: np.asarray(g, np.float64) for name, g in grads.items()}
    return grads, float(loss), sum(float((g**2).sum()) for g in grads.values()) ** 0.5


@functools.cache
def want(kind):
    return alone(SHAPES[kind], documents(SHAPES[kind].vocab))


def packed(kind):
    return np.stack([pack(row, 17) for row in documents(SHAPES[kind].vocab)])


CASES = {
    "one": ("gpt", GridShape(), {}),
    "y": ("gpt", GridShape(y=2), {"activations": "full"}),
    "one window": ("llama", GridShape(), {"scanned": True}),
    "4d": ("llama", GridShape(z=2, y=2, x=2), {"sub_batches": 2}),
    "sequence": ("gpt", GridShape(data=2, y=2), {"activations": "dots"}),
}


SLOW = ("one", "one window", "y", "sequence")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case in SLOW else []) for case in CASES]
)
def test_documents_of_a_row_are_as_if_they_were_alone(case):
    kind, axes, options = CASES[case]
    # Sums over the same targets in another order, and attention over fewer keys in other blocks.
    layout = {"packed": True} | ({"comm": BlockComm(sequence_split=True)} if case == "sequence" else {})
    got = grids.gradients(SHAPES[kind], axes, rows=packed(kind), layout=layout, **options)
    grids.check_gradients(got, want(kind))


def uneven(vocab):
    """Rows of which few, all or no targets count, and what each row holds."""
    draw = np.random.default_rng(7)
    kinds = [[draw.integers(0, vocab, size).tolist() for size in (9, 8)] for _ in range(8)]
    counts = [
        [(draw.random(len(ids)) < share).tolist() for ids in row]
        for row, share in zip(kinds, (0.0, 0.1, 1.0, 0.9, 0.2, 0.0, 0.5, 1.0), strict=True)
    ]
    return kinds, counts, np.stack([pack(row, 17, count) for row, count in zip(kinds, counts, strict=True)])


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param(GridShape(data=2), marks=pytest.mark.slow, id="data"),
        pytest.param(GridShape(pipe=2, data=2), id="pipe"),
    ],
)
def test_an_uneven_mask_over_microbatches_is_one_batch(axes):
    kinds, counts, rows = uneven(GPT.vocab)
    grads, loss, norm = alone(GPT, kinds, counts)
    grid = build_grid(axes, jax.devices()[: axes.devices])

    def model():
        made = Transformer(GPT, rngs=nnx.Rngs(0), packed=True)
        host = grids.host_params(GPT)
        parts = split_module(made)
        return parts.merge({name: jnp.asarray(host[name], jnp.float32) for name in parts.params})

    trainer = ax.Trainer(model, optax.sgd(1.0), grid, microbatches=4, memory=ax.MemoryConfig(precision="fp32"))
    before = {name: np.asarray(value, np.float64) for name, value in trainer.engine.params.items()}
    held_out = trainer.evaluate([rows[:5], rows[5:]]) if axes.pipe == 1 else trainer.evaluate([rows])
    metrics = trainer.step(rows)
    after = {name: np.asarray(value, np.float64) for name, value in trainer.engine.params.items()}
    trainer.close()
    assert abs(held_out - loss) <= grids.SCALAR_TOLERANCE * loss
    assert abs(float(metrics["loss"]) - loss) <= grids.SCALAR_TOLERANCE * loss
    assert abs(float(metrics["grad_norm"]) - norm) <= grids.SCALAR_TOLERANCE * norm
    for name, grad in grads.items():
        # The difference of two float32 weights: rounded to their last bit.
        least = grids.EPS * np.abs(before[name]).max()
        error = np.abs(before[name] - after[name] - grad).max()
        assert error <= grids.GRADIENT_TOLERANCE * np.abs(grad).max() + least, name


def test_a_step_without_targets_is_one_line():
    model = Transformer(GPT, rngs=nnx.Rngs(0), packed=True)
    trainer = ax.Trainer(model, optax.sgd(1.0), grids.lay(GridShape()))
    rows = np.stack([pack([[1, 2]], 17, [[True, False]])] * 2)
    with pytest.raises(UserError, match=r"^batch = \(2, 17\): packed rows with at least one target that counts$"):
        trainer.step(rows)


def test_words():
    row = pack([[5, 6, 7], [1 << 23]], 6, [[True, False, True], [True]])
    assert (row & 0xFFFFFF).tolist() == [5, 6, 7, 1 << 23, 0, 0]
    assert counted_targets(row, packed=True).tolist() == [False, True, False, False, False]
    found = documents_of(jnp.asarray(row[None]))
    assert found.positions[0].tolist() == [0, 1, 2, 0, 0, 1]
    assert len(set(found.numbers[0].tolist())) == 3


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        (([[1, 2], [3]], 2), "documents = 3: at most 2 tokens"),
        (([[1 << 24]], 4), "document 0 = "),
        (([[]], 4), "document 0 = "),
        (([1, 2], 4), "document 0 = 1: ids"),
        ((["abc"], 4), "document 0 = 'abc': ids"),
        (([[1], [1.5]], 4), "document 1 = [1.5]: ids"),
        (([[1, [2]]], 4), "document 0 = [1, [2]]: ids"),
        (([[1, 2], [3]], 8, [[True, True]]), "lengths of targets = [2]: those of the documents, a list each: [2, 1]"),
        (([[1, 2]], 8, [[True, True], [True]]), "lengths of targets = [2, 1]: "),
        (([[1, 2]], 8, [[True]]), "lengths of targets = [1]: "),
        (([[1, 2]], "8"), "width = '8': an integer"),
        ((None, 8), "documents = None: a list"),
        (([[1, 2]], 8, [True, False]), "lengths of targets = [1, 1]: "),
    ],
)
def test_what_does_not_fit_is_one_line(given, fault):
    with pytest.raises(UserError) as error:
        pack(*given)
    assert str(error.value).startswith(fault)
