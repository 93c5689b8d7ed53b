"""Collectives of layers with experts: router, dispatch, experts' weights."""

from collections.abc import Iterator

from axonn_jax.experts.shape import ExpertShape, slots_of
from axonn_jax.planner.communication.dense import gathered
from axonn_jax.planner.communication.step import EXPERT, FLOAT32, Phase, Predicted, StepSpec, X, Y, Z

ROUTER, TOKENS = "blocks.mlp.router", "blocks.mlp.tokens"
"""Names of scores and of what is dispatched."""


def expert_weights(moe: ExpertShape, inputs: int, hidden: int) -> tuple[tuple[str, int], ...]:
    """Names and elements of the weights of all experts of a layer with `inputs` matmuls from the stream."""
    names = (*(("gate",) if inputs == 2 else ()), "up", "down")
    return tuple((f"blocks.mlp.experts.{name}", moe.experts * hidden * moe.ffn) for name in names)


def predict_experts(work: StepSpec) -> Iterator[Predicted]:
    """Yields what layers with experts communicate before the update, shared experts aside."""
    moe, layers = work.shape.moe, work.shape.routed_layers
    if moe is None or layers == 0:
        return
    for name, elements in expert_weights(moe, work.shape.mlp_inputs, work.shape.hidden):
        yield from gathered(work, name, elements * work.itemsize // work.size(EXPERT, X, Y), layers, work.again)
    yield from _router(work, moe, layers * work.microbatches)
    communicate = _by_capacity if work.moe.drops else _gather
    yield from communicate(work, moe, layers * work.microbatches)


def _own(work: StepSpec) -> int:
    """Tokens that a device's router looks at."""
    return work.rows // (work.grid.y if work.comm.sequence_split else 1)


def _phases(work: StepSpec) -> tuple[Phase, ...]:
    return ("forward", "recompute") if work.rereduces else ("forward",)


def _router(work: StepSpec, moe: ExpertShape, each: int) -> Iterator[Predicted]:
    """Scores are all-reduced over `x`, 2 (Gx-1)/Gx 4 m E; with the sequence split, counts and shares over `y`."""
    for phase in _phases(work):
        yield work.row(ROUTER, phase, "all-reduce", (X,), _own(work) * moe.experts * FLOAT32, each)
        if work.comm.sequence_split and work.moe.balance_weight:
            sequences = work.rows // work.shape.seq_len
            yield work.row(ROUTER, phase, "all-reduce", (Y,), 2 * sequences * moe.experts * FLOAT32, each)


def _gather(work: StepSpec, moe: ExpertShape, each: int) -> Iterator[Predicted]:
    """Tokens gathered and what experts add reduce-scattered (`experts.dispatch`); the backward pass the other way."""
    hidden, k = work.shape.hidden * work.itemsize, moe.per_token * FLOAT32
    split, dropped = work.comm.sequence_split, _drops(work)
    apart = split or dropped
    sent = work.rows // (work.grid.y if apart else 1)  # of a device
    group, all_of = sent * work.grid.expert, sent * work.grid.expert * (work.grid.y if apart else 1)
    stream = hidden // work.grid.x
    for phase in _phases(work):
        for size in (stream, k, k):  # tokens, choices, weights
            yield work.row(TOKENS, phase, "all-gather", (EXPERT,), group * size, each)
            if apart:
                yield work.row(TOKENS, phase, "all-gather", (Y,), all_of * size, each)
        yield work.row(TOKENS, phase, "all-gather", (X,), all_of * hidden, each)
    for size in (stream, k):
        if apart:
            yield work.row(TOKENS, "backward", "reduce-scatter", (Y,), all_of * size, each)
        else:
            yield work.row(TOKENS, "backward", "all-reduce", (Y,), all_of * size, each)
        yield work.row(TOKENS, "backward", "reduce-scatter", (EXPERT,), group * size, each)
        if dropped:
            yield work.row(TOKENS, "backward", "all-gather", (Y,), work.rows * size, each)
    yield work.row(TOKENS, "backward", "all-reduce", (X,), all_of * k, each)  # of weights
    yield work.row(TOKENS, "backward", "reduce-scatter", (X,), all_of * hidden, each)
    # What the experts add.
    yield work.row(TOKENS, "forward", "reduce-scatter", (X,), all_of * hidden, each)
    yield work.row(TOKENS, "backward", "all-gather", (X,), all_of * hidden, each)
    if apart:
        yield work.row(TOKENS, "forward", "reduce-scatter", (Y,), all_of * stream, each)
        yield work.row(TOKENS, "backward", "all-gather", (Y,), all_of * stream, each)
    else:
        yield work.row(TOKENS, "forward", "all-reduce", (Y,), all_of * stream, each)
    yield work.row(TOKENS, "forward", "reduce-scatter", (EXPERT,), group * stream, each)
    yield work.row(TOKENS, "backward", "all-gather", (EXPERT,), group * stream, each)
    if dropped:
        yield work.row(TOKENS, "forward", "all-gather", (Y,), work.rows * stream, each)


def _drops(work: StepSpec) -> bool:
    """Whether devices along `y`, which have the same tokens, each send a part of them (`experts.dispatch`)."""
    sends = work.grid.expert > 1 and work.grid.y > 1
    return sends and not work.comm.sequence_split and not work.duplicates


def _by_capacity(work: StepSpec, moe: ExpertShape, each: int) -> Iterator[Predicted]:
    """Slots exchanged there and back by all-to-alls (`experts.capacity`); the backward pass likewise."""
    split, dropped = work.comm.sequence_split, _drops(work)
    apart = split or dropped
    sent = work.rows // (work.grid.y if apart else 1)
    row = moe.experts * slots_of(sent, moe.per_token, moe.experts, work.moe.slack) * work.itemsize
    stream = row * work.shape.hidden // work.grid.x
    over_y = stream * (work.grid.y if apart else 1)
    wide = over_y * work.grid.x
    phases: tuple[Phase, ...] = (*_phases(work), "backward")
    for phase in phases:
        yield work.row(TOKENS, phase, "all-to-all", (EXPERT,), stream, 2 * each)
        yield work.row(TOKENS, phase, "all-gather", (X,), wide, each)
        yield work.row(TOKENS, phase, "reduce-scatter", (X,), wide, each)
        if apart:
            yield work.row(TOKENS, phase, "all-gather", (Y,), over_y, each)
            yield work.row(TOKENS, phase, "reduce-scatter", (Y,), over_y, each)
        else:
            yield work.row(TOKENS, phase, "all-reduce", (Y,), stream, each)
    yield work.row(TOKENS, "backward", "all-reduce", (X,), sent * moe.per_token * FLOAT32, each)  # of weights
    if dropped:
        tokens = work.rows * work.itemsize * work.shape.hidden // work.grid.x
        yield work.row(TOKENS, "forward", "all-gather", (Y,), tokens, each)
        yield work.row(TOKENS, "backward", "all-gather", (Y,), tokens, each)
        yield work.row(TOKENS, "backward", "all-gather", (Y,), work.rows * moe.per_token * FLOAT32, each)


def expert_gradients(work: StepSpec, over: tuple[str, ...]) -> Iterator[Predicted]:
    """All-reduces of gradients over those of these axes that a parameter is not split over, once a step."""
    moe, layers = work.shape.moe, work.shape.routed_layers
    if moe is None or layers == 0:
        return
    for name, elements in expert_weights(moe, work.shape.mlp_inputs, work.shape.hidden):
        split = (EXPERT, Z, Y, X)
        axes = tuple(axis for axis in over if axis not in split)
        kept = round(elements * work.density)
        yield work.row(name, "update", "all-reduce", axes, kept * FLOAT32 // work.size(*split), layers)
    kernel = work.shape.hidden * moe.experts * FLOAT32
    axes = tuple(axis for axis in over if axis != X)
    yield work.row(ROUTER, "update", "all-reduce", axes, kernel // work.size(X), layers)
    yield work.row(f"{ROUTER}.bias", "update", "all-reduce", axes, moe.experts * FLOAT32, layers)
