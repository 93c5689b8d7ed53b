"""Goldfish loss: the same targets left out wherever a passage stands, on every grid, of streams and packed rows."""

from dataclasses import replace
from functools import cache

import grids
import numpy as np
import optax
import pytest
from trainers import losses, make_trainer, transformer

import axonn_jax as ax
from axonn_jax import GridShape, Loader, UserError
from axonn_jax.core.models.packed import IGNORED_TARGET, counted_targets, pack
from axonn_jax.files.data.goldfish import GoldfishConfig

MASK = (1 << 64) - 1


def dropped(row, k, h):
    """The places left out of a row, by whole numbers of any size."""
    places = set()
    for place in range(h, len(row)):
        key = 0
        for token in row[place - h : place]:
            key = (key * 0x9E3779B97F4A7C15 + int(token) + 1) & MASK
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
            key = (key ^ (key >> shift)) * factor & MASK
        if key % k == 0:
            places.add(place)
    return places


def rows(shape, vocab=150_000, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, shape).astype(np.int32)


@pytest.mark.parametrize(("k", "h"), [(2, 13), (4, 13), (3, 1), (2, 40)])
def test_targets_left_out_are_those_of_the_reference(k, h):
    batch = rows((6, 65))
    marked = ax.goldfish(batch, k, h)
    np.testing.assert_array_equal(marked & ~IGNORED_TARGET, batch)
    for row, left_out in zip(batch, ~counted_targets(marked, packed=False), strict=True):
        assert {int(place) + 1 for place in np.flatnonzero(left_out)} == dropped(row, k, h)


def test_about_one_of_k_is_left_out():
    counts = counted_targets(ax.goldfish(rows((64, 1025)), 4), packed=False)[:, 13:]
    assert abs(counts.mean() - 0.75) < 0.01  # 64,768 draws: five standard deviations are 0.0085


def test_a_passage_is_left_out_alike_wherever_it_stands():
    passage = rows(200, seed=1)
    batch = rows((2, 401))
    batch[0, 17:217], batch[1, 150:350] = passage, passage
    counts = counted_targets(ax.goldfish(batch, 2), packed=False)
    np.testing.assert_array_equal(counts[0, 17 + 12 : 216], counts[1, 150 + 12 : 349])


def test_no_context_reaches_into_the_document_before():
    documents = [rows(n, seed=n) for n in (30, 12, 50)]
    row = pack(documents, 100)[None]
    left_out = counted_targets(row, packed=True) & ~counted_targets(ax.goldfish(row, 2, 5, packed=True), packed=True)
    want, start = set(), 0
    for ids in documents:
        want |= {start + place for place in dropped(ids, 2, 5)}
        start += len(ids)
    assert {int(place) + 1 for place in np.flatnonzero(left_out[0])} == want


def test_ids_that_are_no_targets_stay_so():
    batch = rows((2, 40))
    batch[:, 30:] = -100
    marked = ax.goldfish(batch, 2, 3)
    np.testing.assert_array_equal(marked[:, 30:], batch[:, 30:])


SHAPES = {"dense": replace(grids.GPT, layers=2), "experts": replace(grids.MIXTRAL, layers=1)}


@cache
def loss_without(kind):
    """Loss of a step and of the evaluation after it on one device, of packed rows that mark the counted targets."""
    shape = SHAPES[kind]
    batch = rows((8, 17), shape.vocab)
    targets = [[place not in dropped(row, 2, 3) for place in range(17)] for row in batch]
    packed = np.stack([pack([row], 17, [counts]) for row, counts in zip(batch, targets, strict=True)])
    trainer = make_trainer(transformer(shape, packed=True), optax.sgd(0.1), GridShape(), precision="fp32")
    return batch, losses(trainer, [packed] * 2)


@pytest.mark.parametrize(
    ("kind", "axes"),
    [
        ("dense", GridShape()),
        ("dense", GridShape(2, 2)),
        ("dense", GridShape(1, 1, 2, 2)),
        ("dense", GridShape(pipe=2)),
        ("experts", GridShape(2, 1, 1, 2)),
    ],
    ids=str,
)
def test_loss_and_update_are_those_of_the_targets_that_count(kind, axes):
    batch, want = loss_without(kind)
    trainer = make_trainer(SHAPES[kind], optax.sgd(0.1), axes, microbatches=2, precision="fp32")
    got = losses(trainer, [ax.goldfish(batch, 2, 3)] * 2)
    trainer.close()
    np.testing.assert_allclose(got, want, rtol=1e-6)


def test_a_loader_leaves_out_the_same_targets_in_every_epoch(prepared):
    def take(seed):
        """The rows of two epochs by sample."""
        loader = Loader(prepared, seq_len=16, global_batch=2, dropped=GoldfishConfig(2, 5), seed=seed, prefetch=0)
        batches = {}
        for step in range(loader.num_samples):  # two samples a step: two epochs
            for number, row in zip(loader.samples(step), next(loader), strict=True):
                batches.setdefault(loader.index(number), []).append(row)
        loader.close()
        return batches

    seen = take(3)
    assert all(len(copies) == 2 and np.array_equal(*copies) for copies in seen.values())
    assert any((row & IGNORED_TARGET).any() for copies in seen.values() for row in copies)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: ax.goldfish(rows((2, 9)), 1), "goldfish.k"),
        (lambda: ax.goldfish(rows((2, 9)), 2, 0), "goldfish.h"),
        (lambda: ax.goldfish(rows((2, 9)), "4"), "goldfish.k = '4': an integer of at least 2"),
        (lambda: ax.goldfish(rows(9), 2), "batch"),
        (lambda: ax.goldfish(np.zeros((2, 9)), 2), "batch"),
        (lambda: ax.goldfish([[1, 2], [3]], 2), "batch = .list.: token ids"),
        (lambda: GoldfishConfig(1).check(), "goldfish.k"),
        (lambda: GoldfishConfig(0, 5).check(), "goldfish.k"),
    ],
)
def test_settings_out_of_range(make, field):
    with pytest.raises(UserError, match=field):
        make()
