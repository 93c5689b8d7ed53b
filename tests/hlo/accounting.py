"""Collectives of a compiled step beside those that the formulas predict, kind by kind, to the byte."""

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING, NamedTuple

from hlo.collectives import Collective, collectives, totals
from hlo.steps import keep_recomputation, mesh_sizes, text_of

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import build_grid
from axonn_jax.planning.communication import Predicted, StepSpec, predict

if TYPE_CHECKING:
    import jax


class KindBytes(NamedTuple):
    """Bytes a device sends in a step for one kind of collective over one set of axes."""

    kind: str
    axes: str
    predicted: Fraction
    compiled: Fraction


@dataclass(frozen=True)
class Accounting:
    """Both sides of a comparison."""

    predicted: tuple[Predicted, ...]
    """What the formulas say, layer by layer."""
    compiled: tuple[Collective, ...]
    """What the compiled program has."""

    @property
    def rows(self) -> tuple[KindBytes, ...]:
        """Both sides' sums by kind and axes, every pair that either side has."""
        mine, theirs = totals(self.predicted), totals(self.compiled)
        none = Fraction(0)
        return tuple(KindBytes(*key, mine.get(key, none), theirs.get(key, none)) for key in sorted({**mine, **theirs}))

    @property
    def exact(self) -> bool:
        """Whether every row's sides are equal to the byte."""
        return all(row.predicted == row.compiled for row in self.rows)

    @property
    def ratio(self) -> float:
        """Compiled over predicted bytes, all together; 1 where neither side has any."""
        predicted, compiled = (sum(getattr(row, side) for row in self.rows) for side in ("predicted", "compiled"))
        if predicted == 0:
            return 1.0 if compiled == 0 else float("inf")
        return float(Fraction(compiled) / predicted)


def account(
    work: StepSpec, *, clip: float = 1.0, bucket: int = 16_000_000, devices: "Sequence[jax.Device] | None" = None
) -> Accounting:
    """Compiles the `Trainer`'s step for `work` with AdamW, and compares its collectives with the predicted ones.

    Nothing is allocated and nothing runs; with virtual CPU devices any grid compiles on one machine. The step is
    in float32: XLA's CPU compiler turns bfloat16 collectives into float32 ones. Recomputation is kept as written
    (`keep_recomputation`). Raises ``UserError`` where grid,
    model, batch and devices do not fit, or the work is not a float32 one.
    """
    import jax
    import optax
    from hlo.steps import compile_abstract

    from axonn_jax.core.settings import MemoryConfig, TensorConfig

    policy = work.policy
    if work.itemsize != 4:
        raise UserError("itemsize", work.itemsize, "4: compiled programs are compared in float32")
    if work.grid.pipe != 1:
        raise UserError("grid.pipe", work.grid.pipe, "1: the accounting is of one stage's mesh")
    predicted = predict(work)
    have = jax.devices() if devices is None else devices
    if len(have) < work.grid.devices:
        raise UserError("devices", len(have), f"at least {work.grid.devices}, the grid's product")
    grid = build_grid(work.grid, have[: work.grid.devices])
    program = compile_abstract(
        work.shape,
        grid,
        optax.adamw(1e-3),
        sequences=work.sequences,
        microbatches=policy.microbatches,
        clip=clip,
        memory=MemoryConfig(activations=policy.activations, bucket=bucket, reshard_after=policy.reshard_after),
        tensor=TensorConfig(scan_layers="yes" if policy.scanned else "no"),
        comm=work.comm,
        moe=work.moe,
        lora=work.lora,
        compiler_options=keep_recomputation(),
    )
    return Accounting(predicted, collectives(text_of(program), mesh_sizes(work.grid)))
