"""Every grid of up to 8 devices, every way to cut, keep and recompute: the plain model's loss, gradients and norm."""

from dataclasses import replace
from itertools import product

import grids
import jax
import pytest
from trainers import same

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.tensor.params import split_module

# A gradient is a sum of rows * seq = 256 float32 products; rounding errors of n terms add up to about sqrt(n) eps.
# Measured over all grids of both dense models: at most 6.2 eps of a gradient's largest entry (grids allows 16); loss
# and norm are averages over everything, so single roundings remain: at most 1.3 eps (4).
DROPOUT = {"gpt dropout": replace(grids.GPT, dropout=0.25)}
"""Whose masks are those of one device; the plain model has none."""
SHAPES = grids.MODELS | grids.EXPERTS | DROPOUT
GATHER = {"layout": {"comm": BlockComm(attention=True, mlp=True)}}
SPLIT = {"layout": {"comm": BlockComm(sequence_split=True)}}
POLICIES = ("none", "full", "dots", "save_collectives")
HALVES = {"sub_batches": 2, "ordered": True}
SMALL_BUCKETS = {"bucket": 3000}
ZYX, DZX, Z4Y = GridShape(z=2, y=2, x=2), GridShape(data=2, z=2, x=2), GridShape(z=4, y=2)
DYX = GridShape(data=2, y=2, x=2)
EZY, EYX, DEY = GridShape(z=2, y=2, expert=2), GridShape(y=2, x=2, expert=2), GridShape(data=2, y=2, expert=2)

FEW = [
    ("gpt", ZYX, SMALL_BUCKETS),
    ("gpt", GridShape(x=8), SMALL_BUCKETS),
    ("llama", GridShape(data=4, y=2), SMALL_BUCKETS),
    ("llama", GridShape(z=4, x=2), SMALL_BUCKETS),
    ("llama", GridShape(y=4, x=2), SMALL_BUCKETS),
    ("llama", GridShape(data=2, x=4), GATHER | {"activations": "full", "scanned": True}),
    ("gpt", GridShape(z=2, y=4), SPLIT | {"activations": "full", "scanned": True}),
    ("gpt", DZX, HALVES | SMALL_BUCKETS),
    ("llama", ZYX, HALVES | {"activations": "save_collectives"}),
    ("llama", ZYX, {"sub_batches": 2}),
    ("gpt", Z4Y, {"reshard_after": "backward", "activations": "save_collectives", "scanned": True}),
    ("llama", DZX, {"reshard_after": "step", "scanned": True}),
    ("gpt dropout", ZYX, HALVES),
    ("gpt dropout", ZYX, SPLIT),
    ("gpt dropout", DZX, HALVES | {"activations": "save_collectives", "scanned": True}),
    ("mixtral", GridShape(), SMALL_BUCKETS),  # and every pair of axes above one
    ("mixtral", EZY, SMALL_BUCKETS),
    ("mixtral", GridShape(data=2, x=2, expert=2), SMALL_BUCKETS),
    ("mixtral", GridShape(y=2, expert=4), SMALL_BUCKETS),
    ("mixtral", GridShape(data=2, z=2, y=2), SMALL_BUCKETS),
    ("mixtral", EYX, SPLIT | SMALL_BUCKETS | {"activations": "full"}),
    ("mixtral", EZY, SMALL_BUCKETS | {"reshard_after": "step", "sub_batches": 2}),
    ("dense first", EZY, {}),
    ("sparse", EZY, SMALL_BUCKETS),
]


