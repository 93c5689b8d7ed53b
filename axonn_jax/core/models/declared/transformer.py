"""Declaration of the modules of `models.transformer` for cost models; no jax."""

from functools import lru_cache
from typing import TYPE_CHECKING

from axonn_jax.core.experts.declare import declare as declare_experts
from axonn_jax.core.experts.shape import ExpertShape, MoeConfig
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.ops.language import FLOAT32, Chain, Layer, Op, Param, Part, Read, merge_parts, reduce_gradient
from axonn_jax.core.ops.layers import Place, addition, attend, embedding, linear, loss, norm
from axonn_jax.core.options import AttentionKernel

if TYPE_CHECKING:
    from axonn_jax.core.models.config import ModelShape


# A planner's search describes the same grid again for different batch sizes and replicas.
@lru_cache(maxsize=1024)
def describe(
    shape: "ModelShape",
    at: Place,
    comm: BlockComm = ALL_REDUCE,
    training: MoeConfig = MoeConfig(),  # noqa: B008
) -> tuple[Layer, ...]:
    """Return the layers of the model in the order of the forward pass, with each kind of block once.

    Args:
        shape: Sizes of the model.
        at: Place of the layers.
        comm: Communication of the blocks with the residual stream.
        training: Dispatch and balance of experts.
    """
    rows = shape.padded_vocab(at.y * at.z)
    first = embedding(at, rows, shape.hidden, shape.seq_len if shape.positions == "learned" else 0)
    blocks = (merge_parts(halves(shape, layer, at, comm, training), count) for layer, count in shape.layer_kinds())
    return (first, *blocks, _last(shape, at, comm, rows))


def describe_single_device(shape: "ModelShape") -> tuple[Layer, ...]:
    """Return the layers of the model for one sequence on a single device."""
    return describe(shape, single_device_place(shape))


def single_device_place(shape: "ModelShape") -> Place:
    """Return the place of a layer that processes one sequence on a single device."""
    return Place(1, 1, 1, 1, shape.seq_len, FLOAT32)


def halves(
    shape: "ModelShape", layer: int, at: Place, comm: BlockComm = ALL_REDUCE,
    training: MoeConfig = MoeConfig(), *, attention: AttentionKernel = "cudnn",  # noqa: B008
) -> tuple[Part, Part]:  # fmt: skip
    """Return both halves of a block with their norms and residual additions; arguments are those of `describe`."""
    norm_params, norm_ops = norm(at, "blocks.mlp_norm", shape.hidden, shape.norm)
    if shape.moe is not None and shape.moe.is_routed(layer):
        params, chains = _experts(shape, shape.moe, at, comm, training)
    else:
        params, chains = _mlp(shape, at, comm, "blocks.mlp", shape.ffn, bias=shape.bias == "all")
    post_params, post_ops = _post_norm(shape, at, "blocks.mlp")
    chains = (*chains[:-1], chains[-1]._replace(ops=(*chains[-1].ops, *post_ops)))
    second = (Chain(norm_ops), *chains, Chain((addition(at, shape.hidden),)))
    return _attention(shape, at, comm, attention), ((*norm_params, *params, *post_params), second)


def _post_norm(shape: "ModelShape", at: Place, half: str) -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    return norm(at, f"{half}_post_norm", shape.hidden, shape.norm) if shape.post_norms else ((), ())


def _attention(shape: "ModelShape", at: Place, comm: BlockComm, kernel: AttentionKernel) -> Part:
    name, projection_comm = "blocks.attention", comm.of(comm.attention)
    over = at.yx if comm.attention else at.y
    norm_params, norm_ops = norm(at, f"{name}_norm", shape.hidden, shape.norm)
    qkv_params, qkv = linear(
        at, f"{name}.qkv", shape.hidden, shape.qkv_width, "x", projection_comm, bias=shape.bias != "none"
    )
    width = shape.heads * shape.head_dim
    out_params, out = linear(at, f"{name}.out", width, shape.hidden, "y", projection_comm, bias=shape.bias == "all")
    scales: tuple[Param, ...] = ()
    head_norms: tuple[Op, ...] = ()
    if shape.qk_norm:
        axes = () if comm.sequence_split else ("y", "x") if comm.attention else ("y",)
        norm_names = ("q_norm", "k_norm")
        scales = tuple(Param(f"{name}.{norm_name}.scale", (shape.head_dim,)) for norm_name in norm_names)
        sums = (
            reduce_gradient(f"blocks.{norm_name}", axes, shape.head_dim * FLOAT32, of_param=True)
            for norm_name in norm_names
        )
        head_norms = (*sums, Read((shape.heads + shape.kv_heads) * shape.head_dim / over))
    scores = attend(at, shape.heads / over, shape.kv_heads / over, shape.head_dim, shape.seq_len, kernel)
    post_params, post_ops = _post_norm(shape, at, name)
    ops = (*norm_ops, *qkv, *head_norms, scores, *out, *post_ops, addition(at, shape.hidden))
    return (*norm_params, *qkv_params, *scales, *out_params, *post_params), (Chain(ops),)


def _mlp(shape: "ModelShape", at: Place, comm: BlockComm, name: str, ffn: int, *, bias: bool) -> Part:
    projection_comm = comm.of(comm.mlp)
    up_params, up = linear(at, f"{name}.up", shape.hidden, ffn, "x", projection_comm, bias=bias)
    gate_params, gate = (
        linear(at, f"{name}.gate", shape.hidden, ffn, "x", projection_comm, bias=bias, shares_input=True)
        if shape.mlp_inputs == 2
        else ((), ())
    )
    down_params, down = linear(at, f"{name}.down", ffn, shape.hidden, "y", projection_comm, bias=bias)
    inner = ffn / (at.yx if comm.mlp else at.y)
    activation = Read(shape.mlp_inputs * inner, moved=(shape.mlp_inputs + 1) * inner * at.item)
    return (*gate_params, *up_params, *down_params), (Chain((*up, *gate, activation, *down), result_read=False),)


def _experts(shape: "ModelShape", moe: ExpertShape, at: Place, comm: BlockComm, training: MoeConfig) -> Part:
    # Shared experts are one feed-forward layer, which saves the input for the routed experts too.
    stream_elements = shape.hidden if comm.mlp else shape.hidden / at.x / (at.y if at.sequence_split else 1)
    params, chains = declare_experts(
        at, moe, shape.hidden, shape.mlp_inputs, shape.seq_len, training,
        entering=0.0 if moe.shared else stream_elements,
    )  # fmt: skip
    if not moe.shared:
        return params, chains
    more, shared = _mlp(shape, at, comm, "blocks.mlp.shared", moe.shared * moe.ffn, bias=False)
    return (*params, *more), (*chains, *shared)


def _last(shape: "ModelShape", at: Place, comm: BlockComm, rows: int) -> Layer:
    norm_params, norm_ops = norm(at, "norm", shape.hidden, shape.norm)
    params, head = linear(
        at, "head", shape.hidden, shape.vocab, "x", comm.of(False), bias=False, columns=rows, is_head=True,
        tied=shape.tied,
    )  # fmt: skip
    ops = (*norm_ops, *head, *loss(at))
    return Layer((*norm_params, *(() if shape.tied else params)), (Chain(ops),), in_block=False)
