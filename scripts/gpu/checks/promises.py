"""What the Trainer promises on any device: it runs, it learns, and it updates in place."""

import math

import jax
import numpy as np
import optax
from flax import nnx

import axonn_jax
from axonn_jax.models import ModelShape, Transformer
from checks.report import Row

_STEPS = 5


def trainer(shape: ModelShape) -> Row:
    """Steps on one batch, in the precision a user gets by default; the old parameters' memory must be the new's."""
    grid = axonn_jax.init()
    model = Transformer(shape, rngs=nnx.Rngs(0))
    train = axonn_jax.Trainer(model, optax.adamw(1e-3), grid, microbatches=2, clip=1.0)
    batch = np.random.default_rng(3).integers(0, shape.vocab, (4, shape.seq_len + 1), dtype=np.int32)
    state = jax.tree.leaves(train.train_state)
    state_bytes = sum(leaf.nbytes for leaf in state)
    aliased = getattr(train.compiled_step(batch).memory_analysis(), "alias_size_in_bytes", None)
    losses = [float(train.step(batch)["loss"])]
    kept = sum(not leaf.is_deleted() for leaf in state)
    losses += [float(train.step(batch)["loss"]) for _ in range(_STEPS - 1)]

    share = None if aliased is None else aliased / state_bytes
    learns = all(map(math.isfinite, losses)) and losses[-1] < losses[0]
    # Padding may make the alias a little larger; a parameter that is not reused makes it smaller.
    donated = kept == 0 and (share is None or share >= 0.999)
    note = f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; {len(state) - kept} of {len(state)} buffers donated"
    note += "" if share is None else f", {100 * share:.1f} % of the state updated in place"
    figures = {"losses": losses, "buffers": len(state), "kept": kept, "aliased_share": share}
    return Row("parity", "Trainer, 5 steps, donation", "ok" if learns and donated else "failed", note, figures)
