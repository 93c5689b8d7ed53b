"""The plain transformer: textbook formulas on whole arrays, one device, float64. Shares no code with the package.

Parameters come in the package's names; everything else is written out again from the definitions.
"""

import jax
import jax.numpy as jnp


def loss(params, shape, tokens, balance_weight=0.001):
    """Mean cross-entropy of [sequences, seq + 1] token ids; experts' imbalance is in its gradient alone."""
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    x = params["embedding.table"][inputs]
    if shape.positions == "learned":
        x = x + params["positions.table"][: inputs.shape[1]]
    imbalance = 0.0
    for i in range(shape.layers):
        own = {k.removeprefix(f"blocks.{i}."): v for k, v in params.items() if k.startswith(f"blocks.{i}.")}
        x, more = _block(own, shape, x)
        imbalance = imbalance + balance_weight * more
    x = _norm(params, "norm", shape, x)
    logits = x @ (params["embedding.table"].T if shape.tied else params["head.kernel"])
    log_probs = logits - jnp.log(jnp.sum(jnp.exp(logits), -1, keepdims=True))
    unseen = imbalance - jax.lax.stop_gradient(imbalance)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], -1)) + unseen


def _block(p, shape, x):
    x = x + _attention(p, shape, _norm(p, "attention_norm", shape, x))
    h = _norm(p, "mlp_norm", shape, x)
    if "mlp.router.kernel" in p:
        y, imbalance = experts(p, shape, h)
        return x + y, imbalance
    return x + _mlp(p, "mlp.", shape, h), 0.0


def _mlp(p, name, shape, h):
    if shape.mlp == "swiglu":
        gate = _linear(p, f"{name}gate", h)
        return _linear(p, f"{name}down", gate / (1 + jnp.exp(-gate)) * _linear(p, f"{name}up", h))
    h = _linear(p, f"{name}up", h)
    gelu = 0.5 * h * (1 + jnp.tanh((2 / jnp.pi) ** 0.5 * (h + 0.044715 * h**3)))
    return _linear(p, f"{name}down", gelu)


def experts(p, shape, h):
    """What a mixture of experts adds to [sequences, seq, hidden], and the mean over sequences of their imbalance."""
    scores, count, k = h @ p["mlp.router.kernel"], shape.experts, shape.experts_per_token
    shares = jnp.exp(scores) / jnp.sum(jnp.exp(scores), -1, keepdims=True)
    if shape.router == "softmax":
        gates, ranked = shares, shares + p["mlp.router.bias"]
    else:
        gates = 1 / (1 + jnp.exp(-scores))
        shares = gates / jnp.sum(gates, -1, keepdims=True)
        ranked = gates + p["mlp.router.bias"]
        groups = ranked.reshape(*ranked.shape[:-1], shape.router_groups, -1)
        if shape.router_groups > 1:
            best = jnp.sort(groups, -1)[..., -2:].sum(-1)
            kept = _largest(best, shape.router_groups_kept)
            ranked = jnp.where(kept[..., None], groups, -jnp.inf).reshape(ranked.shape)
    chosen = _largest(ranked, k)
    weights = jnp.where(chosen, gates, 0.0)
    if shape.router_norm:
        weights = weights / jnp.sum(weights, -1, keepdims=True)
    weights = weights * shape.router_scale
    y = jnp.zeros_like(h)
    for e in range(count):
        own = {f"{name}.kernel": p[f"mlp.experts.{name}.kernel"][e] for name in ("gate", "up", "down")
               if f"mlp.experts.{name}.kernel" in p}  # fmt: skip
        y = y + weights[..., e, None] * _mlp(own, "", shape, h)
    if shape.shared_experts:
        y = y + _mlp(p, "mlp.shared.", shape, h)
    often = jnp.mean(chosen, 1) * count / k
    return y, jnp.mean(jnp.sum(often * jnp.mean(shares, 1), -1))


def _largest(x, k):
    """Which entries are among the k largest of their row: by number, as compiled comparisons of floats may differ."""
    numbers = jnp.argsort(-jax.lax.stop_gradient(x), -1)[..., :k]
    return jnp.any(numbers[..., None] == jnp.arange(x.shape[-1]), -2)


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
