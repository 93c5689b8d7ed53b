"""Every collective of a training step, in the order of the model."""

from collections.abc import Iterator

from axonn_jax.planner.communication.dense import BlockMatmul, activations, block_matmuls, norm, scatter, weight
from axonn_jax.planner.communication.experts import expert_gradients, predict_experts
from axonn_jax.planner.communication.step import DATA, EXPERT, FLOAT32, Predicted, StepSpec, X, Y, Z
from axonn_jax.planner.machines.network import CollectiveKind


def predict(work: StepSpec) -> tuple[Predicted, ...]:
    """Every collective of a step over a group larger than one; needs neither jax nor a device.

    Raises ``UserError`` where model or batch do not divide over the grid.
    """
    work.shape.check_grid(work.grid, sequence_split=work.comm.sequence_split)
    work.comm.check(work.shape, work.grid)
    work.grid.check_batch(work.sequences, work.microbatches)
    return tuple(sent for sent in (*predict_microbatch(work), *predict_update(work)) if sent.group > 1)


def predict_microbatch(work: StepSpec) -> Iterator[Predicted]:
    """Yields what comes before the update of a step that divides over its grid, groups of one device included."""
    shape, again = work.shape, work.again
    head = BlockMatmul("head", shape.hidden, work.vocab, X)
    yield from _embedding(work)
    for matmul in block_matmuls(shape, work.comm):
        yield from weight(work, matmul, again)
        yield from activations(work, matmul, again)
    yield from predict_experts(work)
    for name in ("blocks.attention_norm", "blocks.mlp_norm"):
        yield from norm(work, name, shape.layers, again)
    for name in ("q_norm", "k_norm") if shape.qk_norm else ():  # the gradient of a weight that all heads have
        over = () if work.comm.sequence_split else (Y, X) if work.comm.attention else (Y,)
        each = shape.layers * work.microbatches
        yield work.row(f"blocks.{name}", "backward", "all-reduce", over, shape.head_dim * FLOAT32, each)
    yield from norm(work, "norm", 1, False)
    if not shape.tied:  # else it goes with the embedding
        yield from weight(work, head, False)
    yield from activations(work, head, False)
    # Cross-entropy: the largest logit of a token, then the sum of exponentials beside the target's logit.
    yield work.row("loss", "forward", "all-reduce", (Y,), work.rows * FLOAT32, work.microbatches)
    yield work.row("loss", "forward", "all-reduce", (Y,), 2 * work.rows * FLOAT32, work.microbatches)


def _embedding(work: StepSpec) -> Iterator[Predicted]:
    """Table over (y, z) x x: gathered over z, rows of the y shards added; learned positions over z x x: gathered."""
    shape, item = work.shape, work.itemsize
    table = work.vocab * shape.hidden * item // work.size(X, Y)
    stream = work.rows * shape.hidden * item // work.size(X)
    yield work.row("embedding", "forward", "all-gather", (Z,), table, 1)
    reduction: CollectiveKind = "reduce-scatter" if work.comm.sequence_split else "all-reduce"
    yield work.row("embedding", "forward", reduction, (Y,), stream, work.microbatches)
    if work.comm.sequence_split:
        yield work.row("embedding", "backward", "all-gather", (Y,), stream, work.microbatches)
    yield scatter(work, "embedding", table, 1)
    if shape.positions == "learned":
        positions = shape.seq_len * shape.hidden * item // work.size(X)
        yield work.row("positions", "forward", "all-gather", (Z,), positions, 1)
        yield scatter(work, "positions", positions, 1)


def predict_update(work: StepSpec) -> Iterator[Predicted]:
    """Yields what comes once a step, groups of one device included.

    Gradients in float32, over `data` and `expert`, and over `z` too where a parameter is replicated there; with the
    sequence split over `y` as well: norms, biases added to the stream, positions. Buckets change the number of
    messages, not their bytes. Then how many targets count, the mean loss and the global norm: a scalar each.
    """
    shape = work.shape
    over = (DATA, EXPERT, Z, Y) if work.comm.sequence_split else (DATA, EXPERT, Z)

    def reduced(name: str, elements: int, split: tuple[str, ...], count: int) -> Predicted:
        axes = tuple(axis for axis in over if axis not in split)
        return work.row(name, "update", "all-reduce", axes, elements * FLOAT32 // work.size(*split), count)

    yield reduced("embedding", work.vocab * shape.hidden, (X, Y, Z), 1)
    if shape.positions == "learned":
        yield reduced("positions", shape.seq_len * shape.hidden, (X, Z), 1)
    for layer in block_matmuls(shape, work.comm):
        kept = round(layer.features_in * layer.features_out * work.density)
        yield reduced(layer.name, kept, (X, Y, Z), layer.count)
        if layer.bias:
            split = (X,) if layer.in_axis == Y else (Y, X) if layer.spread else (Y,)
            yield reduced(f"{layer.name}.bias", layer.features_out, split, layer.count)
    yield from expert_gradients(work, over)
    yield reduced("blocks.attention.norms", shape.head_dim, (), 2 * shape.layers * shape.qk_norm)
    vectors = shape.norm_params() // shape.hidden  # a message each: a scale, and the bias of a LayerNorm
    yield reduced("blocks.norms", shape.hidden, (X,), 2 * vectors * shape.layers)
    yield reduced("norm", shape.hidden, (X,), vectors)
    if not shape.tied:
        yield reduced("head", shape.hidden * work.vocab, (X, Y, Z), 1)
    yield work.row("targets", "update", "all-reduce", (DATA, EXPERT, Z), FLOAT32, 1)
    yield work.row("mean loss", "update", "all-reduce", (DATA, EXPERT, Z), FLOAT32, 1)
    norms = (EXPERT, Z, Y, X) if shape.routed_layers else (Z, Y, X)
    yield work.row("global norm", "update", "all-reduce", norms, FLOAT32, 1)
