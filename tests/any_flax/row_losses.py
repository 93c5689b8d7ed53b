"""Models and losses of strangers: of each row, of rows beside each other, with state, by jax's transformations."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

WIDTH, ROWS = 8, 24
X = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
MASKED = {"x": X, "mask": (np.arange(ROWS) % 5 < np.arange(ROWS) // 8 + 1).astype(np.float32)}


class Mlp(nnx.Module):
    def __init__(self, inside=lambda rngs: nnx.LayerNorm(2 * WIDTH, rngs=rngs), last=nnx.Linear):
        rngs = nnx.Rngs(0)
        self.first, self.inside = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), inside(rngs)
        self.last = last(2 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.last(self.inside(jnp.tanh(self.first(x))))


class Counted(nnx.Module):
    """State of three kinds that a call computes from its rows."""

    def __init__(self):
        self.layer = Mlp()
        self.seen, self.most = nnx.Variable(jnp.zeros(WIDTH, jnp.int32)), nnx.Variable({"x": jnp.zeros(())})
        self.key = jax.random.key(7)

    def __call__(self, x):
        self.seen[...] += jax.nn.one_hot(x.argmax(-1), WIDTH, dtype=jnp.int32).sum(0)
        self.most.set_value({"x": jnp.maximum(self.most.get_value()["x"], x.max())})
        return self.layer(x + 0.1 * jax.random.normal(self.key, (WIDTH,)))


class Queue(nnx.Module):
    """A codebook without a gradient, written by the call."""

    def __init__(self):
        self.layer, self.codes = Mlp(), nnx.Param(jnp.eye(WIDTH))

    def __call__(self, x):
        self.codes[...] = 0.9 * self.codes[...] + 0.1 * jax.lax.stop_gradient(x.mean(0))
        return self.layer(x @ jax.lax.stop_gradient(self.codes[...]))


class Twice(nnx.Param):
    def get_value(self, **options):
        return 2 * super().get_value(**options)


class Hooked(nnx.Module):
    def __init__(self):
        self.layer, self.gain = Mlp(), Twice(jnp.full(WIDTH, 0.5))

    def __call__(self, x):
        return self.layer(x) * self.gain.get_value()


def square(model, batch):
    return jnp.mean(jnp.square(model(batch) - batch))


def contrastive(model, batch):
    z = model(batch)
    z = z / jnp.linalg.norm(z, axis=-1, keepdims=True)
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T / 0.3, jnp.roll(jnp.arange(len(z)), 1)).mean()


def masked(model, batch):
    losses = jnp.square(model(batch["x"]) - 1).mean(-1)
    return (losses * batch["mask"]).sum() / batch["mask"].sum(), {"rows": ax.total(batch["mask"].sum())}


def each_row(model, batch):
    return jnp.mean(jax.vmap(lambda row: jnp.square(model(row) - row).mean())(batch))


def gradient_of_rows(model, batch):
    grads = jax.vmap(jax.grad(lambda row: model(row).sum()))(batch)
    return square(model, batch) + jnp.mean(jnp.square(grads))


def forward_mode(model, batch):
    value, tangent = jax.jvp(model, (batch,), (jnp.ones_like(batch),))
    return jnp.mean(jnp.square(value)) + jnp.mean(jnp.square(tangent))


def written_for_pmap(model, batch):
    return jax.lax.pmean(square(model, batch), "devices")


def perplexity(model, batch):
    loss = square(model, batch)
    return loss, {"perplexity": jnp.exp(loss)}


def spectral(linear_in, linear_out, rngs):
    return nnx.SpectralNorm(nnx.Linear(linear_in, linear_out, rngs=rngs), update_stats=True, rngs=rngs)


def normed_over_devices(rngs):
    return nnx.BatchNorm(2 * WIDTH, axis_name="devices", rngs=rngs)


CASES = {
    "rows beside rows": (Mlp, contrastive, X, "whole"),
    "a mask": (Mlp, masked, MASKED, "whole"),
    "each row by vmap": (Mlp, each_row, X, "whole"),
    "gradients of rows": (Mlp, gradient_of_rows, X, "whole"),
    "forward mode through a norm": (Mlp, forward_mode, X, "xla"),
    "a pmean": (Mlp, written_for_pmap, X, "parts"),
    "a number that is no mean": (Mlp, perplexity, X, "whole"),
    "state of the rows": (Counted, square, X, "whole"),
    "a codebook": (Queue, square, X, "whole"),
    "a norm of weights": (lambda: Mlp(last=spectral), square, X, "parts"),
    "a hook": (Hooked, square, X, "parts"),
    "statistics of the batch": (lambda: Mlp(normed_over_devices), square, X, "parts"),
}
