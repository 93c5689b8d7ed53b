"""Logits of this package's model beside those of transformers, for ``axonn-jax convert --check``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.terminal import say

if TYPE_CHECKING:
    from axonn_jax.models.config import ModelShape

_CHECKED_TOKENS = 64


def compare(run_side: Path, theirs_at: Path, shape: "ModelShape") -> dict[str, float]:
    """The largest difference of logits between this package's model and transformers', and the largest logit.

    Both compute in float32 on the CPU.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from axonn_jax.grid import GridShape, build_grid
    from axonn_jax.inference.programs import logits
    from axonn_jax.inference.weights import of_run

    jax.config.update("jax_platforms", "cpu")  # accelerators are none of its business
    grid = build_grid(GridShape(), jax.devices()[:1])
    length = min(_CHECKED_TOKENS, shape.seq_len)
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (1, length), dtype=np.int32)
    loaded = of_run(run_side, grid, jnp.float32, shape=shape, warn=say)
    forward = jax.jit(partial(logits, loaded.parts, grid.mesh))
    ours = np.asarray(forward(loaded.params, tokens))
    model = transformers.AutoModelForCausalLM.from_pretrained(theirs_at, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.from_numpy(tokens).long()).logits.numpy()
    return {
        "largest_difference": float(np.abs(ours[..., : shape.vocab] - theirs).max()),
        "largest_logit": float(np.abs(theirs).max()),
    }
