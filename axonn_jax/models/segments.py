"""Segments of a decoder-only transformer: the smallest parts that a stage can hold, with their costs; no jax."""

from dataclasses import dataclass

from axonn_jax.models.config import ModelShape


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
    """What the names of its parameters begin with where it is a part of a numbered layer, such as `blocks.3`."""
    alike: str = ""
    """Segments of which this is equal differ in nothing but the values of their parameters; empty: like no other."""


def transformer_segments(shape: ModelShape) -> tuple[Segment, ...]:
    """Embedding, the two halves of every block, the head: their costs add up to the model's.

    Attention is counted without its causal half, as in the published formulas; a table lookup counts no FLOPs. A tied
    table counts as the embedding's parameters. Experts cost what a token that passes them computes.
    """
    seq, moe = shape.seq_len, shape.moe
    segments = [Segment("embedding", 0, shape.embedding_params())]
    for block in range(shape.layers):
        layer, mlp = f"blocks.{block}", seq * shape.mlp_matmul_flops(block)
        attention = shape.layer_forward_flops(1, layer=block) - mlp
        kind = "experts" if moe is not None and moe.is_routed(block) else "mlp"
        segments.append(Segment(f"{layer}.attention", attention, shape.attention_params(), layer, "attention"))
        segments.append(Segment(f"{layer}.mlp", mlp, shape.mlp_params(block), layer, kind))
    segments.append(Segment("head", shape.head_forward_flops(1), shape.head_params()))
    return tuple(segments)
