"""Declaration of a transformer with adapters, beside which every other parameter is frozen; no jax."""

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from axonn_jax.adapters.config import AdaptedLayer, LoraConfig, layers_of
from axonn_jax.experts.shape import MoeConfig
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.models.declared.transformer import alone, describe
from axonn_jax.ops.language import Chain, Collective, Layer, Multiply, Op, Param
from axonn_jax.ops.layers import Place


@lru_cache(maxsize=1024)
def describe_trained(
    shape: ModelShape, lora: LoraConfig, at: Place, comm: BlockComm = ALL_REDUCE, training: MoeConfig = MoeConfig(), *,  # noqa: B008
    duplicates: bool = False, scanned: bool = False,
) -> tuple[Layer, ...]:  # fmt: skip
    """Return every layer of the model as `models.declared.transformer.describe`, with the adapters that are trained.

    The first block is a kind of its own: what comes before its first adapter has no gradient. Blocks that are
    `scanned` are all alike. Communication is exact under `none`, `full` and `offload`, where both inputs of a gated
    MLP or neither have adapters; else a few collectives that XLA leaves out count too.
    """
    layers = describe(shape, at, comm, training, duplicates=duplicates)
    if not lora.adapts:
        return layers
    first, *blocks, last = layers
    made = [_frozen(first, {}, starts=True)]
    for (kind, _), block in zip(shape.layer_kinds(), blocks, strict=True):
        begins = (shape.experts_of(kind) is None) == (shape.experts_of(0) is None) and not scanned
        made += [adapted(replace(block, count=1), shape, lora, kind, starts=True)] if begins else []
        made += [adapted(replace(block, count=block.count - begins), shape, lora, kind)] if block.count > begins else []
    return (*made, _frozen(last, {}))


def describe_alone(shape: ModelShape, lora: LoraConfig) -> tuple[Layer, ...]:
    """Return every layer of the model with adapters for one sequence on one device; all blocks of a kind are alike."""
    return describe_trained(shape, lora, alone(shape), scanned=True)


def adapted(layer: Layer, shape: ModelShape, lora: LoraConfig, kind: int, *, starts: bool = False) -> Layer:
    """Return a block of the kind of block number `kind` as it is trained beside adapters; itself without any."""
    if not lora.adapts:
        return layer
    places = {f"blocks.{place.path}": place for place in layers_of(shape, lora) if place.block == kind}
    return _frozen(layer, places, starts=starts)


def _frozen(layer: Layer, places: Mapping[str, AdaptedLayer], *, starts: bool = False) -> Layer:
    """Return a layer with adapters at the matmuls of these names, without the gradients of its own parameters.

    If the layer `starts` the model, nothing before its first adapter has a gradient.
    """
    params = [param._replace(trained=False) for param in layer.params]
    by_name = {param.name: param for param in params}
    for name, place in places.items():
        rows, columns = by_name[f"{name}.kernel"].split
        inner = tuple(axis for axis in rows if axis != "z")
        shapes = zip(("a", "b"), (place.a, place.b), ((inner, ()), ((), columns)), strict=True)
        params += [Param(f"{name}.adapter.{which}", size, split, partial=True) for which, size, split in shapes]
    reached, chains = not starts, []
    for chain in layer.chains:
        ops: list[Op] = []
        name, read = "", False  # layer of the next matmul, and True if an adapter has read the same input
        for at, op in enumerate(chain.ops):
            if isinstance(op, Collective):
                name = op.name if op.weight_itemsize else name
                own_gradient = op.weight_itemsize > 0 or op.of_param
                again = op.always_repeated and _adapted_next(chain.ops[at:], name, places)
                backward = op.backward if reached and not own_gradient else None
                ops.append(op._replace(backward=backward, always_repeated=again))
            elif isinstance(op, Multiply):
                ops.append(op._replace(trained=False))
                read &= op.shares_input
                if (own := places.get(name)) is not None:
                    rank = float(own.a[1])
                    ops += [op._replace(columns=rank, shares_input=read), Multiply(op.tokens, rank, op.columns)]
                    read = reached = True
            else:
                ops.append(op)
        chains.append(Chain(tuple(ops), chain.result_read))
    return replace(layer, params=tuple(params), chains=tuple(chains))


def _adapted_next(ops: Sequence[Op], name: str, places: Container[str]) -> bool:
    """Return True if the next matmul, of the layer `name`, or one behind it that shares its input has an adapter."""
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
