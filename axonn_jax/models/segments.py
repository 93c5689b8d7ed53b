"""Segments: a model as a sequence of parts with their costs, which a pipeline cuts into stages; no jax."""

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
    table counts as the embedding's parameters.
    """
    seq, width = shape.seq_len, shape.heads * shape.head_dim
    attention_matrices = shape.hidden * (shape.qkv_width + width)
    mlp_matrices = shape.layer_matmul_params() - attention_matrices
    mlp = shape.norm_params() + mlp_matrices + shape.mlp_biases()
    segments = [Segment("embedding", 0, shape.embedding_params())]
    for block in range(shape.layers):
        scores = 4 * seq * seq * width
        layer, attention = f"blocks.{block}", 2 * seq * attention_matrices + scores
        segments.append(Segment(f"{layer}.attention", attention, shape.layer_params() - mlp, layer, "attention"))
        segments.append(Segment(f"{layer}.mlp", 2 * seq * mlp_matrices, mlp, layer, "mlp"))
    segments.append(Segment("head", shape.head_forward_flops(1), shape.head_params()))
    return tuple(segments)
