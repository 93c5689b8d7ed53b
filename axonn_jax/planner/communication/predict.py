"""Every collective of a training step, read from the model's declaration."""

from collections.abc import Iterator

from axonn_jax.models.declared.transformer import describe
from axonn_jax.ops.costs import collectives, update_collectives
from axonn_jax.ops.language import FLOAT32, Layer
from axonn_jax.ops.layers import Place
from axonn_jax.planner.communication.step import DATA, EXPERT, Predicted, StepSpec, X, Y, Z


def predict(work: StepSpec) -> tuple[Predicted, ...]:
    """Return every collective of a step over a group larger than one; needs neither jax nor a device.

    Raises:
        UserError: Model or batch do not divide over the grid.
    """
    work.shape.check_grid(work.grid, sequence_split=work.comm.sequence_split)
    work.comm.check(work.shape, work.grid)
    work.grid.check_batch(work.sequences, work.microbatches)
    return tuple(sent for sent in (*predict_microbatch(work), *predict_update(work)) if sent.group > 1)


def predict_microbatch(work: StepSpec) -> Iterator[Predicted]:
    """Yield the collectives before the update of a step that divides over its grid, groups of one device included."""
    for row in collectives(_layers(work), work.policy):
        yield work.row(*row)


def predict_update(work: StepSpec) -> Iterator[Predicted]:
    """Yield the collectives once a step, groups of one device included.

    Gradients in float32, over `data` and `expert`, and over `z` too where a parameter is replicated there; with the
    sequence split over `y` as well: norms, biases added to the stream, positions. Buckets change the number of
    messages, not their bytes. Then the number of targets that count, the mean loss and the global norm: a scalar each.
    """
    batch = (DATA, EXPERT, Z)
    over = (*batch, Y) if work.comm.sequence_split else batch
    for row in update_collectives(_layers(work), work.policy, work.sizes, over):
        yield work.row(*row)
    yield work.row("targets", "update", "all-reduce", batch, FLOAT32, 1)
    yield work.row("mean loss", "update", "all-reduce", batch, FLOAT32, 1)
    norms = (EXPERT, Z, Y, X) if work.shape.routed_layers else (Z, Y, X)
    yield work.row("global norm", "update", "all-reduce", norms, FLOAT32, 1)


def _layers(work: StepSpec) -> tuple[Layer, ...]:
    grid, split = work.grid, work.comm.sequence_split
    at = Place(grid.expert, grid.z, grid.y, grid.x, work.tokens, work.itemsize, split)
    return describe(work.shape, at, work.comm, work.moe, duplicates=work.duplicates)
