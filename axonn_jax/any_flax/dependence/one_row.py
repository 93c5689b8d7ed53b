"""Programs of one row: jax writes some of its functions otherwise for an axis of size one, which changes no value."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr

from axonn_jax.any_flax.dependence.row_types import Fault
from axonn_jax.any_flax.dependence.row_walk import Walk
from axonn_jax.core.backend.jaxprs import bodies, equations

_JAX = str(Path(jax.__file__).parent)
_AXES = frozenset(
    {"axes", "axis", "broadcast_dimensions", "concatenate_dimension", "dimension", "dimension_numbers", "dimensions"}
    | {"permutation"}
)
"""Parameters that number axes; two of them are not alike because one is twice the other."""


def alike(program: ClosedJaxpr, other: ClosedJaxpr, rows: tuple[int, int]) -> bool:
    """Return whether two traces of a loss are one program, but for the number of rows and inside functions of jax.

    `jnp.take_along_axis`, for example, gathers along other axes if one of them has size one. A loss that itself does
    something else for one row, as `jnp.squeeze` or a branch in Python, is another program.

    Args:
        program: The loss of more rows.
        other: The loss of fewer rows.
        rows: Numbers of rows.
    """
    walk = Walk(rows, "")
    ratio = rows[0] // rows[1]

    def sizes_alike(a: Any, b: Any) -> bool:
        """Return whether parameters are equal, but for sizes that follow the rows."""
        if isinstance(a, tuple | list) and isinstance(b, tuple | list):
            return len(a) == len(b) and all(map(sizes_alike, a, b))
        if isinstance(a, int) and isinstance(b, int):
            return a in (b, ratio * b)
        return not isinstance(a, str | frozenset) or a == b

    def bodies_alike(full: Any, part: Any) -> bool:
        if len(full.eqns) != len(part.eqns) or len(full.outvars) != len(part.outvars):
            return False
        env = dict(zip([*full.invars, *full.constvars], [*part.invars, *part.constvars], strict=True))

        def operands_alike(a: Sequence[Any], b: Sequence[Any]) -> bool:
            return len(a) == len(b) and all(map(operand_alike, a, b))

        def operand_alike(a: Any, b: Any) -> bool:
            if hasattr(a, "val") or hasattr(b, "val"):
                return hasattr(a, "val") and hasattr(b, "val") and known(walk.literal(a, b))
            return env[a] is b

        for a, b in zip(full.eqns, part.eqns, strict=True):
            same = a.primitive is b.primitive and operands_alike(a.invars, b.invars)
            params = same and all(
                a.params[name] == b.params[name] if name in _AXES else sizes_alike(a.params[name], b.params[name])
                for name in a.params
            )
            shapes = same and all(
                sizes_alike(u.aval.shape, v.aval.shape) for u, v in zip(a.outvars, b.outvars, strict=True)
            )
            if not (params and shapes and all(map(inner_alike, bodies(a), bodies(b)))):
                return False
            env.update(zip(a.outvars, b.outvars, strict=True))
        return operands_alike(full.outvars, part.outvars)

    def inner_alike(a: Any, b: Any) -> bool:
        return (_of_jax(a) and _of_jax(b)) or bodies_alike(a, b)

    def known(value: Any) -> bool:
        return not isinstance(value.type, Fault)

    consts = zip(program.consts, other.consts, strict=False)
    return bodies_alike(program.jaxpr, other.jaxpr) and all(known(walk.constant(*pair)) for pair in consts)


def _of_jax(jaxpr: Any) -> bool:
    """True if jax's own code wrote all equations: what it computes does not depend on how it is written."""
    frames = (
        frame
        for eqn in equations(jaxpr)
        if eqn.source_info.traceback is not None
        for frame in eqn.source_info.traceback.frames
    )
    return all(frame.file_name.startswith(_JAX) for frame in frames)
