"""Results of two computations of one loss, compared: random numbers alike, weights moved, gradients by few sums."""

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

from axonn_jax.tensor.params import Params

_ROUNDING, _FLOOR = 2e-5, 1e-7
"""Difference that is rounding of float32, over the larger of two results; and of a number near 0."""
SINGLE, HALF = 2.0**-23, 2.0**-8
"""Rounding of a weight, by the precision that a model computes in."""
_NOISE = 8
"""Difference that is rounding, over what results differ by when each weight is moved by its rounding."""
_POINTS = {"": (0.0, 0.0), "with other weights ": (0.05, 0.02)}
"""Noise of the weights, of their root mean square and absolute, with which results are compared."""
_SUMS = 8
"""Sums that stand for a parameter's gradient."""


class Name(NamedTuple):
    """Name of a result."""

    weights: str
    """One of `_POINTS`."""
    kind: str
    """One of `_KINDS`."""
    path: str = ""

    def __str__(self) -> str:
        return f"{self.weights}{self.kind}{self.path}"


_KINDS = ("the loss", "aux ", "state ", "the gradient of ")
"""Kinds of results, in the order in which their differences are told."""

Results = dict[Name, np.ndarray]
Run = Callable[[float], Results]
"""Results of a loss with noise of the weights, of their root mean square."""


class Difference(NamedTuple):
    """Result that is not that of all rows at once."""

    name: Name
    got: np.ndarray
    want: np.ndarray

    def __str__(self) -> str:
        if self.got.ndim == self.want.ndim == 0:
            return f"{self.name} is {float(self.got):.7g}, of all rows at once {float(self.want):.7g}"
        relative = _off(self.got, self.want) / max(_largest(self.got), _largest(self.want))
        return f"{self.name} is {relative:.1e} off that of all rows at once"


def at_points(run: Callable[[Params], Any], params: Params, mesh: Mesh, noise: float) -> Results:
    """Return the results with the weights, and with weights moved, on the host."""
    named: dict[Name, Any] = {}
    for weights, (relative, absolute) in _POINTS.items():
        near = {n: _moved(value, _signs(value.shape), relative + noise, absolute) for n, value in params.items()}
        (loss, *trees), grads = run(near)
        whole = NamedSharding(mesh, P())  # of equal gradients the sums are equal, in every layout
        trees.append({name: _sketch(value, _signs(value.shape), whole) for name, value in grads.items()})
        named[Name(weights, _KINDS[0])] = loss
        for kind, tree in zip(_KINDS[1:], trees, strict=True):
            for path, value in tree_leaves_with_path(tree):
                named[Name(weights, kind, keystr(path, simple=True, separator="."))] = value
    return {name: np.asarray(value) for name, value in named.items()}


def apart(got: Results, want: Results, noisy: Results | None = None) -> list[Difference]:
    """Return the results that differ by more than rounding, or than `_NOISE` times what `noisy` ones differ by.

    Results of replicas, [data, ...], are each compared.
    """
    differences = []
    for name in got.keys() & want.keys():
        exact = want[name].dtype.kind not in "fcV"
        rounding = max(_ROUNDING * _largest(want[name]), _FLOOR if name.kind in _KINDS[:2] else 0.0)
        noise = _NOISE * _off(noisy[name], want[name]) if noisy else 0.0
        if not _off(got[name], want[name]) <= (0.0 if exact else max(rounding, noise)):
            differences.append(Difference(name, got[name], want[name]))
    return sorted(differences, key=lambda each: (_KINDS.index(each.name.kind), each.name))


def _off(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of entries; equal infinities and two NaN are no difference."""
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    with np.errstate(all="ignore"):
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b)).max(initial=0))


def _largest(a: np.ndarray) -> float:
    """Return the largest finite entry's size."""
    sizes = np.abs(a.astype(np.complex128))
    return float(sizes.max(initial=0, where=np.isfinite(sizes)))


def _next(key: jax.Array) -> jax.Array:
    return key * jnp.uint32(1664525) + jnp.uint32(1013904223)


def _bits(key: jax.Array, width: int, shape: tuple[int, ...]) -> jax.Array:
    bits = jnp.uint32(0x40000000) | (key[0] >> 4)
    dtype = jnp.dtype(f"uint{width}")
    own = bits.astype(dtype) << (width - 32) if width > 32 else (bits >> (32 - width)).astype(dtype)
    return jnp.broadcast_to(own, shape)


_CONSTANT = define_prng_impl(
    key_shape=(2,),  # as jax's own, whose data a loss may read
    seed=lambda seed: jnp.broadcast_to(seed, (2,)).astype(jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(_next(key), (*shape, 2)),
    random_bits=_bits,
    fold_in=lambda key, number: _next(key),
    name="axonn_constant",
    tag="constant",
)


def constant_key() -> jax.Array:
    """Return a key whose draws are numbers between 1/4 and 5/16, as uniform, by the key alone.

    A tensor's entries are alike, and whoever draws until a number fits (as for a gamma distribution) comes to an end.
    """
    return jax.random.key(0, impl=_CONSTANT)


@jax.jit
def _moved(value: jax.Array, signs: list[jax.Array], relative: float, absolute: float) -> jax.Array:
    """Return a parameter with noise of a part of its root mean square and of a size, the same in every layout.

    It keeps its dtype, which under `jax_enable_x64` the signs and sizes would widen: the program takes no other.
    """
    noise = jnp.ones(_SUMS)
    for each in signs:
        noise = noise[..., None, :] * each
    size = relative * jnp.sqrt(jnp.mean(jnp.square(value))) + absolute
    return value + (size * jnp.mean(noise, -1) * _SUMS**0.5).astype(value.dtype)


@partial(jax.jit, static_argnums=2)
def _sketch(value: jax.Array, signs: list[jax.Array], layout: NamedSharding) -> jax.Array:
    """Return sums of a gradient's entries, each with a sign, [8]."""
    value = value[..., None]
    for each in reversed(signs):
        value = jnp.sum(value * each, -2)
    return lax.with_sharding_constraint(value, layout)


def _signs(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Return a sign for each index of every dim, [size, 8]."""
    return [_signs_along(dim, size) for dim, size in enumerate(shape)]


@cache
def _signs_along(dim: int, size: int) -> np.ndarray:
    return np.random.default_rng((size, dim)).choice(np.array([-1, 1], np.float32), (size, _SUMS))
