"""Numerical comparison of two computations of a loss, with constant draws, perturbed weights and gradient sketches."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.random import define_prng_impl
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path

from axonn_jax.core.tensor.params import Params

_ROUNDING, _FLOOR = 2e-5, 1e-7
"""Tolerances for float32 rounding: relative to the largest entry, and absolute for scalars near 0."""
SINGLE, HALF = 2.0**-23, 2.0**-8
"""Relative rounding of a weight in float32 and in bfloat16, the coarser of the half precisions."""
_NOISE = 8
"""Factor by which a difference may exceed the effect of perturbing every weight by its rounding."""
_POINTS = {"": (0.0, 0.0), "with other weights ": (0.05, 0.02)}
"""Perturbations of the weights at which results are compared: relative to their root mean square, and absolute."""
_SUMS = 8
"""Number of random projections that represent a parameter's gradient."""


class Name(NamedTuple):
    """Name of a result."""

    weights: str
    """A key of `_POINTS`."""
    kind: str
    """One of `_KINDS`."""
    path: str = ""

    def __str__(self) -> str:
        return f"{self.weights}{self.kind}{self.path}"


_KINDS = ("the loss", "aux ", "state ", "the gradient of ")
"""Kinds of results, in the order in which differences are reported."""

Results = dict[Name, np.ndarray]
Run = Callable[[float], Results]
"""Function from extra noise of the weights, relative to their root mean square, to the results of a loss."""


class Difference(NamedTuple):
    """A result that differs from the loss of all rows at once."""

    name: Name
    got: np.ndarray
    want: np.ndarray

    def __str__(self) -> str:
        if self.got.ndim == self.want.ndim == 0:
            return f"{self.name} is {float(self.got):.7g}, of all rows at once {float(self.want):.7g}"
        relative = _off(self.got, self.want) / max(_largest(self.got), _largest(self.want))
        return f"{self.name} is {relative:.1e} off that of all rows at once"


def at_points(run: Callable[[Params], Any], params: Params, mesh: Mesh, noise: float) -> Results:
    """Evaluate a loss at the weights and at perturbed weights.

    Args:
        run: Function from parameters to (loss, metrics, state), gradients.
        params: Parameters by path.
        mesh: Mesh of the parameters.
        noise: Extra noise of the weights, relative to their root mean square.

    Returns:
        Results by name, on the host; a gradient is represented by its sketch.
    """
    results: dict[Name, Any] = {}
    for weights, (relative, absolute) in _POINTS.items():
        near = {n: _moved(value, _signs(value.shape), relative + noise, absolute) for n, value in params.items()}
        (loss, *trees), grads = run(near)
        replicated = NamedSharding(mesh, P())  # sketches of equal gradients are equal in every layout
        trees.append({name: _sketch(value, _signs(value.shape), replicated) for name, value in grads.items()})
        results[Name(weights, _KINDS[0])] = loss
        for kind, tree in zip(_KINDS[1:], trees, strict=True):
            for path, value in tree_leaves_with_path(tree):
                results[Name(weights, kind, keystr(path, simple=True, separator="."))] = value
    return {name: np.asarray(value) for name, value in results.items()}


def find_differences(got: Results, want: Results, noisy: Results | None = None) -> list[Difference]:
    """Return the results that differ by more than rounding.

    Args:
        got: Results to check; those of replicas are [data, ...], and every replica is compared.
        want: Expected results.
        noisy: Expected results with noise of the size of rounding, whose effect on a result, times `_NOISE`, is
            tolerated too.

    Returns:
        The differences, in the order of their kinds.
    """
    mismatches = []
    for name in got.keys() & want.keys():
        exact = want[name].dtype.kind not in "fcV"
        rounding = max(_ROUNDING * _largest(want[name]), _FLOOR if name.kind in _KINDS[:2] else 0.0)
        noise = _NOISE * _off(noisy[name], want[name]) if noisy else 0.0
        # Written as `not <=`, so that a NaN in one of the results counts as a difference.
        if not _off(got[name], want[name]) <= (0.0 if exact else max(rounding, noise)):
            mismatches.append(Difference(name, got[name], want[name]))
    return sorted(mismatches, key=lambda mismatch: (_KINDS.index(mismatch.name.kind), mismatch.name))


def _off(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of entries; equal infinities, and two NaNs, count as equal."""
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    with np.errstate(all="ignore"):
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b)).max(initial=0))


def _largest(a: np.ndarray) -> float:
    """Return the largest magnitude of a finite entry."""
    sizes = np.abs(a.astype(np.complex128))
    return float(sizes.max(initial=0, where=np.isfinite(sizes)))


# Parts of the rows draw other random numbers than all rows at once, so the comparison needs draws that do not depend on
# shape or position. A key still advances when it is split, by the constants of a linear congruential generator.
def _next(key: jax.Array) -> jax.Array:
    return key * jnp.uint32(1664525) + jnp.uint32(1013904223)


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = jnp.uint32(0x40000000) | (key[0] >> 4)
    dtype = jnp.dtype(f"uint{width}")
    word = bits.astype(dtype) << (width - 32) if width > 32 else (bits >> (32 - width)).astype(dtype)
    return jnp.broadcast_to(word, shape)


_CONSTANT = define_prng_impl(
    key_shape=(2,),  # like jax's default keys, because a loss may read a key's data
    seed=lambda seed: jnp.broadcast_to(seed, (2,)).astype(jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(_next(key), (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, number: _next(key),
    name="axonn_constant",
    tag="constant",
)


def constant_key() -> jax.Array:
    """Return a key whose draws depend only on the key: uniform ones lie between 1/4 and 5/16.

    All entries of a tensor are equal. The value still changes from one key to the next, so that rejection sampling, for
    example of a gamma distribution, terminates.
    """
    return jax.random.key(0, impl=_CONSTANT)


@jax.jit
def _moved(value: jax.Array, signs: list[jax.Array], relative: float, absolute: float) -> jax.Array:
    """Return a parameter with noise that is the same in every layout.

    The result is cast back to the parameter's dtype, which signs and sizes would widen under `jax_enable_x64`: compiled
    programs accept no other.
    """
    noise = jnp.ones(_SUMS)
    for dim_signs in signs:
        noise = noise[..., None, :] * dim_signs
    size = relative * jnp.sqrt(jnp.mean(jnp.square(value))) + absolute
    return value + (size * jnp.mean(noise, -1) * _SUMS**0.5).astype(value.dtype)


@partial(jax.jit, static_argnums=2)
def _sketch(value: jax.Array, signs: list[jax.Array], layout: NamedSharding) -> jax.Array:
    """Return random projections of a gradient with signs, [8], to avoid copying whole gradients to the host."""
    value = value[..., None]
    for dim_signs in reversed(signs):
        value = jnp.sum(value * dim_signs, -2)
    return lax.with_sharding_constraint(value, layout)


def _signs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return random signs for every dimension, each [size, 8]; their products are the signs of entries."""
    return [_signs_along(dim, size) for dim, size in enumerate(shape)]


@cache
def _signs_along(dim: int, size: int) -> np.ndarray:
    return np.random.default_rng((size, dim)).choice(np.array([-1, 1], np.float32), (size, _SUMS))
