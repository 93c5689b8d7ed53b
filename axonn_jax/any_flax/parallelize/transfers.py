"""Memory and communication of one layer: its parameters on a device, its collectives in a training call."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.parallelize.kinds import Kernel, Norm
from axonn_jax.any_flax.parallelize.layouts import Call, LayerPlan
from axonn_jax.core.tensor.specs import spec_axes


class Transfer(NamedTuple):
    """One collective of a layer."""

    kind: str
    """"all-gather", "all-reduce" or "reduce-scatter"."""
    axes: tuple[str, ...]
    backward: bool
    buffer: int
    """Bytes of the full buffer on a device: the gathered one, or the one to reduce or to scatter."""
    bytes: int
    """Bytes that a device sends on a ring: `(G-1)/G` of the buffer, twice that for an all-reduce."""


Sent = tuple[str, tuple[str, ...], bool, int]
"""The first four fields of a `Transfer`, with axes of size one still included."""


def _more(plan: LayerPlan, name: str, stored: P) -> tuple[str, ...]:
    """Return the axes over which a parameter is gathered before the layer computes."""
    return tuple(sorted(spec_axes(stored) - spec_axes(plan.spec(name))))


@dataclass(frozen=True)
class Entry:
    """Report entry of a layer or of another module with parameters."""

    path: str
    plan: LayerPlan
    params: dict[str, Any]
    """Parameters and statistics by name: arrays, or shapes with a layout."""
    dtype: Any
    """Dtype of the computation."""

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and statistics, each counted once."""
        return sum(value.size * value.dtype.itemsize for value in self.params.values())

    @property
    def device_bytes(self) -> int:
        """Bytes of the parameters and statistics on one device."""
        return sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in self.params.values())

    @property
    def whole(self) -> int:
        """Bytes of the parameters and statistics that are replicated on every device."""
        return sum(a.size * a.dtype.itemsize for a in self.params.values() if a.sharding.is_fully_replicated)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Collectives of the layer in a training call, forward and backward."""
        transfers = []
        for kind, axes, backward, buffer in self._sent():
            over = tuple(axis for axis in axes if self.plan.mesh.shape[axis] > 1)
            group, times = self.plan.size(*over), 2 if kind == "all-reduce" else 1
            if sent := times * (group - 1) * buffer // group:
                transfers.append(Transfer(kind, over, backward, buffer, sent))
        return tuple(transfers)

    def _sent(self) -> Iterator[Sent]:
        plan, of = self.plan, self.plan.of
        if not plan.sharded or of is None or plan.calls == ():
            return
        if isinstance(of, Kernel):
            # The forward pass gathers once for all calls: spread parameters where the region begins, before any cast.
            for name, spec in plan.spread:
                yield "all-gather", _more(plan, name, spec), False, self._local(name) * 4
            if plan.z_dim is not None:
                yield "all-gather", ("z",), False, self._gathered(of)
        # Without known calls, assume one row. The ids of an embedding lookup have no gradient.
        for call in plan.calls or (Call(*of.features, rows=None, input_grad=plan.kind != "Embed"),):
            # Elements of input and output over the devices that share the same rows.
            parts = plan.size(*plan.row_axes) if call.rows is not None and plan.splits(call) else 1
            sizes = (call.in_size // parts, call.out_size // parts)
            if isinstance(of, Norm):
                yield from self._norm(of, call, sizes[0])
            else:
                yield from self._contraction(of, call, *sizes)

    def _contraction(self, kernel: Kernel, call: Call, x_size: int, y_size: int) -> Iterator[Sent]:
        plan, itemsize, split = self.plan, jnp.dtype(self.dtype).itemsize, self.plan.splits(call)
        in_axis, out_axis = (plan.out_axis, plan.in_axis) if call.attend else (plan.in_axis, plan.out_axis)
        if plan.z_dim is not None and split:
            if call.input_grad:
                yield "all-gather", ("z",), True, self._gathered(kernel)
            yield "reduce-scatter", ("z",), True, self._gathered(kernel)
        independent = in_axis == out_axis  # groups of features that do not mix, or no split at all
        if in_axis is not None and not independent:
            yield "all-reduce", (in_axis,), False, y_size // plan.size(out_axis) * itemsize
        if out_axis is not None and not independent and call.input_grad:
            yield "all-reduce", (out_axis,), True, x_size // plan.size(in_axis) * itemsize
        # With unsplit rows every device along data and z computes the full gradient already.
        for name in self.params if split else ():
            axes = plan.replica_axes if name == kernel.name and plan.z_dim is not None else plan.row_axes
            yield "all-reduce", axes, True, self._local(name) * 4

    def _norm(self, norm: Norm, call: Call, x_size: int) -> Iterator[Sent]:
        assert self.plan.in_axis is not None
        features = max((value.size for value in self.params.values()), default=norm.size)
        rows, axes = max(1, x_size // features), (self.plan.in_axis,)
        # LayerNorm reduces mean, centred and squared sums forward, and the cotangents of mean and factor backward.
        forward, backward = (3, 2) if self.plan.kind == "LayerNorm" else (1, 1)
        yield "all-reduce", axes, False, forward * rows * 4
        if call.input_grad:
            yield "all-reduce", axes, True, backward * rows * 4
        for name in self.params:
            yield "all-reduce", self.plan.row_axes, True, self._local(name) * 4

    def _gathered(self, kernel: Kernel) -> int:
        """Bytes of the kernel on one device, gathered over `z`."""
        over_z = 1 if self.plan.z_dim is None else self.plan.size("z")
        return self._local(kernel.name) * over_z * jnp.dtype(self.dtype).itemsize

    def _local(self, name: str) -> int:
        """Elements of a parameter on one device."""
        return int(self.params[name].size) // self.plan.size(*spec_axes(self.plan.spec(name)))

    @property
    def reason(self) -> str:
        """Why some of it is replicated or left to the compiler; ``""`` if nothing is."""
        spread = [f"{name} over {', '.join(_more(self.plan, name, spec))}" for name, spec in self.plan.spread]
        stored = f"kept {'; '.join(spread)}, and gathered by the compiler" if spread else ""
        replicated = f"{self.whole:,} B whole" if self.whole else ""
        return "; ".join(filter(None, (self.plan.note, stored, replicated)))

    @property
    def roles(self) -> str:
        """Axes of input and output, such as ``x -> y``; a dot stands for an unsplit side."""
        axes = (self.plan.in_axis, self.plan.out_axis)
        if axes == (None, None):
            return "left to the compiler" if self.plan.spread else "replicated"
        shown = axes[:1] if isinstance(self.plan.of, Norm) else axes
        return " -> ".join(axis or "." for axis in shown)
