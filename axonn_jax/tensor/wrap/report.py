"""What `parallelize` did to a model: every layer with its roles, bytes and communication, or why it stayed."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import Any

import jax.numpy as jnp
from flax import nnx

from axonn_jax.tensor.wrap.plan import PLAN, LayerPlan
from axonn_jax.tensor.wrap.traffic import Transfer, transfers
from axonn_jax.tensor.wrap.walk import modules, own_variables


@dataclass(frozen=True)
class Entry:
    """One layer."""

    path: str
    plan: LayerPlan
    bytes: int
    """Bytes of its parameters and statistics altogether."""
    device_bytes: int
    """Those of one device."""
    transfers: tuple[Transfer, ...]
    """Its collectives in a training call."""

    @property
    def roles(self) -> str:
        """The axes of input and output, such as ``x -> y``; a dot where one is not split."""
        axes = (self.plan.in_axis, self.plan.out_axis)
        if axes == (None, None):
            return "replicated"
        shown = axes if self.plan.kind not in ("LayerNorm", "RMSNorm") else axes[:1]
        return " -> ".join(axis or "." for axis in shown)


@dataclass(frozen=True)
class ShardingReport:
    """Every layer of a parallelized model that has parameters; `str` is a table."""

    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and statistics."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def device_bytes(self) -> int:
        """Those of one device."""
        return sum(entry.device_bytes for entry in self.entries)

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes a device sends in a training call, by axis (``data+z`` for a reduction over both)."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            for transfer in entry.transfers:
                total["+".join(transfer.axes)] += transfer.bytes
        return dict(total)

    def __str__(self) -> str:
        known = any(entry.plan.rows_known for entry in self.entries)
        unit = "B a call, ring" if known else "B a row and its weights, ring; pass call= for a call's"
        head = ("layer", "type", "roles", "B a device", "of B", f"forward ({unit})", "backward")
        rows = [head, *(_row(entry) for entry in self.entries)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        lines += [f"{e.path}: {e.plan.note}" for e in self.entries if e.plan.note]
        sent = ", ".join(f"{axes} {count:,} B" for axes, count in self.traffic.items()) or "nothing"
        lines.append(f"parameters: {self.device_bytes:,} of {self.bytes:,} B a device; a device sends {sent}")
        return "\n".join(lines)


def _row(entry: Entry) -> tuple[str, ...]:
    sums = ["", ""]
    for backward in (False, True):
        by_axis: Counter[str] = Counter()
        for transfer in entry.transfers:
            if transfer.backward == backward:
                by_axis["+".join(transfer.axes)] += transfer.bytes
        sums[backward] = " ".join(f"{axes} {count:,}" for axes, count in by_axis.items()) or "-"
    return (entry.path, entry.plan.kind, entry.roles, f"{entry.device_bytes:,}", f"{entry.bytes:,}", *sums)


def sharding_report(model: nnx.Module) -> ShardingReport:
    """What `parallelize` did to this model, in the order in which its attributes stand; `print` it.

    Communication is that of forward and backward in one call, by ring formulas, for the inputs that `call` had, or
    else for one row; replicated layers' gradient reductions, which XLA places, are not in it.
    """
    found = [
        (path, module, getattr(module, PLAN))
        for path, module in modules(model).items()
        if isinstance(getattr(module, PLAN, None), LayerPlan)
    ]
    return ShardingReport(tuple(_entry(path or "(model)", module, plan) for path, module, plan in found))


def _entry(path: str, module: Any, plan: LayerPlan) -> Entry:
    held = {name: variable.get_value() for name, variable in own_variables(module).items()}
    arrays = {name: value for name, value in held.items() if hasattr(value, "sharding") and hasattr(value, "dtype")}
    whole = sum(value.size * value.dtype.itemsize for value in arrays.values())
    local = sum(prod(a.sharding.shard_shape(a.shape)) * a.dtype.itemsize for a in arrays.values())
    dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None) or jnp.float32
    shapes = {name: value.shape for name, value in arrays.items()}
    return Entry(path, plan, whole, local, tuple(transfers(plan, shapes, jnp.dtype(dtype).itemsize)))
