"""Modules as other people write them: types derived from Flax layers, parameters of their own, stacks of layers."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

HIDDEN, HEADS, VOCAB, ROWS, LENGTH, LAYERS = 32, 4, 64, 8, 6, 3


class Wide(nnx.Linear):
    """An `__init__` of its own."""

    def __init__(self, features: int, rngs: nnx.Rngs):
        super().__init__(features, 2 * features, use_bias=False, rngs=rngs)


class Scaled(nnx.Linear):
    """Work before and after the layer's, with a parameter of its own."""

    def __init__(self, *args, rngs: nnx.Rngs):
        super().__init__(*args, rngs=rngs)
        self.shift = nnx.Param(jnp.full(self.out_features, 0.1))

    def __call__(self, x):
        return 2.0 * super().__call__(jnp.tanh(x)) + self.shift[...]


class Twice(Scaled):
    """Derived from a derived type, compiled and called by keyword."""

    @nnx.jit
    def __call__(self, x):
        return super().__call__(x=x) + 1.0


class Padded(nnx.Conv):
    """A convolution that adds to its result, of single examples too."""

    def __call__(self, x):
        return super().__call__(x) + 1.0


class Squared(nnx.Linear):
    """Its kernel's squares multiply, without the layer's own method."""

    def __call__(self, x):
        return x @ jnp.square(self.kernel[...]) + self.bias[...]


class Unit(nnx.Embed):
    """Methods of its own around the table."""

    def encode(self, ids):
        return self(ids) * jnp.sqrt(jnp.float32(self.features))

    def decode(self, x):
        return self.attend(x) + 1e-3 * x @ self.embedding[...].T


class Offset(nnx.RMSNorm):
    """Gemma's norm, of a weight around zero."""

    def __call__(self, x):
        return super().__call__(x) + x


class Derived(nnx.Module):
    """A model of derived layers."""

    def __init__(self, rngs: nnx.Rngs):
        self.table = Unit(VOCAB, HIDDEN, rngs=rngs)
        self.norm = Offset(HIDDEN, rngs=rngs)
        self.up = Wide(HIDDEN, rngs)
        self.scaled = Scaled(2 * HIDDEN, HIDDEN, rngs=rngs)
        self.twice = Twice(HIDDEN, HIDDEN, rngs=rngs)
        self.conv = Padded(HIDDEN, HIDDEN, (3,), feature_group_count=HIDDEN, rngs=rngs)
        self.square = Squared(HIDDEN, HIDDEN, rngs=rngs)
        self.lora = nnx.LoRALinear(HIDDEN, HIDDEN, lora_rank=4, rngs=rngs)
        self.lora.lora.lora_b[...] = 0.1 * jnp.cos(jnp.arange(4.0 * HIDDEN).reshape(4, HIDDEN))

    def __call__(self, ids):
        x = self.norm(self.table.encode(ids))
        x = x + self.twice(self.scaled(nnx.gelu(self.up(x))))
        x = x + jax.vmap(self.conv)(self.conv(x))  # an example at a time
        return self.table.decode(self.lora(self.square(x)))


class Product(nnx.Module):
    """A strangers' einsum layer."""

    def __init__(self, string, shape, rngs):
        self.string, self.w = string, nnx.Param(0.2 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.string, x, self.w[...])


class Rms(nnx.Module):
    """A strangers' norm."""

    def __init__(self, features):
        self.scale = nnx.Param(jnp.ones(features))

    def __call__(self, x):
        return self.scale[...] * x * jax.lax.rsqrt(jnp.mean(jnp.square(x), -1, keepdims=True) + 1e-6)


class Own(nnx.Module):
    """A language model as tunix writes them: nothing but parameters, of which one is used twice."""

    def __init__(self, rngs: nnx.Rngs):
        head = HIDDEN // HEADS
        self.input_embedding = nnx.Param(0.2 * jax.random.normal(rngs.params(), (VOCAB, HIDDEN)))
        self.norm = Rms(HIDDEN)
        self.qkv = nnx.List([Product("btd,dnh->btnh", (HIDDEN, HEADS, head), rngs) for _ in range(3)])
        self.out = Product("btnh,nhd->btd", (HEADS, head, HIDDEN), rngs)
        self.mlp = nnx.List([nnx.Linear(HIDDEN, 2 * HIDDEN, rngs=rngs), nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)])

    def __call__(self, ids):
        x = self.input_embedding[ids]
        h = self.norm(x)
        x = x + self.out(nnx.dot_product_attention(*(layer(h) for layer in self.qkv)))
        x = x + self.mlp[1](nnx.gelu(self.mlp[0](x)))
        return x @ self.input_embedding[...].T


class Block(nnx.Module):
    """A transformer's block."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm_1, self.norm_2 = nnx.LayerNorm(HIDDEN, rngs=rngs), nnx.RMSNorm(HIDDEN, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, HIDDEN, decode=False, rngs=rngs)
        self.up = Scaled(HIDDEN, 2 * HIDDEN, rngs=rngs)
        self.conv = nnx.Conv(2 * HIDDEN, 2 * HIDDEN, (3,), feature_group_count=2 * HIDDEN, rngs=rngs)
        self.down = nnx.Linear(2 * HIDDEN, HIDDEN, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm_1(x))
        return x + self.down(nnx.gelu(self.conv(self.up(self.norm_2(x)))))


class Stacked(nnx.Module):
    """Blocks stacked by `nnx.vmap` and run by `nnx.scan`; heads stacked and run by `nnx.vmap`."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0)
        def blocks(rngs):
            return Block(rngs)

        @nnx.split_rngs(splits=2)
        @nnx.vmap(in_axes=0, out_axes=0)
        def heads(rngs):
            return nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

        self.table = nnx.Embed(VOCAB, HIDDEN, rngs=rngs)
        self.blocks, self.heads = blocks(rngs), heads(rngs)

    def __call__(self, ids):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(block, x):
            return block(x)

        @nnx.vmap(in_axes=(0, None))
        def project(head, x):
            return head(x)

        return jnp.sum(jnp.sin(project(self.heads, run(self.blocks, self.table(ids)))), 0)


MODELS = {"derived": Derived, "own": Own, "stacked": Stacked}
IDS = np.random.default_rng(0).integers(0, VOCAB, (ROWS, LENGTH), dtype=np.int32)


def loss(model, ids):
    """Mean cross-entropy of each next id."""
    logp = jax.nn.log_softmax(model(ids)[:, :-1])
    return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], -1))
