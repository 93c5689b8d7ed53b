"""Flax NNX models of many kinds of layers, small enough to compile on every grid."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

FEATURES = 16


class Causal(nnx.Conv):
    """A user's own type of convolution."""

    def __init__(self, features, rngs):
        super().__init__(features, features, (4,), padding="CAUSAL", feature_group_count=features, rngs=rngs)


class Convolutions(nnx.Module):
    """A residual network of one convolution of each kind."""

    def __init__(self, rngs: nnx.Rngs):
        def conv(features=FEATURES, **options):
            return nnx.Conv(FEATURES, features, (3,), rngs=rngs, **options)

        mask = jnp.asarray(np.random.default_rng(0).integers(0, 2, (3, 4, FEATURES)), jnp.float32)
        self.stem = nnx.Conv(3, FEATURES, (3,), kernel_dilation=2, rngs=rngs)
        self.whole = nnx.List(
            [
                conv(feature_group_count=FEATURES, kernel_dilation=2),
                conv(feature_group_count=4),
                conv(feature_group_count=4, mask=mask),
                Causal(FEATURES, rngs),
                nnx.ConvTranspose(FEATURES, FEATURES, (3,), kernel_dilation=2, rngs=rngs),
            ]
        )
        self.mix = nnx.Conv(FEATURES, FEATURES, (1,), rngs=rngs)
        halved = {"feature_group_count": 8, "input_dilation": 2, "padding": ((1, 2),)}
        self.wide = conv(2 * FEATURES, feature_group_count=FEATURES, strides=2)
        self.narrow = nnx.Conv(2 * FEATURES, FEATURES, (3,), rngs=rngs, **halved)
        self.up = nnx.ConvTranspose(FEATURES, 6, (3,), strides=(2,), transpose_kernel=True, rngs=rngs)
        self.odd = nnx.Conv(6, 9, (3,), feature_group_count=3, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.stem(x))
        for layer in self.whole:
            x = x + nnx.silu(layer(self.mix(x)))
        x = x + jax.vmap(self.whole[0])(x)  # an example at a time
        x = self.narrow(nnx.silu(self.wide(x)))
        return self.odd(nnx.silu(self.up(x))).mean(1)


