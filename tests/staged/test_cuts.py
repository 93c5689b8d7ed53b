"""Where a traced loss is cut, and what crosses; nothing is compiled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import staged_models as models
from flax import nnx

import axonn_jax as ax
from axonn_jax.any_flax.modules.nnx_model import NnxLossModel
from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.staged.crossing import Crossing
from axonn_jax.staged.loss_trace import Replicas, trace_loss
from axonn_jax.staged.stage_trace import shapes, stage_parts
from axonn_jax.staged.units import Flow, module_of, units_of

ROWS = 4


def flow_of(name, axes=GridShape(), *, training=True):  # noqa: B008
    make, loss, batches, _ = models.MODELS[name]
    grid = build_grid(axes, jax.devices()[: axes.devices])
    model = make() if axes.devices == 1 else ax.parallelize(make(), grid)
    loss_model = NnxLossModel(model, loss, nnx.Param, None, grid.mesh)
    batch = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct((ROWS, *leaf.shape[1:]), leaf.dtype), batches(1)[0])
    batch = jax.tree.map(lambda leaf: leaf.update(dtype=jax.dtypes.canonicalize_dtype(leaf.dtype)), batch)
    with grid.entered():
        trace = trace_loss(
            loss_model, Replicas(grid.mesh), loss_model.params, loss_model.carried, batch, training=training
        )
    return Flow(trace), {path: value.size for path, value in loss_model.params.items()}


def crossing_of(flow, unit):
    return [(var.aval.shape, str(var.aval.dtype)) for var in flow.crossing(unit.begin)]


@pytest.mark.parametrize("axes", [GridShape(), GridShape(data=2, z=2, y=2)], ids=["one device", "data 2 z 2 y 2"])
def test_the_residual_stream_alone_crosses_between_blocks(axes):
    flow, sizes = flow_of("language", axes)
    units = units_of(flow, sizes)
    blocks = [f"layers.{number}{part}" for number in range(3) for part in ("", ".up")]
    assert [unit.name for unit in units] == ["table", "positions", *blocks, "norm"]
    for unit in units[1:]:
        assert crossing_of(flow, unit) == [((ROWS, models.SEQ, models.WIDTH), "float32")]
    # Blocks cost the same, and all parameters are in some unit, a tied table in its first.
    assert len({unit.flops for unit in units[2:8:2]}) == len({unit.flops for unit in units[3:8:2]}) == 1
    assert sum(unit.params for unit in units) == sum(sizes.values())


@pytest.mark.parametrize("name", ["language", "mixture", "unet", "vision", "translation"])
def test_units_that_are_named_are_those_that_were_chosen(name):
    """A rank that is told the names cuts where the rank that chose them does, also in an evaluation."""
    flow, sizes = flow_of(name)
    units = units_of(flow, sizes)
    names = {unit.name for unit in units}
    assert len(names) == len(units)
    assert units_of(flow, sizes, names=names) == units
    evaluation, _ = flow_of(name, training=False)
    in_it = [unit.name for unit in units_of(evaluation, sizes, names=names)]
    assert in_it == [unit.name for unit in units if unit.name in in_it]


def test_a_loss_of_all_blocks_crosses_as_one_number():
    flow, sizes = flow_of("mixture")
    blocks = [unit for unit in units_of(flow, sizes) if unit.name.startswith("blocks")]
    stream = ((ROWS, models.SEQ, models.WIDTH), "float32")
    assert [crossing_of(flow, unit) for unit in blocks] == [
        [stream],
        [stream, ((), "float32")],
        [stream, ((), "float32")],
    ]


def test_skips_hop_from_stage_to_stage():
    flow, sizes = flow_of("unet")
    begins = {unit.name: unit for unit in units_of(flow, sizes)}
    # The way up of a size reads the skip of that size; the time is read on the way down.
    assert len(crossing_of(flow, begins["down.1"])) == 3  # both skips and the time; h is the second skip
    assert len(crossing_of(flow, begins["up.0"])) == 3  # h and both skips
    assert len(crossing_of(flow, begins["up.1"])) == 2


@pytest.mark.parametrize("training", [True, False], ids=["training", "evaluation"])
def test_statistics_lie_in_the_stage_of_their_layer(training):
    flow, sizes = flow_of("vision", training=training)
    units = units_of(flow, sizes)
    assert [unit.name for unit in units] == ["features.0", "features.1", "features.2", "features.3", "head"]
    parts = stage_parts(flow, [units[1].begin, units[3].begin])
    layer = "features.1.{}".format
    assert {layer("mean"), layer("var")} <= set(parts[1].state)
    assert not any(name.startswith("features.1") for part in (parts[0], parts[2]) for name in part.state)
    written = [slot.name for part in parts for slot in part.results if slot.kind == "state"]
    assert sorted(written) == (
        ["features.1.mean", "features.1.var", "features.3.mean", "features.3.var"] if training else []
    )


@pytest.mark.parametrize("name", ["language", "mixture", "unet", "vision", "translation"])
def test_every_unit_is_a_cut_and_stages_are_the_whole(name):
    """All stages in turn are the loss; each reads its parameters alone."""
    flow, sizes = flow_of(name)
    units = units_of(flow, sizes)
    parts = stage_parts(flow, [unit.begin for unit in units[1:]])
    assert set().union(*(part.params for part in parts)) == set(sizes)
    rng = np.random.default_rng(0)

    def value(slot, aval):
        if slot.kind == "key":
            return jax.random.key(1)
        if slot.kind == "rows":
            return (
                rng.integers(0, 10, aval.shape).astype(aval.dtype) if aval.dtype == jnp.int32 else jnp.ones(aval.shape)
            )
        return (
            jnp.asarray(rng.normal(size=aval.shape), aval.dtype)
            if slot.kind == "param"
            else jnp.ones(aval.shape, aval.dtype)
        )

    values = {slot: value(slot, var.aval) for var, slot in flow.slot_of.items()}
    run = Replicas(build_grid(GridShape(), jax.devices()[:1]).mesh).region
    spec = jax.sharding.PartitionSpec()

    def whole(values):
        return jax.extend.core.jaxpr_as_fun(flow.trace.closed)(*(values[slot] for slot in flow.trace.inputs))[0]

    def by_stages(values):
        there = []
        for part in parts:
            args = [*(values[slot] for slot in part.slots), *there]
            out = jax.extend.core.jaxpr_as_fun(part.closed)(*args)
            there = out[len(part.results) :]
        return out[0]

    got, want = (float(jax.jit(run(each, (spec,), spec))(values)) for each in (by_stages, whole))
    np.testing.assert_allclose(got, want, rtol=16 * np.finfo(np.float32).eps)


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("layers.3.attention.query.kernel", "layers.3"),
        ("encoder.layers.0.norm.scale", "encoder.layers.0"),
        ("Block_3.Dense_0.kernel", "Block_3"),
        ("layer1.0.conv1.kernel", "layer1.0"),
        ("head.kernel", "head"),
        ("positions", "positions"),
    ],
)
def test_an_entry_of_a_list_is_a_module(name, module):
    assert module_of(name) == module


def test_bytes_of_a_message_are_the_values():
    rng = np.random.default_rng(0)
    values = [
        jnp.asarray(rng.normal(size=(ROWS, 3)), jnp.bfloat16),
        jnp.asarray(rng.integers(-9, 9, (ROWS, 2)), jnp.int32),
        jnp.asarray([True, False, True]),
        jnp.float32(2.5),
        jax.random.key(7),
    ]
    replicas = Replicas(build_grid(GridShape(), jax.devices()[:1]).mesh)
    forms = tuple(jax.ShapeDtypeStruct(value.shape, value.dtype) for value in values)
    crossing = Crossing(replicas, ROWS, (forms, forms[:1]))
    assert not crossing.plain
    packed = crossing.pack(values)
    assert packed.shape == crossing.struct.shape[1:]
    for got, want in zip(crossing.unpack(packed, forms), values, strict=True):
        if jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            got, want = jax.random.key_data(got), jax.random.key_data(want)
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, want)
    alone = Crossing(replicas, ROWS, (forms[:1], forms[:1], forms[:1]))
    assert alone.plain
    assert alone.pack(values[:1]) is values[0]
    assert shapes(()) == ()
