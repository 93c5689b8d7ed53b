"""Rough execution times of equations on an accelerator, used only to order them, never as predictions."""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

from jax.extend.core import JaxprEqn, Literal, Var

from axonn_jax.core.hardware import H100, Link

_COLLECTIVES = frozenset({"psum", "psum2", "psum_invariant", "all_gather", "reduce_scatter", "pmax", "ppermute"})
_FLOPS_PER_S = 8e14
_BYTES_PER_S = 3e12


class OpTimes:
    """Estimates of equations' times inside a manual region.

    Args:
        sizes: Sizes of the mesh's axes, slowest first.
    """

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes = dict(sizes)

    def seconds(self, eqn: JaxprEqn) -> float:
        """Return the estimate for an equation: by FLOPs, by a collective's ring bytes, or by bytes of the results."""
        if is_collective(eqn):
            return H100.latency_s + self._ring_bytes(eqn) / self._ring_rate(eqn)
        if count := flops(eqn):
            return count / _FLOPS_PER_S
        # XLA fuses most elementwise work with its neighbours, so count a quarter of the traffic.
        return _bytes(eqn.outvars) / _BYTES_PER_S / 4

    def link(self, eqn: JaxprEqn) -> Link:
        """Return the links that serve a collective: a node's if every group lies within one node."""
        inner = self._inner(eqn)
        return "node" if prod(inner.values()) <= H100.node_devices else "network"

    def _inner(self, eqn: JaxprEqn) -> dict[str, int]:
        """Return the sizes of the axes from the collective's slowest one inwards, which span its members."""
        names, over = list(self.sizes), axes_of(eqn)
        first = min((names.index(axis) for axis in over if axis in self.sizes), default=len(names))
        return {name: self.sizes[name] for name in names[first:]}

    def _ring_rate(self, eqn: JaxprEqn) -> float:
        """Return the bytes per second that a device sends; rings that cross nodes share their node's rate."""
        if self.link(eqn) == "node":
            return H100.node_bytes_per_s
        over = axes_of(eqn)
        rings = prod(size for name, size in self._inner(eqn).items() if name not in over)
        return H100.network_bytes_per_s / min(rings, H100.node_devices)

    def _ring_bytes(self, eqn: JaxprEqn) -> float:
        size = max(_bytes(eqn.invars), _bytes(eqn.outvars))
        once = 1.0 - 1.0 / prod(self.sizes.get(axis, 1) for axis in axes_of(eqn))
        return size * once * (1.0 if eqn.primitive.name in ("all_gather", "reduce_scatter") else 2.0)


def is_collective(eqn: JaxprEqn) -> bool:
    """True if an equation communicates."""
    return eqn.primitive.name in _COLLECTIVES


def flops(eqn: JaxprEqn) -> float:
    """Return the FLOPs of a matmul, or of all matmuls in a loop; 0 for anything else."""
    if eqn.primitive.name == "scan":
        return float(eqn.params["length"]) * sum(map(flops, eqn.params["jaxpr"].jaxpr.eqns))
    if eqn.primitive.name != "dot_general":
        return 0.0
    (contract, _), _ = eqn.params["dimension_numbers"]
    shape = aval_of(eqn.invars[0]).shape
    return 2.0 * aval_of(eqn.outvars[0]).size * float(prod(shape[d] for d in contract))


def aval_of(atom: Var | Literal) -> Any:
    """Return the abstract value (shape and dtype) of a variable or literal."""
    return atom.aval


def axes_of(eqn: JaxprEqn) -> tuple[str, ...]:
    """Return the mesh axes of a collective."""
    axes = eqn.params.get("axes", eqn.params.get("axis_name"))
    return axes if isinstance(axes, tuple) else (axes,)


def _bytes(atoms: Iterable[Any]) -> float:
    return sum(a.aval.size * getattr(a.aval.dtype, "itemsize", 4) for a in atoms if hasattr(a.aval, "size"))
