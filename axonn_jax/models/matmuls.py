"""The matmuls with weights that a device runs for a transformer, by shape."""

from axonn_jax.grid import GridShape
from axonn_jax.models.inner import PAPERS, Inner
from axonn_jax.models.shape import ModelShape
from axonn_jax.tensor.matmul import Product, products


def local_products(
    shape: ModelShape, grid: GridShape, tokens: int, dtype: str, inner: Inner = PAPERS
) -> dict[Product, int]:
    """Every distinct product of a forward and backward pass, with how often it is run, for a device's `tokens`.

    Sizes are those of local shards (DESIGN section 4). Attention's products of activations are not among them.
    """
    stream = shape.hidden // grid.x
    read, over = (shape.hidden, grid.y * grid.x) if inner.attention else (stream, grid.y)
    qkv, width = shape.qkv_width // over, shape.heads * shape.head_dim // over
    hidden, ffn = (shape.hidden, shape.ffn // grid.y // grid.x) if inner.mlp else (stream, shape.ffn // grid.y)
    into_ffn = 2 if shape.mlp == "swiglu" else 1
    layers = [
        (products(tokens, read, qkv, dtype), shape.layers),
        (products(tokens, width, read, dtype), shape.layers),
        (products(tokens, hidden, ffn, dtype), shape.layers * into_ffn),
        (products(tokens, ffn, hidden, dtype), shape.layers),
        (products(tokens, stream, shape.padded_vocab(grid.y * grid.z) // grid.y, dtype, turned=shape.tied), 1),
    ]
    found: dict[Product, int] = {}
    for three, times in layers:
        for product in three:
            found[product] = found.get(product, 0) + times
    return found
