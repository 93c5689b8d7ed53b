"""Declaration of a mixture-of-experts layer for the cost models: router, dispatch, kernels; no jax."""

from collections.abc import Iterable

from axonn_jax.core.experts.shape import ExpertShape, MoeConfig, slots_of
from axonn_jax.core.ops.language import (
    FLOAT32,
    Chain,
    Collective,
    CustomBackward,
    Kind,
    Multiply,
    Op,
    Param,
    Part,
    Read,
    exchange,
    gather,
    reduce,
    reduce_gradient,
    scatter,
)
from axonn_jax.core.ops.layers import Place

ROUTER, TOKENS = "blocks.mlp.router", "blocks.mlp.tokens"
"""Names of the collectives on router scores and on dispatched tokens."""
_INNER = ("y", "x")


def declare(
    at: Place, moe: ExpertShape, hidden: int, gates: int, seq_len: int, training: MoeConfig, *, entering: float
) -> Part:
    """Declare the parameters and operations of `experts.layer.MixtureOfExperts`, without its shared experts.

    Args:
        at: Place of the layer.
        moe: Sizes of the experts.
        hidden: Width of the residual stream.
        gates: Number of matmuls from the stream into an expert: 1, or 2 with a gated activation function.
        seq_len: Tokens in a sequence.
        training: Dispatch and balance settings.
        entering: Elements of the layer's input saved per token; 0 if shared experts already save it.

    Returns:
        The layer's parameters and its chain of operations.
    """
    scores: list[Op] = [reduce(ROUTER, ("x",), at.stream_tokens * moe.experts * FLOAT32)]
    if at.sequence_split and training.balance_weight:
        shares = 2 * (at.tokens // seq_len) * moe.experts * FLOAT32
        scores.append(reduce(ROUTER, ("y",), shares))
    router = Multiply(at.tokens, hidden / at.x, moe.experts)
    kernels = _kernels(moe, hidden, gates)
    share = moe.experts * hidden * moe.ffn * at.item // (at.expert * at.yx)
    weights = [gather(name, ("z",), share, weight_itemsize=at.item) for name in kernels]
    params = (
        Param(f"{ROUTER}.kernel", (hidden, moe.experts), (("x",),)),
        Param(f"{ROUTER}.bias", (moe.experts,)),
        *kernels.values(),
    )
    dispatch = _dispatch(at, moe, hidden, gates, training)
    statistics, width, tokens = elements_of(at, moe, hidden, training)
    saved = {
        "none": statistics + (entering + (gates + 1) * width + tokens) * at.item,
        "dots": statistics + gates * width * at.item,
        "save_collectives": tokens * at.item,
    }
    # Grouped matmuls read a choice's row, and add its result to a float32 accumulator that is read and written back.
    choice_bytes = moe.per_token * (hidden * (at.item + 2 * FLOAT32) + (gates + 1) * moe.ffn / at.yx * at.item)
    backward_pass = CustomBackward(saved, moved=choice_bytes + at.expert * hidden * (FLOAT32 + at.item))
    return params, (Chain((router, *scores, backward_pass, *weights, *dispatch), result_read=False),)


def _kernels(moe: ExpertShape, hidden: int, gates: int) -> dict[str, Param]:
    into, out_of = (("expert",), ("z",), _INNER), (("expert",), (*_INNER, "z"), ())
    kernels = {}
    for name in ("gate", "up", "down")[2 - gates :]:
        inner, split = ((moe.ffn, hidden), out_of) if name == "down" else ((hidden, moe.ffn), into)
        name = f"blocks.mlp.experts.{name}"
        kernels[name] = Param(f"{name}.kernel", (moe.experts, *inner), split, prunable=True)
    return kernels


def _matmuls(at: Place, moe: ExpertShape, hidden: int, gates: int, training: MoeConfig) -> tuple[Op, ...]:
    # Assumes balanced routing: every expert gets the mean number of tokens.
    rows = at.tokens * moe.per_token * at.expert / moe.experts * training.slack
    ffn, number = moe.ffn / at.yx, moe.experts / at.expert
    # `experts.grouped` saves no inner activations, so its backward pass recomputes the matmuls into an expert.
    into = Multiply(rows, hidden, ffn, number, always_recomputed=not training.drops)
    return (*[into] * gates, Multiply(rows, ffn, hidden, number))


def _dispatch(at: Place, moe: ExpertShape, hidden: int, gates: int, training: MoeConfig) -> Iterable[Op]:
    # Mirrors `experts.dispatch.drops_duplicates`; tests compare these operations with the compiled programs' bytes.
    drops = at.expert > 1 and at.y > 1 and not at.sequence_split
    split_over_y = at.sequence_split or drops
    sent = at.tokens // (at.y if split_over_y else 1)
    choice_bytes, stream = moe.per_token * FLOAT32, hidden * at.item // at.x
    matmuls = _matmuls(at, moe, hidden, gates, training)
    if drops:
        for size in (stream, choice_bytes):
            yield Collective(TOKENS, None, "all-gather", ("y",), at.tokens * size)
    if training.drops:
        slots = moe.experts * slots_of(sent, moe.per_token, moe.experts, training.slack) * at.item * hidden // at.x
        yield from _by_capacity(at, slots, sent * choice_bytes, split_over_y, matmuls)
    else:
        yield from _by_gather(at, sent, stream, choice_bytes, split_over_y, matmuls)
    if drops:
        yield Collective(TOKENS, "all-gather", None, ("y",), at.tokens * stream)


def _by_capacity(at: Place, slots: int, weights: int, split_over_y: bool, matmuls: tuple[Op, ...]) -> Iterable[Op]:
    gathered = slots * (at.y if split_over_y else 1)
    yield from (Read(), exchange(TOKENS, ("expert",), slots))
    yield gather(TOKENS, ("y",), gathered) if split_over_y else reduce_gradient(TOKENS, ("y",), slots)
    yield from (gather(TOKENS, ("x",), gathered * at.x), *matmuls, scatter(TOKENS, ("x",), gathered * at.x))
    yield scatter(TOKENS, ("y",), gathered) if split_over_y else reduce(TOKENS, ("y",), slots)
    yield from (exchange(TOKENS, ("expert",), slots), reduce_gradient(TOKENS, ("x",), weights), Read())


def _by_gather(
    at: Place, sent: int, stream: int, choice_bytes: int, split_over_y: bool, matmuls: tuple[Op, ...]
) -> Iterable[Op]:
    group = sent * at.expert
    everyone = group * (at.y if split_over_y else 1)
    # Tokens, choices and the weights of the choices; integer choices have no gradient, hence no collective backward.
    for size, differentiable in ((stream, True), (choice_bytes, False), (choice_bytes, True)):
        back: Kind | None = "reduce-scatter" if differentiable else None
        yield Collective(TOKENS, "all-gather", back, ("expert",), group * size)
        if split_over_y:
            yield Collective(TOKENS, "all-gather", back, ("y",), everyone * size)
        elif differentiable:
            yield reduce_gradient(TOKENS, ("y",), everyone * size)
    features = everyone * stream * at.x
    yield from (gather(TOKENS, ("x",), features), reduce_gradient(TOKENS, ("x",), everyone * choice_bytes), *matmuls)
    yield scatter(TOKENS, ("x",), features)
    yield scatter(TOKENS, ("y",), everyone * stream) if split_over_y else reduce(TOKENS, ("y",), everyone * stream)
    yield scatter(TOKENS, ("expert",), group * stream)


def elements_of(at: Place, moe: ExpertShape, hidden: int, training: MoeConfig) -> tuple[float, float, float]:
    """Return what the layer saves per token: bytes of scores, elements of inner width, elements of dispatched tokens.

    With `gather` dispatch the tokens are those of the whole `expert` axis with all features, and no inner width is
    saved; with `capacity` both counts are of slots.
    """
    scores = 3 * moe.experts * FLOAT32 / (at.y if at.sequence_split else 1)
    if training.drops:
        slots = moe.per_token * training.slack
        return scores, slots * moe.ffn / at.yx, slots * hidden * (1 + 1 / at.yx)
    exchanged = at.x > 1 or at.expert > 1 or at.sequence_split
    return scores, 0.0, float(at.expert * hidden) if exchanged else 0.0
