"""Declaration of a transformer with adapters and frozen base weights for the cost models; no jax."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from axonn_jax.core.adapters.config import AdaptedLayer, LoraConfig, layers_of
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import describe, single_device_place
from axonn_jax.core.ops.language import Chain, Collective, Layer, Multiply, Op, Param
from axonn_jax.core.ops.layers import Place


@lru_cache(maxsize=1024)
def describe_trained(
    shape: ModelShape, lora: LoraConfig, at: Place, comm: BlockComm = ALL_REDUCE, training: MoeConfig = MoeConfig(), *,  # noqa: B008
    scanned: bool = False,
) -> tuple[Layer, ...]:  # fmt: skip
    """Return every layer of the model, like `models.declared.transformer.describe`, with trained adapters.

    Communication is exact under the policies `none`, `full` and `offload` if both inputs of a gated MLP or neither have
    adapters; otherwise a few collectives that XLA removes are counted too.

    Args:
        shape: Sizes of the model.
        lora: Settings of the adapters; without adapters all weights are trained.
        at: Place of the layers.
        comm: Communication of the blocks with the residual stream.
        training: Dispatch and balance of experts.
        scanned: True if a scan runs the blocks, so that all of a kind are identical.
    """
    layers = describe(shape, at, comm, training)
    if not lora.adapts:
        return layers
    # The first block is a kind of its own: nothing before its first adapter needs a gradient. Under a scan it shares
    # the program of the other blocks, which computes those gradients.
    first, *blocks, last = layers
    trained = [_frozen(first, {}, starts=True)]
    for (kind, _), block in zip(shape.layer_kinds(), blocks, strict=True):
        begins = (shape.experts_of(kind) is None) == (shape.experts_of(0) is None) and not scanned
        trained += [adapted(replace(block, count=1), shape, lora, kind, starts=True)] if begins else []
        trained += (
            [adapted(replace(block, count=block.count - begins), shape, lora, kind)] if block.count > begins else []
        )
    return (*trained, _frozen(last, {}))


def describe_single_device(shape: ModelShape, lora: LoraConfig) -> tuple[Layer, ...]:
    """Return every layer of the model with adapters for one sequence on one device, with blocks of a kind identical."""
    return describe_trained(shape, lora, single_device_place(shape), scanned=True)


def adapted(layer: Layer, shape: ModelShape, lora: LoraConfig, kind: int, *, starts: bool = False) -> Layer:
    """Return the declaration of a block like block number `kind` with adapters; unchanged if there are none."""
    if not lora.adapts:
        return layer
    places = {f"blocks.{place.path}": place for place in layers_of(shape, lora) if place.block == kind}
    return _frozen(layer, places, starts=starts)


def _frozen(layer: Layer, places: Mapping[str, AdaptedLayer], *, starts: bool = False) -> Layer:
    # Adds adapters at the matmuls named in `places`, and removes the gradients of the layer's own parameters.
    params = [param._replace(trained=False) for param in layer.params]
    by_name = {param.name: param for param in params}
    for name, adapted_layer in places.items():
        rows, columns = by_name[f"{name}.kernel"].split
        inner = tuple(axis for axis in rows if axis != "z")
        shapes = zip(("a", "b"), (adapted_layer.a, adapted_layer.b), ((inner, ()), ((), columns)), strict=True)
        params += [Param(f"{name}.adapter.{which}", size, split, partial=True) for which, size, split in shapes]
    reached, chains = not starts, []
    for chain in layer.chains:
        ops: list[Op] = []
        # `name` is the layer of the next matmul, known from its weight gather; `read` is True once an adapter has read
        # the input that the next matmul shares.
        name, read = "", False
        for at, op in enumerate(chain.ops):
            if isinstance(op, Collective):
                name = op.name if op.weight_itemsize else name
                is_param_gradient = op.weight_itemsize > 0 or op.of_param
                repeated = op.always_repeated and _adapted_next(chain.ops[at:], name, places)
                backward = op.backward if reached and not is_param_gradient else None
                ops.append(op._replace(backward=backward, always_repeated=repeated))
            elif isinstance(op, Multiply):
                ops.append(op._replace(trained=False))
                read &= op.shares_input
                if (place := places.get(name)) is not None:
                    rank = float(place.a[1])
                    ops += [op._replace(columns=rank, shares_input=read), Multiply(op.tokens, rank, op.columns)]
                    read = reached = True
            else:
                ops.append(op)
        chains.append(Chain(tuple(ops), chain.result_read))
    return replace(layer, params=tuple(params), chains=tuple(chains))


def _adapted_next(ops: Sequence[Op], name: str, places: Container[str]) -> bool:
    # True if the next matmul (of the layer `name`), or a following one with the same input, has an adapter: then the
    # collective on that input has to be repeated in the backward pass for the gradient of A.
    met = False
    for op in ops:
        if isinstance(op, Collective) and op.weight_itemsize:
            name = op.name
        elif isinstance(op, Multiply):
            if met and not op.shares_input:
                return False
            if name in places:
                return True
            met = True
    return False
