"""Pipelines in one process: loss curves and norms of every policy and grid equal the one-stage run's."""

import dataclasses
import functools

import grids
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import trainers
from flax import nnx
from shared_layers import Block
from trainers import again, ids, make_trainer

import axonn_jax as ax
from axonn_jax import GridShape, PipelineConfig, UserError
from axonn_jax.core.grid import GRID_AXES
from axonn_jax.core.memory.report import unused
from axonn_jax.pipe import engine as pipeline
from axonn_jax.pipe.stages import build
from axonn_jax.pipe.timeline.spans import last_complete_step

STEPS, MICROBATCHES, ROWS = 20, 4, 16
# Sums of another order: within a stage as on any grid (test_trainer), and the norm's squares added stage by stage.
CURVE_TOLERANCE = grids.CURVE_TOLERANCE
NORM_TOLERANCE = 1e-5

GPT = dataclasses.replace(grids.GPT, layers=2, seq_len=8, dropout=0.1)  # tied embeddings: both ends hold the table
LLAMA = dataclasses.replace(grids.LLAMA, layers=3, seq_len=8)
DEEP = dataclasses.replace(GPT, layers=12)  # stages of several groups of layers
SHAPES = {"gpt": GPT, "llama": LLAMA, "deep": DEEP}

CASES = {
    "message": ("gpt", {"pipe": 2}, {}),
    "message 4": ("gpt", {"pipe": 4}, {"in_flight": 2}),
    "message fused": ("llama", {"pipe": 2}, {"split_backward": False}),
    "message virtual": ("gpt", {"pipe": 2}, {"virtual_stages": 2}),
    "gpipe": ("gpt", {"pipe": 2}, {"policy": "gpipe"}),
    "1f1b": ("gpt", {"pipe": 4}, {"policy": "1f1b"}),
    "interleaved": ("gpt", {"pipe": 2}, {"policy": "interleaved", "virtual_stages": 2}),
    "zero-bubble": ("llama", {"pipe": 4}, {"policy": "zero-bubble"}),
    "uneven": ("gpt", {"pipe": 2}, {"split": "2,4"}),
    "deep": ("deep", {"pipe": 2}, {}),
    "deep zero-bubble": ("deep", {"pipe": 2}, {"policy": "zero-bubble"}),
    "deep offload": ("deep", {"pipe": 2}, {"activations": "offload"}),
    "deep virtual, 4D full": (
        "deep",
        {"pipe": 2, "z": 2, "x": 2},
        {"activations": "full", "split": "13,4,4,5", "virtual_stages": 2},
    ),
    "4D": ("llama", {"pipe": 2, "z": 2, "x": 2}, {}),
    "4D full": ("gpt", {"pipe": 2, "y": 2, "z": 2}, {"activations": "full"}),
    "4D save_collectives": ("llama", {"pipe": 2, "y": 2, "x": 2}, {"activations": "save_collectives"}),
    "4D dots": ("gpt", {"pipe": 2, "data": 2, "x": 2}, {"policy": "1f1b", "activations": "dots"}),
}

# Compiling takes 10 to 20 s each. `test_cases` has the other policies, each beside every way to keep and to recompute.
QUICK = ("1f1b", "zero-bubble")


def trainer(model, axes, *, activations="none", precision="fp32", optimizer=None, **pipeline):
    options = {"microbatches": MICROBATCHES, "clip": 0.5, "activations": activations, "precision": precision}
    optimizer = optimizer or optax.adamw(3e-3)
    return make_trainer(SHAPES[model], optimizer, GridShape(**axes), pipeline=PipelineConfig(**pipeline), **options)


def batches(vocab, width):
    return ids(vocab, 4, ROWS, width)


def curve(made, shape, steps=STEPS):
    given = batches(shape.vocab, shape.seq_len + 1)
    found = trainers.curve(made, again(given, steps))
    held_out = made.evaluate(given[:2])
    made.close()
    return np.asarray(found), held_out


@functools.cache
def one_stage(model):
    return curve(trainer(model, {}), SHAPES[model])


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[] if case in QUICK else [pytest.mark.slow]) for case in CASES]
)
def test_loss_curve_equals_the_one_stage_curve(case):
    model, axes, options = CASES[case]
    losses, held_out = curve(trainer(model, axes, **options), SHAPES[model])
    want, want_held_out = one_stage(model)
    np.testing.assert_allclose(losses[:, 0], want[:, 0], rtol=CURVE_TOLERANCE)
    np.testing.assert_allclose(losses[:, 1], want[:, 1], rtol=NORM_TOLERANCE)
    np.testing.assert_allclose(held_out, want_held_out, rtol=CURVE_TOLERANCE)
    assert losses[-1, 0] < losses[0, 0] - 0.05  # it does learn


