"""Verdicts on whether a loss may run on parts of a batch's rows, read off its traced program for every batch."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from jax.extend.core import ClosedJaxpr

from axonn_jax.any_flax.dependence.row_loops import Value
from axonn_jax.any_flax.dependence.row_rules import wide
from axonn_jax.any_flax.dependence.row_types import Fault, Rows, Same, Sum
from axonn_jax.any_flax.dependence.row_walk import Walk
from axonn_jax.core import compat

Kind = Literal["proven", "weighted", "coupled", "not understood"]
Role = Literal["mean", "total", "state", "weight"]
"""Combination of the results of the parts: `mean` results are averaged like the loss, `total` results are added up,
`state` must be identical in every part, and `weight` is the number of items that a part's mean averages over."""


class Verdict(NamedTuple):
    """The conclusion about running a loss on parts of its rows."""

    kind: Kind
    """`proven`: parts give the results of all rows at once, for every batch. `weighted`: results are means over what a
    mask counts, so parts would have to be weighted by that count. `coupled`: rows see each other, or something is
    computed from all of them. `not understood`: a primitive has no rule."""
    reason: str = ""
    """Reason of the verdict: the use of the rows, the primitive, and the user's source line."""
    in_turn: bool = False
    """True if parts that run side by side match all rows at once, but parts that run one after the other do not."""


def rows_verdict(
    full: ClosedJaxpr,
    part: ClosedJaxpr,
    of_rows: Sequence[bool],
    of_batch: Sequence[bool],
    roles: Sequence[Role],
    rows: tuple[int, int],
    *,
    in_turn: bool,
    shared_axis: str,
) -> Verdict:
    """Decide from a loss's traced programs whether parts of the rows give the results of all rows.

    Args:
        full: The program of all rows. It need not contain gradients: the gradient of a sum over rows is again a sum
            over rows.
        part: The program of the rows of one part.
        of_rows: For each input, whether its leading axis is the rows.
        of_batch: For each input, whether it belongs to the batch.
        roles: How each result of the parts is combined.
        rows: Number of rows of the batch, and of a part.
        in_turn: True if parts run one after the other, each starting from the state that the previous one left.
        shared_axis: Name of the axis over which layers compute statistics of all parts.

    Returns:
        The verdict; of several faults, the most severe one.
    """
    walk = Walk(rows, shared_axis)
    values = []
    for at, var in enumerate(full.jaxpr.invars):
        kind = Rows(0) if of_rows[at] else Same(wide(var.aval.shape))
        values.append(Value(kind, walk.name("input", at), not of_batch[at]))
    # Drop dead equations first: jax leaves traces of failed attempts behind, and they need not match between programs.
    full, part = (compat.part_of(program, [True] * len(roles), all_inputs=True) for program in (full, part))
    results = list(zip(roles, walk.run(full, part, values), strict=True))
    input_keys = {value.key for value in values}
    weights = [value.type for role, value in results if role == "weight"]
    if weights and not (isinstance(weights[0], Same) or (isinstance(weights[0], Sum) and weights[0].divisor is None)):
        why = _describe(weights[0]) if isinstance(weights[0], Fault) else "no sum over rows"
        return Verdict("not understood", f"weight=, {why}")
    weight_base = weights[0].base if weights and isinstance(weights[0], Sum) else None
    verdicts = [_fault(role, value, weight_base) for role, value in results]
    faults = sorted((fault for fault in verdicts if fault is not None), key=lambda fault: _ORDER.index(fault.kind))
    if faults:
        return _explain_weighted(
            faults[0], [value for role, value in results if role == "mean"], weighted=bool(weights)
        )
    # Shared statistics are exact for parts that run side by side, where a collective sees all of them, but a sequence
    # of microbatches computes them anew for each.
    if walk.statistics and in_turn:
        return Verdict("coupled", "BatchNorm takes statistics of each microbatch", in_turn=True)
    if in_turn and any(role == "state" and value.key not in input_keys for role, value in results):
        return Verdict("coupled", "the loss changes state, once in each microbatch", in_turn=True)
    return Verdict("proven")


def _explain_weighted(fault: Verdict, means: Sequence[Value], *, weighted: bool) -> Verdict:
    """Return the fault unchanged if `weight=` would repair it, otherwise the fault it amounts to."""
    if fault.kind != "weighted":
        return fault
    divisors = {value.type.divisor for value in means if isinstance(value.type, Sum)}
    if weighted:
        # Names of values cannot show that weight= counts the same items as the mean's divisor, so a single divisor is
        # left to the numerical comparison.
        several = len(divisors) > 1
        return Verdict("coupled", _SECOND) if several else Verdict("not understood", "weight= counts in another way")
    if len(divisors) > 1:
        return Verdict("coupled", _SECOND)
    if all(divisor is None or divisor.counts for divisor in divisors):
        return fault
    return Verdict("coupled", fault.reason.replace("what a mask counts", "a sum that the model or a draw is in"))


_SECOND = "a mean over what a mask counts, beside a mean over something else"

_ORDER: tuple[Kind, ...] = ("coupled", "not understood", "weighted", "proven")
"""Kinds of verdicts, most severe first."""


def _fault(role: Role, value: Value, weight_base: Any) -> Verdict | None:
    """Return why a result differs between parts and all rows, or None if it does not."""
    kind = value.type
    if isinstance(kind, Fault):
        return Verdict(kind.verdict, _describe(kind))
    if role == "weight":
        return None
    if role == "state":
        changed_alike = isinstance(kind, Same) and not kind.degree
        return None if changed_alike else Verdict("coupled", "state that is computed from rows")
    if isinstance(kind, Same):
        return Verdict("coupled", "a number by how many rows there are") if kind.degree != (role == "total") else None
    if not isinstance(kind, Sum):
        return Verdict("coupled", f"a result that is no sum over rows{_origin(value)}")
    if role == "total":
        return Verdict("coupled", "a total that is no sum over rows") if kind.divisor or kind.degree != 1 else None
    if kind.degree:
        return Verdict("coupled", "a sum over rows where parts are averaged")
    base = kind.divisor.base if kind.divisor else None
    if base == weight_base:
        return None
    if kind.divisor is None:
        return Verdict("coupled", _SECOND)
    return Verdict("weighted", f"a mean over what a mask counts{_origin(value)}")


def _origin(value: Value) -> str:
    return f" ({value.origin})" if value.origin else ""


def _describe(kind: Fault) -> str:
    where = ", ".join(part for part in (kind.primitive, kind.where) if part)
    return f"{kind.reason} ({where})" if where else kind.reason
