"""Declaration of a layer of experts: router, dispatch, kernels; no jax."""

from collections.abc import Iterable

from axonn_jax.experts.shape import ExpertShape, MoeConfig, slots_of
from axonn_jax.ops.language import (
    FLOAT32,
    Chain,
    Collective,
    Kind,
    Multiply,
    Op,
    OwnBackward,
    Param,
    Part,
    Read,
    exchange,
    gather,
    reduce,
    reduce_gradient,
    scatter,
)
from axonn_jax.ops.layers import Place

ROUTER, TOKENS = "blocks.mlp.router", "blocks.mlp.tokens"
"""Names of the scores' collectives and of the dispatch's."""
_INNER = ("y", "x")


def declare(
    at: Place, moe: ExpertShape, hidden: int, gates: int, seq_len: int, training: MoeConfig, *, entering: float,
    duplicates: bool = False,
) -> Part:  # fmt: skip
    """Declare `experts.layer.MixtureOfExperts`, shared experts aside.

    Args:
        at: Place of the layer.
        moe: Sizes of the experts.
        hidden: Width of the residual stream.
        gates: Matmuls from the stream into an expert: 1, or 2 with a gated activation function.
        seq_len: Tokens of a sequence.
        training: Dispatch and balance.
        entering: Elements of the layer's input that are kept for each token; 0 where shared experts keep it.
        duplicates: True if devices along `y` with the same tokens all send them: for comparison (TED).
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
    dispatch = _dispatch(at, moe, hidden, gates, training, duplicates)
    statistics, width, tokens = elements_of(at, moe, hidden, training)
    kept = {
        "none": statistics + (entering + (gates + 1) * width + tokens) * at.item,
        "dots": statistics + gates * width * at.item,
        "save_collectives": tokens * at.item,
    }
    # Choices are read and added to float32 results one by one, and the results written.
    chosen = moe.per_token * (hidden * (at.item + 2 * FLOAT32) + (gates + 1) * moe.ffn / at.yx * at.item)
    own = OwnBackward(kept, moved=chosen + at.expert * hidden * (FLOAT32 + at.item))
    return params, (Chain((router, *scores, own, *weights, *dispatch), result_read=False),)


def _kernels(moe: ExpertShape, hidden: int, gates: int) -> dict[str, Param]:
    """Return the kernels of all experts by name."""
    into, out_of = (("expert",), ("z",), _INNER), (("expert",), (*_INNER, "z"), ())
    made = {}
    for name in ("gate", "up", "down")[2 - gates :]:
        inner, split = ((moe.ffn, hidden), out_of) if name == "down" else ((hidden, moe.ffn), into)
        name = f"blocks.mlp.experts.{name}"
        made[name] = Param(f"{name}.kernel", (moe.experts, *inner), split, prunable=True)
    return made


def _matmuls(at: Place, moe: ExpertShape, hidden: int, gates: int, training: MoeConfig) -> tuple[Op, ...]:
    """Return the matmuls of a device's experts, of which each is chosen by as many tokens as the others.

    The backward pass of `gather` computes an expert's widths again (`experts.grouped`).
    """
    rows = at.tokens * moe.per_token * at.expert / moe.experts * training.slack
    ffn, number = moe.ffn / at.yx, moe.experts / at.expert
    into = Multiply(rows, hidden, ffn, number, run_again=not training.drops)
    return (*[into] * gates, Multiply(rows, ffn, hidden, number))


def _dispatch(
    at: Place, moe: ExpertShape, hidden: int, gates: int, training: MoeConfig, duplicates: bool
) -> Iterable[Op]:
    """Yield the operations of tokens' way to the experts and back (`experts.dispatch`, `experts.capacity`).

    Devices along `y` with the same tokens each send a part, unless `duplicates`.
    """
    drops = at.expert > 1 and at.y > 1 and not at.sequence_split and not duplicates
    apart = at.sequence_split or drops
    sent = at.tokens // (at.y if apart else 1)
    chosen, stream = moe.per_token * FLOAT32, hidden * at.item // at.x
    matmuls = _matmuls(at, moe, hidden, gates, training)
    if drops:
        for size in (stream, chosen):
            yield Collective(TOKENS, None, "all-gather", ("y",), at.tokens * size)
    if training.drops:
        slots = moe.experts * slots_of(sent, moe.per_token, moe.experts, training.slack) * at.item * hidden // at.x
        yield from _by_capacity(at, slots, sent * chosen, apart, matmuls)
    else:
        yield from _by_gather(at, sent, stream, chosen, apart, matmuls)
    if drops:
        yield Collective(TOKENS, "all-gather", None, ("y",), at.tokens * stream)


def _by_capacity(at: Place, slots: int, weights: int, apart: bool, matmuls: tuple[Op, ...]) -> Iterable[Op]:
    """Yield the exchange of slots of so many bytes, there and back over `expert`."""
    whole = slots * (at.y if apart else 1)
    yield from (Read(), exchange(TOKENS, ("expert",), slots))
    yield gather(TOKENS, ("y",), whole) if apart else reduce_gradient(TOKENS, ("y",), slots)
    yield from (gather(TOKENS, ("x",), whole * at.x), *matmuls, scatter(TOKENS, ("x",), whole * at.x))
    yield scatter(TOKENS, ("y",), whole) if apart else reduce(TOKENS, ("y",), slots)
    yield from (exchange(TOKENS, ("expert",), slots), reduce_gradient(TOKENS, ("x",), weights), Read())


def _by_gather(at: Place, sent: int, stream: int, chosen: int, apart: bool, matmuls: tuple[Op, ...]) -> Iterable[Op]:
    """Yield the gathers of tokens, choices and weights of the choices, and the reduce-scatters of results."""
    group = sent * at.expert
    everyone = group * (at.y if apart else 1)
    for size, differentiable in ((stream, True), (chosen, False), (chosen, True)):
        back: Kind | None = "reduce-scatter" if differentiable else None
        yield Collective(TOKENS, "all-gather", back, ("expert",), group * size)
        if apart:
            yield Collective(TOKENS, "all-gather", back, ("y",), everyone * size)
        elif differentiable:
            yield reduce_gradient(TOKENS, ("y",), everyone * size)
    features = everyone * stream * at.x
    yield from (gather(TOKENS, ("x",), features), reduce_gradient(TOKENS, ("x",), everyone * chosen), *matmuls)
    yield scatter(TOKENS, ("x",), features)
    yield scatter(TOKENS, ("y",), everyone * stream) if apart else reduce(TOKENS, ("y",), everyone * stream)
    yield scatter(TOKENS, ("expert",), group * stream)


def elements_of(at: Place, moe: ExpertShape, hidden: int, training: MoeConfig) -> tuple[float, float, float]:
    """Return bytes of scores, elements of an expert's width, and elements of moved tokens, kept for each token.

    `gather` moves the tokens of all of `expert`, with all features, and keeps nothing of the experts' width;
    `capacity` keeps slots.
    """
    scores = 3 * moe.experts * FLOAT32 / (at.y if at.sequence_split else 1)
    if training.drops:
        slots = moe.per_token * training.slack
        return scores, slots * moe.ffn / at.yx, slots * hidden * (1 + 1 / at.yx)
    apart = at.x > 1 or at.expert > 1 or at.sequence_split
    return scores, 0.0, float(at.expert * hidden) if apart else 0.0