class Norms(nnx.Module):
    """Norms behind split features, in training; layers whose sizes or types cannot be split."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Linear(3, FEATURES, rngs=rngs)
        self.conv = nnx.Conv(FEATURES, FEATURES, (3,), use_bias=False, rngs=rngs)
        self.batch = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.depthwise = nnx.Conv(FEATURES, FEATURES, (3,), feature_group_count=FEATURES, use_bias=False, rngs=rngs)
        self.batch_2 = nnx.BatchNorm(FEATURES, rngs=rngs)
        self.group = nnx.GroupNorm(FEATURES, num_groups=4, rngs=rngs)
        self.instance = nnx.InstanceNorm(FEATURES, rngs=rngs)
        self.layer = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.lora = nnx.LoRA(FEATURES, 4, FEATURES, base_module=nnx.Linear(FEATURES, FEATURES, rngs=rngs), rngs=rngs)
        self.low = nnx.LoRALinear(FEATURES, FEATURES, lora_rank=4, rngs=rngs)
        for lora in (self.lora, self.low.lora):  # not zeros, as it is made: lora_a would have no gradient
            lora.lora_b[...] = 0.1 * jnp.cos(jnp.arange(4.0 * FEATURES).reshape(4, FEATURES))
        self.prelu = nnx.PReLU()
        self.attention = nnx.MultiHeadAttention(4, FEATURES, decode=False, normalize_qk=True, rngs=rngs)
        self.head = nnx.Linear(FEATURES, 5, rngs=rngs)
        self.odd = nnx.Linear(5, 7, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.batch(self.conv(nnx.silu(self.first(x)))))
        x = x + nnx.silu(self.batch_2(self.depthwise(x)))
        x = x + nnx.silu(self.group(x))
        x = x + nnx.silu(self.instance(x))
        x = self.prelu(self.low(self.lora(self.layer(x))))
        x = x + self.attention(x)
        return self.odd(nnx.silu(self.head(x))).mean(1)


class MambaBlock(nnx.Module):
    """A selective state space as Mamba has it: a causal depthwise convolution, a scan, gates."""

    def __init__(self, hidden: int, states: int, rngs: nnx.Rngs):
        inner = 2 * hidden
        self.norm = nnx.RMSNorm(hidden, rngs=rngs)
        self.stream = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.gate = nnx.Linear(hidden, inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(inner, inner, (4,), padding="CAUSAL", feature_group_count=inner, rngs=rngs)
        self.rates = nnx.Linear(inner, inner, rngs=rngs)
        self.select = nnx.Linear(inner, 2 * states, use_bias=False, rngs=rngs)
        self.decay = nnx.Param(jnp.log(jnp.arange(1.0, states + 1)) * jnp.ones((inner, 1)))
        self.skip = nnx.Param(jnp.ones(inner))
        self.out = nnx.Linear(inner, hidden, use_bias=False, rngs=rngs)

    def __call__(self, x):
        h = self.norm(x)
        u, gate = nnx.silu(self.conv(self.stream(h))), nnx.silu(self.gate(h))
        rate = nnx.softplus(self.rates(u))
        into, outof = jnp.split(self.select(u), 2, axis=-1)
        keep = jnp.exp(-rate[..., None] * jnp.exp(self.decay[...]))
        add = (rate * u)[..., None] * into[:, :, None]

        def step(state, now):
            state = now[0] * state + now[1]
            return state, jnp.sum(state * now[2][:, None], -1)

        over_time = [jnp.moveaxis(each, 1, 0) for each in (keep, add, outof)]
        _, y = lax.scan(step, jnp.zeros_like(add[:, 0]), tuple(over_time))
        return x + self.out((jnp.moveaxis(y, 0, 1) + self.skip[...] * u) * gate)


class Mamba(nnx.Module):
    """A language model of Mamba blocks."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(32, FEATURES, rngs=rngs)
        self.blocks = nnx.List([MambaBlock(FEATURES, 4, rngs)])

    def __call__(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.embed.attend(x)


class Einsums(nnx.Module):
    """Attention of nnx.Einsum layers, with a fused kernel for keys and values, and a tied head."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(64, 32, rngs=rngs)
        self.query = nnx.Einsum("btd,dhk->bthk", (32, 4, 8), (4, 8), rngs=rngs)
        self.both = nnx.Einsum("btd,cdhk->cbthk", (2, 32, 4, 8), rngs=rngs)
        self.out = nnx.Einsum("...hk,hkd->...d", (4, 8, 32), (32,), rngs=rngs)
        self.norm = nnx.LayerNorm(32, use_bias=False, rngs=rngs)

    def __call__(self, ids):
        x = self.embed(ids)
        key, value = self.both(x)
        x = x + self.out(nnx.dot_product_attention(self.query(x), key, value))
        return self.embed.attend(self.norm(x))


class Scanned(nnx.Module):
    """Depthwise layers stacked by `nnx.vmap` and run by `nnx.scan`."""

    def __init__(self, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(in_axes=0, out_axes=0)
        def make(rngs):
            return nnx.Conv(FEATURES, FEATURES, (3,), feature_group_count=FEATURES, rngs=rngs)

        self.stem = nnx.Linear(3, FEATURES, rngs=rngs)
        self.layers = make(rngs)

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def run(layer, x):
            return x + nnx.silu(layer(x))

        return run(self.layers, self.stem(x)).mean(1)


MODELS = {"convolutions": Convolutions, "norms": Norms, "mamba": Mamba, "einsums": Einsums, "scanned": Scanned}


def script(kind: str) -> SimpleNamespace:
    """A model's `make`, its `loss(model, batch)` and one batch of 16 rows."""
    make = MODELS[kind]
    draw = np.random.default_rng(0)
    if kind in ("mamba", "einsums"):
        batch = {"x": draw.integers(0, 32, (16, 8), dtype=np.int32)}
    else:
        batch = {"x": draw.standard_normal((16, 8, 3)).astype(np.float32)}

    def loss(model, batch):
        y = model(batch["x"])
        if kind in ("mamba", "einsums"):
            logp = jax.nn.log_softmax(y[:, :-1])
            return -jnp.mean(jnp.take_along_axis(logp, batch["x"][:, 1:, None], -1))
        return jnp.mean(jnp.square(y - jnp.arange(y.shape[-1], dtype=y.dtype)))

    return SimpleNamespace(make=lambda: make(nnx.Rngs(0)), loss=loss, batch=batch)
