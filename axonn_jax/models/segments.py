"""Segments of a decoder-only transformer: the smallest parts that a stage can hold, with their costs; no jax."""

from dataclasses import dataclass

from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.declared.transformer import alone, describe_alone, halves
from axonn_jax.ops.costs import forward_flops, parameters
from axonn_jax.ops.language import Layer, joined


@dataclass(frozen=True)
class Segment:
    """One link of the sequence: the smallest part of a model that a stage can hold."""

    name: str
    """For people, such as `blocks.3.mlp`."""
    flops: int
    """FLOPs of its forward pass for one sequence (its backward takes about twice as many)."""
    params: int
    """Parameters it holds."""
    layer: str = ""
    """Prefix of the parameters' names in a numbered layer, such as `blocks.3`; empty outside of one."""
    alike: str = ""
    """Segments of which this is equal differ in nothing but the values of their parameters; empty: like no other."""


def check_repeats(layers: int, period: int) -> None:
    """Raise ``UserError`` where so many layers are fewer than two of a kind, or end between two kinds."""
    if layers % period or layers < 2 * period:
        multiple = f", a multiple of {period}, after which kinds of layers repeat" if period > 1 else ""
        raise UserError("model.layers", layers, f"to scan layers, at least {2 * period}{multiple}")


def transformer_segments(shape: ModelShape) -> tuple[Segment, ...]:
    """Return embedding, the two halves of every block, and the head; their costs add up to the model's.

    Attention is counted without its causal half, as in the published formulas; a table lookup counts no FLOPs. A tied
    table counts as the embedding's parameters. Experts count a token's own choices.
    """
    first, *_, last = describe_alone(shape)

    def segment(name: str, of: Layer, layer: str = "", alike: str = "") -> Segment:
        return Segment(name, round(forward_flops(of, shape.seq_len)), parameters(of), layer, alike)

    segments = [segment("embedding", first)]
    for block in range(shape.layers):
        layer, routed = f"blocks.{block}", shape.experts_of(block) is not None
        attention, second = (joined([part]) for part in halves(shape, block, alone(shape)))
        rule = shape.attention_rule(block)
        segments.append(segment(f"{layer}.attention", attention, layer, f"attention with {rule}"))
        segments.append(segment(f"{layer}.mlp", second, layer, "experts" if routed else "mlp"))
    return (*segments, segment("head", last))
