"""Precision, offload and ZeRO-1 in whole training steps: the same losses, and the bytes where the formula says."""

import functools
import gc
from itertools import product
from types import SimpleNamespace

import grids
import hlo_text
import jax
import jax.numpy as jnp
import live
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.memory.precision import CLEAN_STEPS, FIRST, SMALLEST, first_scale, next_scale
from axonn_jax.memory.report import lines
from axonn_jax.models.config import ModelShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.optimizer import decayed

SHAPE = ModelShape(
    layers=2, hidden=32, heads=4, kv_heads=2, ffn=64, vocab=64, seq_len=16,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=True,
)  # fmt: skip
STEPS = 4
BUCKET = 1000  # parameters are cut in the middle, and several share a bucket
GRIDS = [GridShape(), GridShape(data=2, z=2, x=2), GridShape(pipe=2, data=2, x=2)]
ADAMW = optax.adamw(1e-2, b1=0.9, b2=0.95, weight_decay=0.1, mask=decayed)
WAYS = {
    "zero": {"zero": 1},
    "offload": {"offload": "optimizer", "bucket": BUCKET},
    "both": {"zero": 1, "offload": "optimizer", "bucket": BUCKET},
    "both in the compute precision": {"zero": 1, "offload": "optimizer", "bucket": BUCKET, "accumulate": "compute"},
}


slow = pytest.mark.slow


def batches(count=STEPS):
    rng = np.random.default_rng(0)
    return [rng.integers(0, SHAPE.vocab, (16, SHAPE.seq_len + 1)).astype(np.int32) for _ in range(count)]


def made(grid, optimizer=ADAMW, **options):
    make = functools.partial(Transformer, SHAPE)
    return make_trainer(
        lambda: make(rngs=nnx.Rngs(0)), optimizer, grids.lay(grid), microbatches=4, **{"clip": 0.5} | options
    )


def train(grid, optimizer=ADAMW, **options):
    """Losses of the first steps and the weights after them."""
    trainer = made(grid, optimizer, **options)
    losses = [float(trainer.step(batch)["loss"]) for batch in batches()]
    weights = {name: np.asarray(value) for name, value in trainer.engine.params.items()}
    trainer.close()
    return np.array(losses), weights


@functools.cache
def plain(grid, precision):
    return train(grid, precision=precision)


@slow  # test_cases has each way beside every other option
@pytest.mark.parametrize("grid", GRIDS, ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_fp32_is_the_same_with_offload_and_zero(grid, way):
    losses, weights = train(grid, precision="fp32", **WAYS[way])
    expected, there = plain(grid, "fp32")
    # Sums over devices may be taken in another order: a rounding of 6e-8 of a loss of 4, and of the weights after it.
    np.testing.assert_allclose(losses, expected, rtol=3e-7)
    for name, value in there.items():
        np.testing.assert_allclose(weights[name], value, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        (GridShape(data=2, z=2, x=2), {}),
        pytest.param(GridShape(data=4), {"precision": "bf16", "accumulate": "compute"}, marks=slow),
        pytest.param(GridShape(data=2), {"bucket": 16_000_000}, marks=slow),
    ],
    ids=str,
)
def test_reduction_beside_the_update_changes_no_bit(grid, options):
    """A bucket's, where nothing is clipped, against a limit that no norm reaches, for which all are reduced first."""

    def run(clip):
        trainer = made(grid, **{"precision": "fp32", "offload": "optimizer", "bucket": BUCKET, "clip": clip} | options)
        metrics = [trainer.step(batch) for batch in batches()]
        over_data = [
            c for c in hlo_text.collectives(trainer.engine.compiled_step(batches(1)[0]).as_text())
            if c.crosses(trainer.engine.grid.mesh, "data")
        ]  # fmt: skip
        losses, norms = ([float(m[name]) for m in metrics] for name in ("loss", "grad_norm"))
        return (
            losses,
            norms,
            {n: np.asarray(v) for n, v in trainer.engine.params.items()},
            sum(c.bytes for c in over_data),
        )

    losses, norms, weights, reduced = run(0.0)
    want_losses, want_norms, want_weights, want_reduced = run(1e9)
    assert losses == want_losses
    np.testing.assert_allclose(norms, want_norms, rtol=1e-6)  # squares add up in another order
    for name, value in want_weights.items():
        np.testing.assert_array_equal(weights[name], value, err_msg=name)
    assert reduced == 12  # the loss, how many targets count, and whether all that adds up is finite
    assert want_reduced > 1000


