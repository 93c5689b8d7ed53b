"""The ceiling: what bf16 matmuls alone reach on this device."""

import functools
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp

from axonn_jax.core.hardware import peak_flops
from checks.report import Emit, Row, attempt
from checks.sizes import matmul_sizes

_REPEATS = 8


def run(spec: dict[str, Any], emit: Emit) -> None:
    """One row a size."""
    for rows, width in matmul_sizes(spec["quick"]):
        name = f"{rows} x {width} x {width}"
        attempt(emit, "matmul", name, functools.partial(_measure, rows, width, name, spec))


def _measure(rows: int, width: int, name: str, spec: dict[str, Any]) -> Row:
    flops = 2 * rows * width * width
    # Enough work that a dispatch (some 0.1 ms) is lost in it, few enough products to compile quickly.
    count = 4 if spec["quick"] else max(8, min(128, round(2e13 / flops)))

    @jax.jit
    def chain(x: jax.Array, w: jax.Array) -> jax.Array:
        # Straight-line code: a loop would copy its carry, a matmul being unable to write over its operand.
        for _ in range(count):
            x = x @ w
        return x

    keys = jax.random.split(jax.random.key(0))
    # Random data (zeros run faster, for want of power drawn), scaled so that the products keep their size.
    x = jax.random.normal(keys[0], (rows, width), jnp.bfloat16)
    w = jax.random.normal(keys[1], (width, width), jnp.bfloat16) * jnp.bfloat16(width**-0.5)
    jax.block_until_ready(chain(x, w))
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        jax.block_until_ready(chain(x, w))
        times.append(time.perf_counter() - start)
    best, median = (flops * count / t for t in (min(times), statistics.median(times)))
    kind = jax.devices()[0].device_kind
    peak = peak_flops(kind)
    figures = {
        "flops_per_s": best,
        "median_flops_per_s": median,
        "products": count,
        "published_peak": peak,
        "of_peak": None if peak is None else best / peak,
    }
    share = "no published peak known" if peak is None else f"{100 * best / peak:.1f} % of {peak / 1e12:.0f}"
    note = f"{best / 1e12:8.2f} TFLOP/s best, {median / 1e12:8.2f} median; {share}"
    return Row("matmul", name, "ok", note, figures)
