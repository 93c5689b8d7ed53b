"""However long gathered weights live, training goes on alike."""

import grids
import pytest

from axonn_jax import MemoryConfig, TensorConfig, UserError
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


def test_a_pipeline_keeps_none():
    with pytest.raises(UserError, match=r"memory.reshard_after = 'step': forward where grid.pipe is above 1"):
        check_settings(2, MemoryConfig(reshard_after="step"), TensorConfig())
    check_settings(2, MemoryConfig(), TensorConfig())
