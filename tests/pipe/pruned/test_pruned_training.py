"""Pruned training: the curve of dense training with masked gradients, on every grid, however state is kept."""

import io
import zipfile

import grids
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pruned_runs import DENSITY, PRUNE, SHAPE, curve, largest, model, optimizer
from trainers import make_trainer, same
from trainers import params as params_of

import axonn_jax as ax
from axonn_jax.core.grid import GridShape
from axonn_jax.core.pruned.prune import make_masks, prunable
from axonn_jax.core.tensor.params import split_module

CURVE_TOLERANCE = grids.CURVE_TOLERANCE


def masked(masks):
    def update(grads, state, params=None):
        return {name: grad * masks[name] if name in masks else grad for name, grad in grads.items()}, state

    return optax.GradientTransformation(lambda params: optax.EmptyState(), update)


def dense_oracle(steps, shape=SHAPE, **options):
    """Dense training from masked weights, gradients multiplied by the masks: updates of other entries are zero then."""
    with grids.lay(GridShape()).entered():  # as a trainer makes it: eager, the last bits are others
        parts = split_module(model(shape)())
    found = {name: largest(np.asarray(parts.params[name])) for name in prunable(parts, "blocks")}
    masks = {name: jnp.asarray(mask, jnp.float32) for name, mask in found.items()}
    weights = {name: value * masks.get(name, 1.0) for name, value in parts.params.items()}
    chain = optax.chain(masked(masks), optimizer())  # a mask behind it would round what else is one multiply-add
    made = make_trainer(parts.merge(weights), chain, grids.lay(GridShape()), **options)
    return *curve(made, steps, shape), found


@pytest.fixture(scope="module")
def dense():
    """Losses and weights of the oracle; and with them norms of the kept gradients, of one device."""
    losses, params, masks = dense_oracle(8, microbatches=2)
    one, _ = curve(make_trainer(model(), optimizer(), grids.lay(GridShape()), prune=PRUNE, microbatches=2), 8)
    np.testing.assert_allclose([loss for loss, _ in one], [loss for loss, _ in losses], rtol=CURVE_TOLERANCE)
    return one, params, masks


@pytest.mark.bits
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"microbatches": 2, "activations": "dots", "scan_layers": "no"},
    ],
    ids=str,
)
def test_bit_for_bit_as_dense_training_with_masked_gradients(options):
    losses, params, masks = dense_oracle(50, **options)
    pruned = make_trainer(model(), optimizer(), grids.lay(GridShape()), prune=PRUNE, **options)
    got, values = curve(pruned, 50)
    assert [loss for loss, _ in got] == [loss for loss, _ in losses]
    same(values, params)
    for name, mask in masks.items():
        assert not values[name][~mask].any()
        assert np.count_nonzero(values[name]) == mask.sum() == round(mask.size * DENSITY)


# `test_cases` has pruned runs beside every other setting; these have the weights, too.
WAYS = [
    (GridShape(1, 1, 1, 4, 2), {}),
    (GridShape(1, 2, 1, 2), {"offload": "optimizer", "zero": 1, "bucket": 500}),
    (GridShape(2, 2, 1, 2), {"offload": "optimizer", "zero": 1}),
]
FURTHER = [
    (GridShape(), {"scan_layers": "yes", "activations": "full"}),
    (GridShape(1, 2), {"zero": 1}),
    (GridShape(1, 2, 2, 1, 1), {"zero": 1, "scan_layers": "yes"}),
    (GridShape(1, 1, 2, 2, 2), {"activations": "full"}),
    (GridShape(1, 1, 2, 1, 2), {"reshard_after": "step", "sub_batches": 2}),
    (GridShape(1, 2, 1, 2), {"offload": "optimizer"}),
    *((axes, {}) for axes in grids.all_grids(2, 4, 8) if (axes, {}) not in WAYS),
    (GridShape(2), {}),
    (GridShape(2, 1, 1, 2, 2), {"activations": "full"}),
    (GridShape(2, 2), {"zero": 1}),
    (GridShape(2), {"pipeline": ax.PipelineConfig(virtual_stages=2)}),
]


@pytest.mark.parametrize(("axes", "options"), [*WAYS, *(pytest.param(*one, marks=pytest.mark.slow) for one in FURTHER)])
def test_curves_coincide_on_grids(axes, options, dense):
    want, params, masks = dense
    options = {"microbatches": 4 if axes.pipe > 1 else 1 if axes.batch_shards == 8 else 2, **options}
    trainer = make_trainer(model(), optimizer(), grids.lay(axes), prune=PRUNE, **options)
    bytes_of = trainer.engine.memory()[0]
    assert bytes_of["counted_between_steps"]["host"] == bytes_of["planned"]["host"]
    got, values = curve(trainer, len(want))
    np.testing.assert_allclose(got, want, rtol=CURVE_TOLERANCE)
    for name, mask in masks.items():
        np.testing.assert_array_equal(values[name] != 0, mask, err_msg=name)
        np.testing.assert_allclose(values[name], params[name], atol=2e-4, err_msg=name)


def test_the_norm_that_is_clipped_is_that_of_kept_entries(dense):
    _, _, masks = dense
    parts = split_module(model()())
    weights = {name: value * jnp.asarray(masks.get(name, 1.0), jnp.float32) for name, value in parts.params.items()}
    found = {name: jnp.asarray(mask, jnp.float32) for name, mask in masks.items()}
    chain = optax.chain(masked(found), optax.clip_by_global_norm(0.5), optimizer(), masked(found))
    want, _ = curve(make_trainer(parts.merge(weights), chain, grids.lay(GridShape())), 6)
    axes = GridShape(1, 2, 2, 2)
    got, _ = curve(make_trainer(model(), optimizer(), grids.lay(axes), prune=PRUNE, clip=0.5, zero=1), 6)
    np.testing.assert_allclose([loss for loss, _ in got], [loss for loss, _ in want], rtol=CURVE_TOLERANCE)


@pytest.mark.parametrize("axes", [pytest.param(GridShape(), marks=pytest.mark.slow), GridShape(2, 1, 1, 2)], ids=str)
def test_masks_of_a_file(axes, dense, tmp_path):
    _, _, masks = dense
    np.savez(tmp_path / "masks.npz", **masks)
    prune = ax.PruneConfig(method="file", mask_file=str(tmp_path / "masks.npz"))
    trainer = make_trainer(model(), optimizer(), grids.lay(axes), prune=prune, microbatches=2)
    values = params_of(trainer)
    trainer.close()
    for name, mask in masks.items():
        np.testing.assert_array_equal(values[name] != 0, mask)


def test_a_mask_is_no_larger_than_its_parameter_before_memory_is_taken(tmp_path):
    """A file of some bytes says that its array has a petabyte."""
    path, header = tmp_path / "masks.npz", io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "|b1", "fortran_order": False, "shape": (10**15,)})
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("kernel.npy", header.getvalue())
    prune = ax.PruneConfig(method="file", mask_file=str(path))
    with pytest.raises(ax.UserError, match=r"bool \(4, 4\) for kernel, which is bool \(1000000000000000,\)"):
        make_masks(prune, {"kernel": jnp.ones((4, 4))}, ["kernel"])
