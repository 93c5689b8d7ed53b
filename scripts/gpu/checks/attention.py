"""The attention kernels against each other: outputs and gradients of random heads."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from axonn_jax.core.tensor.attention import causal_attention
from checks.report import Emit, Row, Skip, attempt
from checks.sizes import attention_shapes

OUTPUT = 2.0**-6
GRADIENT = 2.0**-5
"""Relative, against float32 on the same (bf16) inputs. Scores, weights and result are each rounded to bf16 (2^-9 of
a value), and a score's rounding is magnified by the exponential: 2^-6 leaves a factor of four. The backward pass
goes through the same roundings twice."""


def run(quick: bool, emit: Emit) -> None:
    """One row a kernel and shape."""
    for shape in attention_shapes(quick):
        for kernel in ("xla", "blocked", "cudnn"):
            name = f"attention {kernel}, kv {shape[3]}/{shape[2]} x {shape[4]}"
            attempt(emit, "parity", name, functools.partial(_check, name, shape, kernel))


@functools.cache
def _inputs(shape: tuple[int, int, int, int, int]) -> tuple[jax.Array, ...]:
    batch, seq, heads, kv_heads, head_dim = shape
    keys = jax.random.split(jax.random.key(2), 4)
    sizes = [(batch, seq, n, head_dim) for n in (heads, kv_heads, kv_heads, heads)]
    return tuple(jax.random.normal(k, s, jnp.bfloat16) for k, s in zip(keys, sizes, strict=True))


@functools.cache
def _reference(shape: tuple[int, int, int, int, int]) -> dict[str, np.ndarray]:
    with jax.default_matmul_precision("highest"):
        return _evaluate(tuple(a.astype(jnp.float32) for a in _inputs(shape)), "blocked")


def _evaluate(inputs: tuple[jax.Array, ...], kernel: Any) -> dict[str, np.ndarray]:
    @jax.jit
    def f(q: jax.Array, k: jax.Array, v: jax.Array, upstream: jax.Array) -> tuple[jax.Array, ...]:
        out, back = jax.vjp(lambda q, k, v: causal_attention(q, k, v, kernel), q, k, v)
        return out, *back(upstream)

    values = f(*inputs)
    return {name: np.asarray(value, np.float64) for name, value in zip(("out", "dq", "dk", "dv"), values, strict=True)}


def _check(name: str, shape: tuple[int, int, int, int, int], kernel: str) -> Row:
    if kernel == "cudnn" and jax.default_backend() != "gpu":
        raise Skip("no GPU")
    found, reference = _evaluate(_inputs(shape), kernel), _reference(shape)
    errors = {key: float(np.linalg.norm(found[key] - r) / np.linalg.norm(r)) for key, r in reference.items()}
    good = all(error <= (OUTPUT if key == "out" else GRADIENT) for key, error in errors.items())
    shown = "; ".join(f"{key} {error:.1e}" for key, error in errors.items())
    note = f"{shown} (out <= {OUTPUT:.1e}, gradients <= {GRADIENT:.1e})"
    return Row("parity", name, "ok" if good else "failed", note, {"errors": errors})
