"""Segments of a decoder-only transformer, the units of pipeline partitioning, with their costs; no jax."""

from dataclasses import dataclass

from axonn_jax.core.errors import UserError
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import describe_single_device, halves, single_device_place
from axonn_jax.core.ops.costs import forward_flops, parameters
from axonn_jax.core.ops.language import Layer, merge_parts


@dataclass(frozen=True)
class Segment:
    """Smallest part of a model that a pipeline stage can hold."""

    name: str
    """Display name, such as `blocks.3.mlp`."""
    flops: int
    """FLOPs of the forward pass for one sequence; the backward pass takes about twice as many."""
    params: int
    """Number of parameters."""
    layer: str = ""
    """Prefix of its parameter names in a numbered layer, such as `blocks.3`; empty outside the layers."""
    alike: str = ""
    """Segments with equal values differ only in parameter values, and can share a program; empty: unique."""


def check_repeats(layers: int, period: int) -> None:
    """Raise ``UserError`` unless the layers are at least two full periods, and a multiple of the period."""
    if layers % period or layers < 2 * period:
        multiple = f", a multiple of {period}, after which kinds of layers repeat" if period > 1 else ""
        raise UserError("model.layers", layers, f"to scan layers, at least {2 * period}{multiple}")


def transformer_segments(shape: ModelShape) -> tuple[Segment, ...]:
    """Return the embedding, both halves of every block, and the head; their costs add up to the model's.

    FLOPs count full rather than causal attention, as in published formulas, no table lookups, and of the experts only
    those that a token chooses. A tied table counts as parameters of the embedding.
    """
    first, *_, last = describe_single_device(shape)

    def segment(name: str, of: Layer, layer: str = "", alike: str = "") -> Segment:
        return Segment(name, round(forward_flops(of, shape.seq_len)), parameters(of), layer, alike)

    segments = [segment("embedding", first)]
    for block in range(shape.layers):
        layer, routed = f"blocks.{block}", shape.experts_of(block) is not None
        attention, second = (merge_parts([part]) for part in halves(shape, block, single_device_place(shape)))
        rule = shape.attention_rule(block)
        segments.append(segment(f"{layer}.attention", attention, layer, f"attention with {rule}"))
        segments.append(segment(f"{layer}.mlp", second, layer, "experts" if routed else "mlp"))
    return (*segments, segment("head", last))
