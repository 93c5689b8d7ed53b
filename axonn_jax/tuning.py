"""Measures the forms of matmuls on a device: which one it computes fastest."""

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from axonn_jax.tensor.matmul import AS_WRITTEN, FORMS, Form, Product, Stored, multiply

GAIN = 1.05
"""A form is chosen only where it is faster than the product as written by at least this factor."""
_ROUND_S = 0.004  # of one form in one round, so that a timer's and a dispatch's own time do not count
_MOST_CALLS = 64


@dataclass(frozen=True)
class Measured:
    """What the forms of one product took, in turns."""

    product: Product
    seconds: Mapping[Form, tuple[float, ...]]
    """Of one call, by round."""

    def gain(self, form: Form) -> float:
        """How much faster than as written, as the median over the rounds: whatever slowed a round met both."""
        pairs = zip(self.seconds[AS_WRITTEN], self.seconds[form], strict=True)
        return median(written / this for written, this in pairs)

    @property
    def best(self) -> Form:
        """The fastest form, or as written where none is faster by `GAIN`."""
        form = max(self.seconds, key=self.gain)
        return form if self.gain(form) >= GAIN else AS_WRITTEN

    def rate(self, form: Form) -> float:
        """FLOP/s, from the median round."""
        return self.product.flops / median(self.seconds[form])


def measure(
    products: Iterable[Product], device: Any, *, rounds: int = 5, budget_s: float = float("inf")
) -> list[Measured]:
    """Times every form of every product on one device, in the order given, until the seconds are used up.

    A product that is begun is finished. Compiles a small program a form (`surrounded`); nothing stays on the device.
    """
    end = time.monotonic() + budget_s
    found = []
    alone = Mesh([device], ("device",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(alone):  # not the run's, of which this is one device
        for product in products:
            if time.monotonic() >= end:
                break
            found.append(_measure(product, device, rounds))
    return found


def _measure(product: Product, device: Any, rounds: int) -> Measured:
    given = tuple(_operand(shape, product.dtype, device) for shape in (*product.shapes, (product.m, product.n)))
    programs = {form: _compiled(product, form, given) for form in FORMS}
    for program in programs.values():
        jax.block_until_ready(program(*given))  # a first call does more than compute
    taken: dict[Form, list[float]] = {form: [] for form in FORMS}
    calls = max(1, min(_MOST_CALLS, round(_ROUND_S / _seconds(programs[AS_WRITTEN], given, 1))))
    for _ in range(rounds):
        for form, program in programs.items():
            taken[form].append(_seconds(program, given, calls))
    return Measured(product, {form: tuple(times) for form, times in taken.items()})


def surrounded(a: jax.Array, b: jax.Array, c: jax.Array, stored: Stored, form: Form) -> jax.Array:
    """A product as in a step: of operands that were just computed, its result added to something.

    XLA fuses a copy with what computes the operand, and the loop that does both may take longer than the product saves:
    a form that was 1.8 times as fast on operands from memory took 1.3 times as long behind a GELU, and slowed the step
    down. So a GELU it is, for both: few operations of a step cost more to run element by element, against the grain.
    """
    return c + multiply(jax.nn.gelu(a), jax.nn.gelu(b), stored, form)


def _compiled(product: Product, form: Form, given: tuple[jax.Array, ...]) -> Any:
    return jax.jit(partial(surrounded, stored=product.stored, form=form)).lower(*given).compile()


def _seconds(program: Any, given: tuple[jax.Array, ...], calls: int) -> float:
    begin = time.perf_counter()
    for _ in range(calls):
        last = program(*given)
    jax.block_until_ready(last)  # a device runs its programs in order
    return (time.perf_counter() - begin) / calls


def _operand(shape: tuple[int, int], dtype: str, device: Any) -> jax.Array:
    """Random numbers, some of them over and over: a GPU clocks higher on zeros."""
    values = np.resize(np.random.default_rng(0).standard_normal(65_537).astype(np.float32), shape)
    return jax.device_put(values.astype(jnp.dtype(dtype)), device)
