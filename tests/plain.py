"""The plain transformer: textbook formulas on whole arrays, one device, float64. Shares no code with the package.

Parameters come in the package's names; everything else is written out again from the definitions.
"""

import jax
import jax.numpy as jnp


def loss(params, shape, tokens):
    """Mean cross-entropy of [sequences, seq + 1] token ids."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding.table"][inputs]
    if shape.positions == "learned":
        x = x + params["positions.table"][: inputs.shape[1]]
    for i in range(shape.layers):
        x = _block(
            {k.removeprefix(f"blocks.{i}."): v for k, v in params.items() if k.startswith(f"blocks.{i}.")}, shape, x
        )
    x = _norm(params, "norm", shape, x)
    logits = x @ (params["embedding.table"].T if shape.tied else params["head.kernel"])
    log_probs = logits - jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1))


def _block(p, shape, x):
    x = x + _attention(p, shape, _norm(p, "attention_norm", shape, x))
    h = _norm(p, "mlp_norm", shape, x)
    if shape.mlp == "swiglu":
        gate = _linear(p, "mlp.gate", h)
        return x + _linear(p, "mlp.down", gate / (1 + jnp.exp(-gate)) * _linear(p, "mlp.up", h))
    h = _linear(p, "mlp.up", h)
    gelu = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return x + _linear(p, "mlp.down", gelu)


def _attention(p, shape, x):
    batch, seq, _ = x.shape
    d, group = shape.head_dim, shape.heads // shape.kv_heads
    qkv = _linear(p, "attention.qkv", x).reshape(batch, seq, shape.kv_heads, group + 2, d)
    out = []
    causal = jnp.arange(seq)[:, None] >= jnp.arange(seq)[None, :]
    for head in range(shape.heads):
        kv = head // group
        q, k, v = qkv[:, :, kv, head % group], qkv[:, :, kv, group], qkv[:, :, kv, group + 1]
        if shape.positions == "rope":
            q, k = _rotate(q, shape.rope_theta), _rotate(k, shape.rope_theta)
        scores = jnp.where(causal, q @ k.transpose(0, 2, 1) / d**0.5, -1e300)
        weights = jnp.exp(scores - scores.max(-1, keepdims=True))
        out.append(weights / weights.sum(-1, keepdims=True) @ v)
    return _linear(p, "attention.out", jnp.concatenate(out, -1))


def _rotate(x, theta):
    """Complex multiplication: feature i and feature i + d/2 are real and imaginary part."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None] * theta ** -(jnp.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * jnp.exp(1j * angle)
    return jnp.concatenate([turned.real, turned.imag], -1)


def _norm(p, name, shape, x):
    if shape.norm == "layernorm":
        x = x - x.mean(-1, keepdims=True)
    x = x / jnp.sqrt((x**2).mean(-1, keepdims=True) + shape.norm_eps)
    return x * p[f"{name}.scale"] + p.get(f"{name}.shift", 0.0)


def _linear(p, name, x):
    return x @ p[f"{name}.kernel"] + p.get(f"{name}.bias", 0.0)


def reference(params, shape, tokens):
    """Loss, gradients and global norm in float64, as numpy."""
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        wide = {name: jnp.asarray(value, jnp.float64) for name, value in params.items()}
        value, grads = jax.jit(jax.value_and_grad(lambda p: loss(p, shape, jnp.asarray(tokens))))(wide)
        norm = jnp.sqrt(sum(jnp.sum(g**2) for g in grads.values()))
        return jax.tree.map(jax.device_get, (value, grads, norm))