def more():
    """Those of the long run: products, which may have those of `FEW` again."""
    for model, axes in product(grids.MODELS, grids.all_grids(1, 2, 4, 8)):
        yield model, axes, SMALL_BUCKETS
        for policy in POLICIES:
            options = {"activations": policy}
            if axes.x > 1:
                yield model, axes, GATHER | options | {"scanned": policy in ("full", "dots")}
            if axes.y > 1:
                yield model, axes, SPLIT | options | {"scanned": policy != "none"}
            if axes.devices != 4:
                yield model, axes, options | {"scanned": True}
            if axes in (GridShape(), ZYX, DZX):
                yield model, axes, options | HALVES
            if axes in (ZYX, DZX, Z4Y):
                for reshard_after, scanned in product(("backward", "step"), (False, True)):
                    yield model, axes, options | {"reshard_after": reshard_after, "scanned": scanned}
    for model, axes in product(grids.MODELS, (ZYX, DZX)):
        yield model, axes, {"layout": {"comm": BlockComm(attention=True)}}
        yield model, axes, {"layout": {"comm": BlockComm(mlp=True)}, "activations": "full"}
        yield model, axes, GATHER | HALVES
        yield model, axes, GATHER | HALVES | {"activations": "save_collectives"}
        yield model, axes, GATHER | {"zero": True}
        yield model, axes, GATHER | {"reshard_after": "step", "activations": "full"}
    for model, axes in product(grids.MODELS, (ZYX, DYX)):
        yield model, axes, SPLIT | {"sub_batches": 2}
        yield model, axes, SPLIT | {"ordered": True}
        yield model, axes, SPLIT | HALVES | {"activations": "save_collectives"}
    for reshard_after in ("backward", "step"):
        yield "gpt", DZX, HALVES | {"reshard_after": reshard_after, "activations": "full"}
    yield "llama", ZYX, {"sub_batches": 2, "activations": "full"}
    yield "gpt dropout", ZYX, {"sub_batches": 2}
    yield "gpt dropout", ZYX, {"ordered": True}
    for policy in ("none", "full"):
        yield "gpt dropout", ZYX, SPLIT | {"sub_batches": 2, "activations": policy}
    sizes = (1, 2, 4, 8)
    for data, expert, z, y, x in product(sizes, (1, 2, 4), sizes, sizes, sizes):
        if data * expert * z * y * x <= 8:
            yield "mixtral", GridShape(1, data, z, y, x, expert=expert), SMALL_BUCKETS
    yield "mixtral", EZY, SPLIT
    yield "mixtral", EZY, {"activations": "full", "scanned": True}
    yield "mixtral", EZY, {"activations": "dots"}
    yield "mixtral", EYX, {"activations": "save_collectives"}
    yield "mixtral", EZY, HALVES
    yield "mixtral", DEY, {"zero": True, "scanned": True}
    yield "deepseek", EZY, SMALL_BUCKETS


def case_name(model, axes, options):
    words = [f"{key}={value}" for key, value in options.items() if key != "layout"]
    if comm := options.get("layout", {}).get("comm"):
        words.append("split" if comm.sequence_split else str(comm).removeprefix("residual communication: "))
    return "-".join([model, grids.name(axes), *words])


def cases():
    few = {case_name(*one): pytest.param(*one) for one in FEW}
    slow = {case_name(*one): pytest.param(*one, marks=pytest.mark.slow) for one in more()}
    return [pytest.param(*one.values, marks=one.marks, id=name) for name, one in (slow | few).items()]


@pytest.mark.parametrize(("model", "axes", "options"), cases())
def test_loss_gradients_and_norm_equal_the_plain_model(model, axes, options):
    want = grids.one_device(SHAPES[model]) if model in DROPOUT else grids.reference(model)
    grids.check_gradients(grids.gradients(SHAPES[model], axes, **options), want)


@pytest.mark.parametrize("model", grids.MODELS)
def test_parameters_are_born_sharded_and_do_not_depend_on_the_grid(model):
    shape = grids.MODELS[model]
    whole = split_module(grids.make_model(shape, grids.lay(GridShape()))).params
    grid = grids.lay(GridShape(1, 1, 2, 2, 2))
    parts = split_module(grids.make_model(shape, grid))
    same(parts.params, whole)
    for name, value in parts.params.items():
        spec_sharding = jax.sharding.NamedSharding(grid.mesh, parts.specs[name])
        assert value.sharding.is_equivalent_to(spec_sharding, value.ndim), name