@pytest.fixture(scope="module")
def two_stages():
    """The trainer of three steps of a pipeline of two."""
    made = trainer("gpt", {"pipe": 2})
    curve(made, GPT, steps=3)
    return made


def test_a_stage_holds_its_own_parameters_only_and_a_tied_table_is_the_same_at_both_ends(two_stages):
    first, last = (two_stages.engine.stores[place].weights for place in (0, 1))
    assert set(first) & set(last) == {"embedding.table"}
    assert "blocks.1.mlp.up.kernel" in last
    assert "positions.table" in first
    np.testing.assert_array_equal(first["embedding.table"], last["embedding.table"])
    assert first["embedding.table"].devices().isdisjoint(last["embedding.table"].devices())


def test_a_model_given_whole_and_one_made_stage_by_stage_start_equal():
    lazy = trainer("gpt", {"pipe": 2})
    given = ax.models.Transformer(GPT, rngs=nnx.Rngs(0))
    whole = make_trainer(given, optax.adamw(3e-3), GridShape(2), microbatches=MICROBATCHES, precision="fp32")
    for name, value in lazy.engine.params.items():
        # The same numbers are drawn; XLA may compute them in another fused loop, which has its own roundings: 2 ulp.
        np.testing.assert_array_max_ulp(np.asarray(value), np.asarray(whole.engine.params[name]), maxulp=2)
    lazy.close()
    whole.close()


def test_bfloat16_travels_in_bfloat16():
    made = trainer("llama", {"pipe": 2, "x": 2}, precision="bf16")
    losses, _ = curve(made, LLAMA, steps=4)
    want, _ = one_stage("llama")
    (pipe,) = (
        made.engine._pipes.values() if made.engine._pipes else [made.engine._prepare(batches(LLAMA.vocab, 9)[0])[0]]
    )
    assert all(
        stage.y is None or stage.y.dtype == jnp.bfloat16 for r in pipe.ranks.values() for stage in r.stages.values()
    )
    # bfloat16 has 8 bits: a few of its roundings (2^-9 each) on a loss.
    np.testing.assert_allclose(losses[:, 0], want[:4, 0], rtol=2e-2)
    made.close()


def test_every_task_is_on_the_timeline(two_stages):
    spans = two_stages.engine._links.recorder.spans(3)
    for place in (0, 1):
        names = [span.name for span in spans if span.rank == place]
        assert names.count("update") == 1
        for microbatch in range(MICROBATCHES):
            ran = {
                name.removesuffix(f"{place}.{microbatch}") for name in names if name.endswith(f"{place}.{microbatch}")
            }
            late = microbatch >= MICROBATCHES - 2
            if place == 0:
                assert ran in ([{"F", "I", "W"}] if late else [{"F", "B"}, {"F", "I", "W"}])
            else:  # the last stage has a forward and what follows it in one program
                assert ran in ([{"FI", "W"}] if late else [{"FB"}, {"FI", "W"}])
    assert last_complete_step(two_stages.engine._links.recorder.spans()) == 3
    assert all(span.end >= span.start for span in spans)


@pytest.mark.parametrize(
    ("policy", "first", "last"),
    [
        pytest.param("message", {"F", "B"}, {"FB"}, marks=pytest.mark.slow),
        ("zero-bubble", {"F", "I", "W"}, {"FI", "W"}),
    ],
)
def test_with_recomputation_only_zero_bubble_lets_weight_gradients_wait(policy, first, last):
    made = trainer("gpt", {"pipe": 2}, activations="full", policy=policy)
    made.step(batches(GPT.vocab, GPT.seq_len + 1)[0])
    kept = {
        place: rank.stages[place].residual_bytes()
        for pipe in made.engine._pipes.values()
        for place, rank in pipe.ranks.items()
    }
    spans = made.engine._links.recorder.spans(1)
    made.close()
    for place, programs in ((0, first), (1, last)):
        for microbatch in range(MICROBATCHES):
            end = f"{place}.{microbatch}"
            ran = {span.name.removesuffix(end) for span in spans if span.rank == place and span.name.endswith(end)}
            assert ran == programs
    assert (kept[1] == 0) is (policy == "message")


