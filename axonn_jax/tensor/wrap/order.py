"""Roles along the order in which layers were defined: each takes what the one before leaves."""

from collections.abc import Iterable
from typing import Any

from axonn_jax.tensor.wrap.choose import Chooser
from axonn_jax.tensor.wrap.plan import LayerPlan, Stream

_BRANCHES = (
    frozenset({"q", "k", "v"}),
    frozenset({"wq", "wk", "wv"}),
    frozenset({"query", "key", "value"}),
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate", "up"}),
    frozenset({"gate_proj", "up_proj"}),
)
"""Names of layers that take the same input side by side."""


def _side_by_side(first: str, second: str) -> bool:
    (parent, _, name), (parent_2, _, name_2) = first.rpartition("."), second.rpartition(".")
    return parent == parent_2 and any(name in names and name_2 in names for names in _BRANCHES)


def plans_by_order(
    chooser: Chooser, layers: Iterable[tuple[str, Any]], overrides: dict[str, str], known: dict[str, LayerPlan]
) -> dict[str, LayerPlan]:
    """A plan for each layer, in their order; those `known` already are kept.

    The first layer takes an input that is not split. Layers whose names say that they branch (query, key, value and
    the like) take the same input.
    """
    plans: dict[str, LayerPlan] = {}
    stream: Stream | None = None
    before = ("", stream)
    for path, layer in layers:
        arrives = before[1] if before[0] and _side_by_side(before[0], path) else stream
        plan = known.get(path) or chooser.plan(layer, arrives, overrides.get(path))
        plans[path] = plan
        if plan.sharded:
            before = (path, arrives)
            stream = chooser.leaves(layer, plan, arrives)
    return plans
