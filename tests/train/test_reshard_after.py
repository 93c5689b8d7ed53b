"""However long gathered weights live, loss, gradients and norm are those of one device; and what lives is counted."""

import functools

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax.errors import UserError
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.config import MemoryConfig, TensorConfig
from axonn_jax.train.validate import check_settings

# In bfloat16 every device rounds its gradient of a microbatch; "layer" rounds the sum over `z` once more, "step" adds
# in float32. Entries of two programs then differ by a few roundings of 2**-9 each.
BF16_TOLERANCE = 8 * 2.0**-9

MIXED, DEEP, WIDE = grids.GridShape(1, 2, 2, 1, 2), grids.GridShape(1, 1, 4, 2, 1), grids.GridShape(1, 1, 2, 2, 2)


def results(model, axes, **options):
    """Gradients by the layers' own names, loss and norm of two microbatches, summed over `z` before or after."""
    return grids.gradients(grids.MODELS[model], axes, **options)


@functools.cache
def reference(model):
    return results(model, grids.GridShape())


FEW = [("gpt", DEEP, "backward", "save_collectives", True, {}), ("llama", MIXED, "step", "none", True, {})]
REST = [
    (model, axes, gather, activations, scanned, {})
    for model in ("gpt", "llama")
    for axes in (MIXED, DEEP, WIDE)
    for gather in ("backward", "step")
    for activations in ("none", "full", "dots", "save_collectives")
    for scanned in (False, True)
    if (model, axes, gather, activations, scanned, {}) not in FEW
] + [("gpt", MIXED, gather, "full", False, {"sub_batches": 2, "ordered": True}) for gather in ("backward", "step")]


def case_name(value):
    return grids.name(value) if isinstance(value, grids.GridShape) else None


@pytest.mark.parametrize(
    ("model", "axes", "gather", "activations", "scanned", "options"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.slow) for one in REST)],
    ids=case_name,
)
def test_gradients_are_those_of_one_device(model, axes, gather, activations, scanned, options):
    got = results(model, axes, scanned=scanned, reshard_after=gather, activations=activations, **options)
    grids.check_gradients(got, reference(model))


@pytest.mark.parametrize("gather", ["step", pytest.param("backward", marks=pytest.mark.slow)])
def test_in_bfloat16_gradients_differ_by_roundings(gather):
    layer, kept = (
        results("gpt", MIXED, dtype="bfloat16", activations="full", reshard_after=one) for one in ("forward", gather)
    )
    grids.check_gradients(kept, layer, BF16_TOLERANCE, 2.0**-9)


OPTIONS = [
    {},
    {"zero": 1},
    {"offload": "optimizer", "bucket": 1000},
    {"zero": 1, "offload": "optimizer", "bucket": 1000, "accumulate": "compute", "precision": "bf16"},
    {"precision": "fp16"},
]


@pytest.mark.slow
@pytest.mark.parametrize("reshard_after", ["backward", "step"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_training_goes_on_alike(options, reshard_after):
    layer, kept = (losses(reshard_after=one, **{"precision": "fp32"} | options) for one in ("forward", reshard_after))
    tolerance = 1e-5 if options.get("precision", "fp32") == "fp32" else 1e-2
    np.testing.assert_allclose(kept, layer, rtol=tolerance)
    assert kept[-1] < kept[0]


def losses(**options):
    """Of a few steps on one batch in two microbatches."""
    grid, batch = grids.lay(MIXED), grids.tokens(grids.GPT.vocab, 1, 16, grids.GPT.seq_len)[0]
    trainer = make_trainer(
        lambda: Transformer(grids.GPT, rngs=nnx.Rngs(0)), optax.adamw(1e-2), grid,
        microbatches=2, clip=0.5, activations="full", **options,
    )  # fmt: skip
    return [float(trainer.step(batch)["loss"]) for _ in range(4)]


def test_a_pipeline_keeps_none():
    with pytest.raises(UserError, match=r"memory.reshard_after = 'step': forward where grid.pipe is above 1"):
        check_settings(2, MemoryConfig(reshard_after="step"), TensorConfig())
    check_settings(2, MemoryConfig(), TensorConfig())
