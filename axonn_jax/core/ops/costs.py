"""Costs of declared layers: collectives, parameters, FLOPs and saved activations."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from axonn_jax.core.ops.language import (
    FLOAT32,
    Attend,
    Axes,
    Collective,
    CustomBackward,
    Kind,
    Layer,
    Multiply,
    Op,
    Read,
)
from axonn_jax.core.options import Activations, ReshardAfter

Phase = Literal["forward", "recompute", "backward", "update"]
Row = tuple[str, Phase, Kind, Axes, int, int]
"""Name, phase, kind, mesh axes, bytes of the full buffer, runs per step."""


@dataclass(frozen=True)
class StepPolicy:
    """Settings by which a training step runs its layers."""

    microbatches: int = 1
    """Number of microbatches, which run one after the other."""
    activations: Activations = "none"
    """Activation policy. `full`, `dots` and `offload` communicate the same; under `save_collectives`, recomputation
    repeats only gathers of weights."""
    reshard_after: ReshardAfter = "forward"
    """When gathered weights are freed; if after `forward`, recomputation gathers them again."""
    scanned: bool = False
    """True if blocks are the body of a loop (`tensor.scan_layers`), so that every microbatch gathers their weights."""
    gradient_item: int = FLOAT32
    """Bytes per element of gradients that are reduced over `z`."""
    density: float = 1.0
    """Trained fraction of the entries of prunable parameters, not counting spare slots."""

    @property
    def once(self) -> bool:
        """True if weights are gathered, and accumulated gradients reduce-scattered over `z`, once per step."""
        return self.reshard_after == "step" and self.microbatches > 1


def collectives(layers: Iterable[Layer], policy: StepPolicy) -> Iterator[Row]:
    """Yield every collective of a step up to the update, in the order of the declaration.

    Args:
        layers: The model's layers.
        policy: How the step runs.
    """
    for layer in layers:
        for chain in layer.chains:
            recomputed = len(chain.repeated()) if layer.in_block and policy.activations != "none" else 0
            for at, op in enumerate(chain.ops):
                if isinstance(op, Collective):
                    yield from _runs(op, layer, policy, repeated=at < recomputed)


def _runs(op: Collective, layer: Layer, policy: StepPolicy, *, repeated: bool) -> Iterator[Row]:
    runs = layer.count * policy.microbatches
    weight, looped = op.weight_itemsize > 0, policy.scanned and layer.in_block and not policy.once
    if op.forward:
        # XLA hoists a weight's gather out of the loop over microbatches, but not out of the scan over layers.
        yield op.name, "forward", op.forward, op.axes, op.buffer, layer.count if weight and not looped else runs
        resident = policy.reshard_after != "forward" if weight else policy.activations == "save_collectives"
        if op.always_repeated or (repeated and not resident):
            yield op.name, "recompute", op.forward, op.axes, op.buffer, runs
    if op.backward:
        buffer = op.buffer if op.backward_buffer is None else op.backward_buffer
        buffer = buffer // op.weight_itemsize * policy.gradient_item if weight else buffer
        yield op.name, "backward", op.backward, op.axes, buffer, layer.count if weight and policy.once else runs


def update_collectives(
    layers: Iterable[Layer], policy: StepPolicy, sizes: Mapping[str, int], token_axes: Axes
) -> Iterator[Row]:
    """Yield the all-reduces of gradients, in float32, over the axes that split tokens and not the parameter.

    Args:
        layers: The model's layers.
        policy: How the step runs.
        sizes: Devices along each mesh axis, slowest first.
        token_axes: Mesh axes that split the batch's tokens, slowest first.
    """
    for layer in layers:
        for param in (param for param in layer.params if param.trained):
            split, elements = param.axes, param.elements
            elements = round(elements * policy.density) if param.prunable else elements
            # Unless declared `partial`, gradients are partial sums over the axes that split tokens only.
            axes = tuple(axis for axis in (sizes if param.partial else token_axes) if axis not in split)
            buffer = elements * FLOAT32 // prod([sizes[axis] for axis in split])
            yield param.name, "update", "all-reduce", axes, buffer, layer.count


def operations(layer: Layer) -> Iterator[Op]:
    """Yield every operation of a layer, in program order."""
    for chain in layer.chains:
        yield from chain.ops


def parameters(layer: Layer) -> int:
    """Return the number of parameters of a single layer, ignoring `Layer.count`."""
    return sum(param.elements for param in layer.params)


def forward_flops(layer: Layer, tokens: int) -> float:
    """Return the FLOPs of one layer's matmuls and attention in the forward pass.

    Args:
        layer: The layer.
        tokens: Tokens of a microbatch on a device.
    """
    return matmul_flops(layer) + tokens * sum(op.flops for op in operations(layer) if isinstance(op, Attend))


def matmul_flops(layer: Layer) -> float:
    """Return the FLOPs of one layer's matmuls with weights; the weights' gradients take as many."""
    multiplied = (op for op in operations(layer) if isinstance(op, Multiply))
    return sum(2.0 * op.number * op.tokens * op.inner * op.columns for op in multiplied)


def saved_bytes(layer: Layer, policy: str, tokens: int, item: int, sizes: Mapping[str, int], entry: float) -> float:
    """Return the bytes per token that a layer saves for the backward pass.

    The policy `none` saves what gradients read and `full` only the layer's input; in addition to the input, `dots`
    saves results of matmuls and `save_collectives` results of collectives.

    Args:
        layer: The layer.
        policy: Activation policy.
        tokens: Tokens of a microbatch on a device.
        item: Bytes per element in the compute dtype.
        sizes: Devices along each mesh axis.
        entry: Bytes per token of the layer's input.
    """
    total = 0.0 if policy == "none" else entry
    for chain in layer.chains:
        if saved := [op.by_policy.get(policy, 0.0) for op in chain.ops if isinstance(op, CustomBackward)]:
            # A custom backward pass decides itself what the chain saves, so its operations do not count again.
            total += sum(saved)
            continue
        repeated = len(chain.repeated())
        for at, op in enumerate(chain.ops):
            if policy == "none" and isinstance(op, Read):
                total += op.elements * item
            elif policy == "none" and isinstance(op, Attend):
                total += op.elements * item + op.scores + op.copies
            elif policy == "none" and isinstance(op, Multiply) and op.trained and not op.shares_input:
                # A shared input is saved once, by the first matmul that reads it.
                total += (op.inner if op.stored_inner is None else op.stored_inner) * item
            elif policy == "dots" and isinstance(op, Multiply) and (chain.result_read or at + 1 < repeated):
                total += op.columns * item
            elif policy == "save_collectives" and at < repeated and _saves_result(op, sizes):
                assert isinstance(op, Collective)
                if not (
                    at + 1 < len(chain.ops) and _saves_result(chain.ops[at + 1], sizes)
                ):  # else only the last result of the two is saved
                    shards = prod(sizes[axis] for axis in op.axes) if op.forward == "reduce-scatter" else 1
                    total += op.buffer / tokens / shards
    return total


def _saves_result(op: Op, sizes: Mapping[str, int]) -> bool:
    # Gathered weights are governed by reshard_after, and a collective that is always repeated need not be saved.
    if not isinstance(op, Collective) or op.small or op.weight_itemsize or op.always_repeated or not op.forward:
        return False
    return prod(sizes[axis] for axis in op.axes) > 1
