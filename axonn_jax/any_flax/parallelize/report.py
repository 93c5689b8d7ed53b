"""Sharding report: each layer's axes, bytes and communication, or the reason why it is not split."""

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import jax.numpy as jnp
from flax import nnx

from axonn_jax.any_flax.parallelize.api import direct_variables, modules
from axonn_jax.any_flax.parallelize.layouts import PLAN, LayerPlan
from axonn_jax.any_flax.parallelize.linen import LinenLoss
from axonn_jax.any_flax.parallelize.transfers import Entry, Transfer
from axonn_jax.core.errors import typed_arguments
from axonn_jax.core.terminal import table


@dataclass(frozen=True)
class ShardingReport:
    """Report on all layers of a parallelized model that have parameters; `str` formats it as a table."""

    entries: tuple[Entry, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all parameters and statistics."""
        return sum(entry.bytes for entry in self.entries)

    @property
    def device_bytes(self) -> int:
        """Bytes of all parameters and statistics on one device."""
        return sum(entry.device_bytes for entry in self.entries)

    @property
    def whole(self) -> int:
        """Bytes of all parameters and statistics that are replicated on every device."""
        return sum(entry.whole for entry in self.entries)

    @property
    def over_ideal(self) -> float:
        """Ratio of the bytes on one device to an equal share over `z`, `y` and `x`."""
        parts = self.entries[0].plan.size("z", "y", "x") if self.entries else 1
        return self.device_bytes * parts / max(1, self.bytes)

    @property
    def traffic(self) -> dict[str, int]:
        """Bytes that a device sends in a training call, by axis (``data+z`` for a reduction over both)."""
        return _by_axes(transfer for entry in self.entries for transfer in entry.transfers)

    def __str__(self) -> str:
        has_calls = any(entry.plan.calls for entry in self.entries)
        unit = "B a call, ring" if has_calls else "B a row and its weights, ring; pass call= for a call's"
        head = ("layer", "type", "roles", "B a device", "of B", f"forward ({unit})", "backward")
        lines = table(head, [_row(entry) for entry in self.entries], left=range(len(head)))
        lines += [f"{e.path}: {e.reason}" for e in self.entries if e.reason]
        sent = ", ".join(f"{axes} {count:,} B" for axes, count in self.traffic.items()) or "nothing"
        summary = f"{self.device_bytes:,} of {self.bytes:,} B a device, {self.over_ideal:.2f} of an equal part"
        lines.append(f"parameters: {summary}, {self.whole:,} B whole; a device sends {sent}")
        return "\n".join(lines)


def _by_axes(transfers: Iterable[Transfer]) -> dict[str, int]:
    total: Counter[str] = Counter()
    for transfer in transfers:
        total["+".join(transfer.axes)] += transfer.bytes
    return dict(total)


def _row(entry: Entry) -> tuple[str, ...]:
    directions = (_by_axes(t for t in entry.transfers if t.backward == backward) for backward in (False, True))
    sums = (" ".join(f"{axes} {count:,}" for axes, count in sent.items()) or "-" for sent in directions)
    return (entry.path, entry.plan.kind, entry.roles, f"{entry.device_bytes:,}", f"{entry.bytes:,}", *sums)


@typed_arguments
def sharding_report(model: nnx.Module | LinenLoss) -> ShardingReport:
    """Return the sharding report of a parallelized model or loss; `print` it to see a table.

    Communication covers the forward and backward pass of one call, by ring formulas, for the inputs of `call`, or for
    one row without `call`. It excludes the gradient reductions of replicated layers, which XLA places. With `call`, a
    layer whose inputs depend on no parameter has no gradient of its input.

    Args:
        model: A model from `parallelize`, whose layers are listed in the order of its attributes, or a loss from
            `parallelize_linen`, whose layers are listed in the order of the parameter tree.

    Returns:
        The report, with one entry per layer or other module with parameters.
    """
    return ShardingReport(model.entries if isinstance(model, LinenLoss) else tuple(_entries(model)))


def _entries(model: nnx.Module) -> Iterator[Entry]:
    for path, module in modules(model).items():
        plan: LayerPlan | None = getattr(module, PLAN, None)
        if plan is None:
            continue
        values = {name: variable.get_raw_value() for name, variable in direct_variables(module).items()}
        arrays = {name: v for name, v in values.items() if hasattr(v, "sharding") and hasattr(v, "dtype")}
        dtype = getattr(module, "dtype", None) or getattr(module, "param_dtype", None) or jnp.float32
        yield Entry(path or "(model)", plan, arrays, dtype)
