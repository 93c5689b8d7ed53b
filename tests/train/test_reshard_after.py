"""However long gathered weights live, training goes on alike."""

import grids
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer

from axonn_jax import MemoryConfig, TensorConfig, UserError
from axonn_jax.models.transformer import Transformer
from axonn_jax.train.validate import check_settings

# In bfloat16 every device rounds its gradient of a microbatch; "layer" rounds the sum over `z` once more, "step" adds
# in float32. Entries of two programs then differ by a few roundings of 2**-9 each.
BF16_TOLERANCE = 8 * 2.0**-9

MIXED = grids.GridShape(1, 2, 2, 1, 2)


@pytest.mark.parametrize("gather", ["step", pytest.param("backward", marks=pytest.mark.slow)])
def test_in_bfloat16_gradients_differ_by_roundings(gather):
    layer, kept = (
        grids.gradients(grids.GPT, MIXED, dtype="bfloat16", activations="full", reshard_after=one)
        for one in ("forward", gather)
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