@pytest.mark.parametrize(
    ("free", "later"),
    [pytest.param(0, [2, 2], marks=pytest.mark.slow, id="full"), pytest.param(2**40, [3, 3], id="roomy")],
)
def test_after_the_first_step_more_microbatches_are_in_flight_where_there_is_memory_for_them(monkeypatch, free, later):
    asked, dispatcher = [], pipeline.dispatcher_of

    def ask(shape, pp_rank, policy):
        asked.append(policy.in_flight)
        return dispatcher(shape, pp_rank, policy)

    monkeypatch.setattr(build, "unused", lambda mesh, processes: free)
    monkeypatch.setattr(pipeline, "dispatcher_of", ask)
    made = trainer("llama", {"pipe": 2})
    for batch in batches(LLAMA.vocab, LLAMA.seq_len + 1)[:2]:
        made.step(batch)
    made.close()
    assert asked == [2, 2, *later]


def test_what_a_device_has_never_used_is_known_here():
    mesh = grids.lay(GridShape(pipe=2)).mesh
    assert 0 < unused(mesh, 4) == pytest.approx(unused(mesh, 1) / 4, rel=0.5)


def test_the_same_order_gives_the_same_bits():
    runs = [curve(trainer("gpt", {"pipe": 2}, policy="1f1b"), GPT, steps=5)[0] for _ in range(2)]
    np.testing.assert_array_equal(runs[0], runs[1])


def flax_layers():
    rngs = nnx.Rngs(0)
    layers = [nnx.Embed(32, 16, rngs=rngs), *(Block(rngs) for _ in range(3)), nnx.Linear(16, 32, rngs=rngs)]
    return ax.models.SequenceModel(layers, optax.softmax_cross_entropy_with_integer_labels)


@functools.cache
def of_flax_layers(**options):
    """A curve in buckets smaller than some parameters and larger than others."""
    axes = GridShape(**{axis: options.pop(axis) for axis in GRID_AXES if axis in options})
    made = make_trainer(flax_layers, optax.adam(1e-2), axes, microbatches=MICROBATCHES, clip=1.0, bucket=400, **options)
    found = trainers.curve(made, again(ids(32, 4, 2 * ROWS, 9), STEPS))
    for pipe in getattr(made.engine, "_pipes", {}).values():
        for rank in pipe.ranks.values() if "zero" not in options else ():
            memory = rank.reduce.memory_analysis()  # the gradients take the place of their sums
            assert memory.alias_size_in_bytes == memory.argument_size_in_bytes > 0
    made.close()
    return found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"pipe": 2}, marks=pytest.mark.slow),
        {"pipe": 2, "data": 2, "z": 2},
        pytest.param({"expert": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "expert": 2, "zero": 1}, marks=pytest.mark.slow),
        {"data": 2, "expert": 2, "z": 2, "zero": 1, "offload": "optimizer"},
        {"pipe": 2, "data": 2, "expert": 2, "zero": 1},
    ],
    ids=str,
)
def test_plain_flax_layers_train_over_a_pipeline_and_replicas_of_either_axis(options):
    """Where there are no experts, layers of plain Flax take the axis `expert` for a part of `data`."""
    found = of_flax_layers(**options)
    np.testing.assert_allclose(found[:4], of_flax_layers()[:4], rtol=CURVE_TOLERANCE)
    losses, want = (np.asarray(each)[:, 0] for each in (found, of_flax_layers()))
    np.testing.assert_allclose(losses, want, rtol=CURVE_TOLERANCE)
    assert losses[-1] < losses[0] - 0.1


def test_an_optimizer_that_looks_at_all_parameters_is_refused():
    both = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
    with pytest.raises(UserError, match=r"looks at all parameters together.*train\.clip"):
        trainer("gpt", {"pipe": 2}, optimizer=both)


@pytest.mark.parametrize(
    ("axes", "options", "said"),
    [
        ({"pipe": 2}, {"policy": "1f1b", "virtual_stages": 2}, "pipeline.virtual_stages = 2"),
        ({"pipe": 2}, {"split": "9,9"}, "pipeline.split"),
        ({"pipe": 8}, {"virtual_stages": 2}, "segments"),
        ({"pipe": 2}, {"channel": "mpi4py"}, "pipeline.channel"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_compiles(axes, options, said):
    with pytest.raises(UserError, match=said):
        trainer("gpt", axes, **options)
