"""Comparison of this package's logits with those of transformers, for ``axonn-jax convert --check``."""

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from axonn_jax.core.terminal import say

if TYPE_CHECKING:
    from axonn_jax.core.models.config import ModelShape

_CHECKED_TOKENS = 64


def compare(run_side: Path, transformers_side: Path, shape: "ModelShape") -> dict[str, float]:
    """Compare logits of 64 random tokens, both computed in float32 on the CPU.

    Args:
        run_side: Directory that this package loads.
        transformers_side: Hugging Face directory of the same model, which transformers loads.
        shape: Sizes of the model.

    Returns:
        The largest difference of the logits, and the largest logit of transformers.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    import transformers

    from axonn_jax.core.grid import GridShape, build_grid
    from axonn_jax.text.inference.programs import logits
    from axonn_jax.text.inference.weights import of_run

    # On the same hardware, a difference in the logits can only come from the models.
    jax.config.update("jax_platforms", "cpu")
    grid = build_grid(GridShape(), jax.devices()[:1])
    length = min(_CHECKED_TOKENS, shape.seq_len)
    tokens = np.random.default_rng(0).integers(0, shape.vocab, (1, length), dtype=np.int32)
    loaded = of_run(run_side, grid, jnp.float32, shape=shape, warn=say)
    forward = jax.jit(partial(logits, loaded.parts, grid.mesh))
    local_logits = np.asarray(forward(loaded.params, tokens))
    model = transformers.AutoModelForCausalLM.from_pretrained(transformers_side, dtype=torch.float32)
    with torch.no_grad():
        reference = model(torch.from_numpy(tokens).long()).logits.numpy()
    return {
        "largest_difference": float(np.abs(local_logits[..., : shape.vocab] - reference).max()),
        "largest_logit": float(np.abs(reference).max()),
    }