@slow
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("way", ["both", "both in the compute precision"])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_the_same_to_its_rounding(grid, way, precision):
    losses, _ = train(grid, precision=precision, **WAYS[way])
    # A rounding of bf16 is 4e-3 and of fp16 5e-4, in gradients whose sign Adam makes steps of; losses move less.
    np.testing.assert_allclose(losses, plain(grid, precision)[0], rtol={"bf16": 1e-3, "fp16": 1e-4}[precision])
    np.testing.assert_allclose(losses, plain(grid, "fp32")[0], rtol={"bf16": 2e-3, "fp16": 2e-4}[precision])


@slow
@pytest.mark.parametrize("grid", GRIDS[1:], ids=str)
@pytest.mark.parametrize("activations", ["full", "dots", "save_collectives", "offload"])
def test_every_activation_policy_with_offload_and_zero(grid, activations):
    losses, _ = train(grid, precision="fp32", activations=activations, **WAYS["both"])
    np.testing.assert_allclose(losses, plain(grid, "fp32")[0], rtol=3e-7)


def test_a_pipeline_keeps_what_its_policy_says():
    def kept(activations):
        trainer = made(GridShape(pipe=2), activations=activations)
        pipe, _ = trainer.engine._prepare(batches(1)[0])
        found = pipe.bytes_kept()
        trainer.close()
        return found

    assert kept("full") < kept("dots") < kept("none")


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.adam(1e-2), marks=slow),
        pytest.param(optax.lion(1e-3, weight_decay=0.1, mask=decayed), marks=slow),
        pytest.param(optax.sgd(0.1, momentum=0.9), marks=slow),
        pytest.param(optax.sgd(0.1), marks=slow),
        optax.lamb(1e-2),
        pytest.param(optax.adafactor(1e-2, min_dim_size_to_factor=16), marks=slow),
        pytest.param(
            optax.chain(optax.clip(0.1), optax.scale_by_adam(), optax.scale_by_schedule(lambda n: -0.01 / (1.0 + n))),
            marks=slow,
        ),
    ],
    ids=["adam", "lion", "momentum", "sgd", "lamb", "adafactor", "chain"],
)
def test_offload_of_any_optimizer_that_treats_parameters_one_by_one_is_optax(optimizer):
    grid = GridShape(data=2, x=2)
    losses, weights = train(grid, optimizer, precision="fp32", zero=1, offload="optimizer", bucket=BUCKET)
    expected, there = train(grid, optimizer, precision="fp32")
    np.testing.assert_allclose(losses, expected, rtol=3e-7)
    for name, value in there.items():
        np.testing.assert_allclose(weights[name], value, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("grid", [GridShape(), pytest.param(GridShape(pipe=2), marks=slow)], ids=str)
def test_what_looks_at_all_parameters_is_refused_by_name(grid):
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(UserError, match=r"optimizer = '[^']*clip_by_global_norm[^']*'.*every parameter by itself"):
        made(grid, optimizer, offload="optimizer")


def test_optimizers_that_are_not_elementwise_train_with_zero():
    grid = GridShape(data=4)
    losses, _ = train(grid, optax.lamb(1e-2), precision="fp32", zero=1)
    np.testing.assert_allclose(losses, train(grid, optax.lamb(1e-2), precision="fp32")[0], rtol=3e-7)


# Bytes a parameter: (device between backward and update, host), all parameters divisible by every axis here.
STATES = [
    ({"precision": "fp32"}, 16, 0),
    ({"precision": "bf16"}, 16, 0),
    ({"precision": "bf16", "accumulate": "compute"}, 14, 0),
    ({"precision": "fp16", "offload": "optimizer"}, 6, 12),
    ({"precision": "bf16", "offload": "optimizer", "accumulate": "compute"}, 4, 12),
    ({"precision": "fp32", "offload": "optimizer"}, 8, 8),
    ({"precision": "bf16", "zero": 1}, 2 + 16 / 2, 0),
    ({"precision": "bf16", "zero": 1, "offload": "optimizer", "accumulate": "compute"}, 2 + 2 / 2, 12 / 2),
]
LARGER = 5000
QUICK = (STATES[0], STATES[4])


def replicas(options):
    return 2 if "zero" in options else 1


@pytest.mark.parametrize(
    ("pipe", "state"),
    [
        pytest.param(pipe, state, marks=() if state is QUICK[2 - pipe] else slow)
        for pipe, state in product((1, 2), STATES)
        if pipe > 1 or "offload" in state[0]
    ],
)
def test_live_arrays_of_a_step_are_what_the_formula_says(pipe, state):
    """When the update of a real step begins, gradients alive, over one device of each stage; and within the update."""
    options, device, host = state
    gc.collect()
    before = jax.live_arrays()
    trainer = made(GridShape(pipe=pipe, data=replicas(options)), bucket=LARGER, **options)
    updates = live.Updates(trainer, before)
    trainer.step(batches(1)[0])
    places = planned_of(trainer)
    found = {kind: sum(begin[kind] for begin in updates.begin.values()) for kind in ("device", "host")}
    total = sum(planned.weights for planned in places.values()) // trainer.engine.precisions.weights.itemsize
    assert len(updates.begin) == len(places)
    assert found == {"device": device * total, "host": host * total}
    assert found["device"] == sum(planned.device for planned in places.values())
    assert found["host"] == sum(planned.host for planned in places.values())
    buckets = 3 * 12 * LARGER if host else 0
    for place, most in updates.most.items():
        assert most <= updates.begin[place]["device"] + buckets, place
    trainer.close()


def planned_of(trainer):
    """The formula's bytes, by rank of the pipe."""
    return {pp_rank: SimpleNamespace(**report["planned"]) for pp_rank, report in trainer.engine.memory().items()}


@pytest.mark.parametrize(
    ("options", "device", "host"),
    [pytest.param(*state, marks=() if state is STATES[0] else slow) for state in STATES if "offload" not in state[0]],
)
def test_one_program_of_a_step_has_state_as_arguments_and_gradients_among_its_temporaries(options, device, host):
    """By XLA's analysis: in one program there are no arrays between the backward pass and the update."""
    trainer = made(GridShape(data=replicas(options)), **options)
    batch = batches(1)[0]
    found = trainer.engine.compiled_step(batch).memory_analysis()
    (planned,) = planned_of(trainer).values()
    total = planned.weights // trainer.engine.precisions.weights.itemsize
    assert planned.device == device * total
    assert planned.host == host == 0
    tokens, numbers = batch.nbytes // replicas(options), 256
    assert 0 <= found.argument_size_in_bytes - (planned.device - planned.gradients) - tokens < numbers
    assert found.temp_size_in_bytes > planned.gradients


def test_gradients_take_the_bytes_that_the_formula_gives_them():
    trainer = made(GridShape(data=2), precision="bf16", zero=1, offload="optimizer", accumulate="compute")
    program = trainer.engine.compiled_step(batches(1)[0])
    (planned,) = planned_of(trainer).values()
    sizes = [int(np.prod(s.shape)) * s.dtype.itemsize for s in program.out_info.grads.values()]
    assert sum(sizes) // 2 == planned.gradients


def test_the_report_says_where_every_byte_is():
    trainer = made(GridShape(data=2), precision="bf16", zero=1, offload="optimizer", accumulate="compute")
    trainer.step(batches(1)[0])
    (found,) = trainer.engine.memory().values()
    assert found["counted_between_steps"]["host"] == found["planned"]["host"] > 0
    assert found["counted_between_steps"]["device"] == found["planned"]["weights"]
    assert found["program"]["temp"] > 0
    text = "\n".join(lines(found))
    assert "masters" in text
    assert "(host)" in text


def poke(trainer, name, value):
    """Sets a weight's first entry, which one device has; returns what it was."""
    if hasattr(trainer.engine, "stages"):
        weights = next(h.weights for h in trainer.engine.stages.values() if name in h.weights)
    else:
        weights = trainer.engine.train_state.model.weights
    if name not in weights:
        name = name.replace(".1.", ".every.")
    array = weights[name]
    first = (0,) * array.ndim
    was = float(array[first])
    weights[name] = jax.device_put(array.at[first].set(value), array.sharding)
    return was


def one_bad_step(grid, value, **options):
    """Metrics of a clean step, of one with a bad weight on one device, which must change nothing, and of one after."""
    trainer = made(grid, **options)
    first, name = batches(1)[0], "blocks.1.mlp.up.kernel"
    clean = trainer.step(first)
    before = jax.tree.map(np.asarray, (trainer.engine.params, trainer.engine.opt_state))
    good = poke(trainer, name, value)
    skipped = trainer.step(first)
    poke(trainer, name, good)
    after = jax.tree.map(np.asarray, (trainer.engine.params, trainer.engine.opt_state))
    assert not np.isfinite(float(skipped["grad_norm"]))
    jax.tree.map(np.testing.assert_array_equal, after, before)
    resumed = trainer.step(first)
    assert [int(m["skipped"]) for m in (clean, skipped, resumed)] == [0, 1, 1]
    assert float(resumed["loss"]) < float(clean["loss"])
    trainer.close()
    return clean, skipped, resumed


@pytest.mark.parametrize(
    ("grid", "options"),
    [
        pytest.param(grid, options, marks=marks)
        for grid, options, marks in [
            (GridShape(data=2, x=2), {"precision": "bf16"}, ()),
            (GridShape(data=2, x=2), {"precision": "fp32", "scan_layers": "yes", "clip": 0.0}, slow),
            (GridShape(data=2, x=2), {"precision": "fp32", "clip": 0.0} | WAYS["offload"], ()),  # reduced in the update
            (GridShape(data=2), {"precision": "bf16"} | WAYS["both"], slow),
            (GridShape(pipe=2, x=2), {"precision": "bf16"}, slow),
            (GridShape(pipe=2, data=2), {"precision": "fp32"} | WAYS["zero"], slow),
        ]
    ],
    ids=str,
)
def test_a_step_that_is_not_finite_changes_nothing_in_any_precision(grid, options):
    one_bad_step(grid, np.inf, **options)


class TestLossScale:
    """fp16: the published constants, and a step that an overflow skips on every device and stage."""

    def test_it_halves_doubles_and_stays_within_limits(self):
        scale = first_scale()
        for _ in range(3):
            scale = next_scale(scale, jnp.bool_(False))
        assert (float(scale.factor), int(scale.skipped)) == (FIRST / 8, 3)
        for _ in range(CLEAN_STEPS - 1):
            scale = next_scale(scale, jnp.bool_(True))
        assert float(scale.factor) == FIRST / 8
        scale = next_scale(scale, jnp.bool_(True))
        assert (float(scale.factor), int(scale.clean)) == (FIRST / 4, 0)
        for _ in range(20):
            scale = next_scale(scale, jnp.bool_(False))
        assert float(scale.factor) == SMALLEST

    @pytest.mark.parametrize(
        ("grid", "options"),
        [
            pytest.param(GridShape(data=2, x=2), {}, marks=slow),
            (GridShape(data=2, x=2), {"offload": "optimizer", "bucket": BUCKET}),
            (GridShape(pipe=2, x=2), {}),
            pytest.param(GridShape(pipe=2, x=2), {"offload": "optimizer", "bucket": BUCKET}, marks=slow),
        ],
        ids=str,
    )
    def test_an_overflow_on_one_device_skips_the_step_everywhere(self, grid, options):
        # One weight of the last block so large that what the first device multiplies with it is no float16 number.
        metrics = one_bad_step(grid, 1e30, precision="fp16", **options)
        assert [float(m["loss_scale"]) for m in metrics] == [FIRST, FIRST, FIRST / 2]

    @pytest.mark.slow
    def test_200_steps_track_fp32_and_the_scale_recovers(self):
        def run(precision):
            # At ten times this rate the curves part by per cents after 60 steps: every rounding grows.
            trainer = made(GridShape(data=2, x=2), optax.adamw(1e-3, b2=0.95), precision=precision)
            rows = batches(8)
            metrics = [trainer.step(rows[step % 8]) for step in range(210)]
            return np.array([float(m["loss"]) for m in metrics]), metrics

        scaled, metrics = run("fp16")
        plain, _ = run("fp32")
        assert plain[-1] < plain[0] - 0.2
        # Some roundings of 5e-4 (1.4e-3 was seen); fp32 on one device differs from this grid's by 3e-7.
        np.testing.assert_allclose(scaled, plain, rtol=3e-3)
        assert float(metrics[-1]["loss_scale"]) == 2 * FIRST
        assert int(metrics[-1]["skipped"]) == 0
