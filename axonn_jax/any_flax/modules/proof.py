"""Choice of a loss's strategy: the first whose results are proven, or found, equal to those of all rows at once."""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp

from axonn_jax.any_flax.dependence.rows import Verdict
from axonn_jax.any_flax.modules.batches import TreeBatches
from axonn_jax.any_flax.modules.comparison import Comparison
from axonn_jax.any_flax.modules.differences import Results, find_differences
from axonn_jax.any_flax.modules.loss_model import Loss, Strategy, say_first
from axonn_jax.any_flax.modules.program import LossProgram
from axonn_jax.any_flax.modules.row_verdict import verdict_of
from axonn_jax.core.errors import UserError, first_line
from axonn_jax.core.options import Rows
from axonn_jax.core.tensor.params import Params
from axonn_jax.core.tensor.specs import values_of
from axonn_jax.core.tensor.weight_gather import Weights

ROWS: tuple[Rows, ...] = get_args(Rows)
_STRATEGIES: tuple[Strategy, ...] = ("parts", "whole", "xla")

_HALVES = (jnp.bfloat16, jnp.float16)


class Proof:
    """Choice of the strategy of a loss, by its program and, if layers are sharded, by its results.

    The traced program of the loss shows whether parts of the rows match all rows at once, for every batch and every
    random draw (`verdict_of`); it is analyzed once per shape of a batch. It does not show whether sharded layers
    compute what Flax's own do, so before the first step the loss, its metrics and its state are compared with those of
    a single device. If the program contains a primitive that is not understood, results and gradients are compared,
    and again before steps 1, 2, 4, 8 and so on, counted from 0, because the masks of one batch may happen to agree
    between parts.

    All random draws are constant during a comparison, because parts of the rows draw other numbers than all rows. The
    comparison uses the weights and randomly perturbed weights, because gates may start at zero and two policies may
    start equal.

    Args:
        rows: "auto", or "parts" or "whole" to select the strategy.
        program: The program of the gradients.
        batches: The layout of batches.
    """

    def __init__(self, rows: Rows, program: LossProgram, batches: TreeBatches):
        shape = program.grid.shape
        splits = program.model.split or shape.z * shape.y * shape.x == 1
        self.strategy: Strategy = rows if rows != "auto" else "parts" if splits else "xla"
        self.facts: dict[str, Any] = {}
        """Strategy and reason, written to checkpoints, if the loss does not run in parts although it might have."""
        self._begun = self.strategy
        self._program, self._batches = replace(program, model=program.model.exact(), forms=None), batches
        self._rows = rows
        self._split = not program.model.unsharded
        self._done = shape.devices == batches.microbatches == 1 or rows == "parts"
        self._comparisons: dict[bool, Comparison] = {}
        self._verdicts: dict[str, Verdict] = {}
        """Verdicts by the shapes of a batch."""
        self._evaluations: dict[tuple[Loss | None, str], Verdict] = {}
        """Verdicts on evaluations by the loss and the shapes of a batch."""
        self._compared, self._due = False, 0
        """Next step before which results are compared, if the program is not understood."""
        if rows == "parts" and self._part_count(self.strategy) > 1:
            say_first('rows="parts": the loss of parts of the rows is not compared with that of all rows')
        if not splits:
            say_first(
                "rows: layers without ax.parallelize_linen are left to XLA, their parameters spread over z, y and x"
            )

    def changes(self, step: int, params: Weights, carried: Params, batch: Any) -> bool:
        """Choose the strategy for batches of this shape, and print a line if it is not in parts.

        Args:
            step: Number of the next step.
            params: Parameters by path.
            carried: State by path.
            batch: This process's rows, on the host.

        Returns:
            True if the strategy has changed, so that the step must be compiled again.
        """
        if self._done:
            return False
        form = str(jax.tree.map(jnp.shape, values_of(batch)))
        seen = form in self._verdicts
        if seen and (self._verdicts[form].kind != "not understood" or step < self._due):
            return False
        previous = self.strategy
        dense = {name: v if isinstance(v, jax.Array) else jax.jit(_dense)(v) for name, v in params.items()}
        # Perturbations would vanish in the rounding of weights that are stored in half precision.
        dense = {name: v.astype(jnp.float32) if v.dtype in _HALVES else v for name, v in dense.items()}
        with jax.default_matmul_precision("highest"):
            try:
                verdict = self._verdicts.get(form) or self._verdict(dense, carried, batch)
                lines = self._select(verdict, step, dense, carried, batch, first=not seen)
            except UserError:
                raise
            except Exception as error:  # user code may raise anything, and a step would raise it again
                verdict, lines = Verdict("coupled"), [self._unproven(error, dense, carried, batch)]
        self._verdicts[form] = verdict
        say_first(*lines)
        return self.strategy != previous

    def evaluates_at_once(self, loss: Loss | None, params: Weights, carried: Params, batch: Any) -> bool:
        """Return whether an evaluation must see all rows of a batch at once; if so, print a line.

        Args:
            loss: Another loss than the trainer's, which sees the rows of all replicas in any case; None for the
                trainer's.
            params: Parameters by path.
            carried: State by path.
            batch: This process's rows, on the host.
        """
        side_by_side = self._program.grid.shape.data if self.strategy == "parts" and loss is None else 1
        parts = (self._batches.microbatches, side_by_side)
        if parts == (1, 1) or (self._rows == "parts" and loss is None):
            return False
        form = (loss, str(jax.tree.map(jnp.shape, values_of(batch))))
        if form not in self._evaluations:
            program = replace(self._program.of(loss, at_once=False), strategy=self.strategy)
            try:
                rows = self._batches.all_rows(batch)
                verdict = verdict_of(program, _shapes(params), carried, batch, rows, parts, training=False)
            except Exception:  # user code may raise anything, and will raise it again in the evaluation
                return False
            self._evaluations[form] = verdict
            if verdict.kind != "proven":
                say_first(f"evaluate: the loss runs on all rows of a batch at once; {verdict.reason}")
        return self._evaluations[form].kind != "proven"

    def _part_count(self, strategy: Strategy) -> int:
        return self._batches.microbatches * (self._program.grid.shape.data if strategy == "parts" else 1)

    def _verdict(self, params: Params, carried: Params, batch: Any) -> Verdict:
        """Analyze the program of the loss; exceptions of the loss of all rows at once pass through."""
        in_turn, side_by_side = (
            self._batches.microbatches,
            self._part_count(self.strategy) // self._batches.microbatches,
        )
        if in_turn * side_by_side == 1:
            return Verdict("proven")
        parts = (in_turn, side_by_side)
        return verdict_of(self._program, params, carried, batch, self._batches.all_rows(batch), parts, training=True)

    def _select(
        self, verdict: Verdict, step: int, params: Params, carried: Params, batch: Any, *, first: bool
    ) -> list[str]:
        """Choose the strategy by the verdict, and by results if they may differ; return lines to print."""
        if verdict.kind == "not understood":
            if (
                first
                and not self._verdicts
                and (strategy := self.facts.get("way")) in _STRATEGIES[_STRATEGIES.index(self.strategy) :]
            ):
                # Only results can decide here, and they did before the checkpoint. The batch that showed the difference
                # may not come again, so trust the checkpoint's decision.
                self.strategy, self._done = strategy, True
                return [self._line(f"{self.facts['reason']}, as before the checkpoint")]
            announcement = [f"rows: compared with all rows at once before steps 0, 1, 2, 4, ...; {verdict.reason}"]
            lines = self._compare(params, carried, batch, gradients=True)
            self._due = 1 << step.bit_length()
            if lines or self.strategy != "parts":  # a difference has been reported, and no further batch can undo it
                self._done = True
            return lines or (announcement if first else [])
        reason = "" if verdict.kind == "proven" else self._reason(verdict)
        had = "" if self._verdicts or reason else self.facts.get("reason", "")
        if reason and self.strategy == "parts" and self._batches.replicas > 1 and not verdict.in_turn:
            self.strategy = "whole"
        elif self._compared or not (self._split or self.strategy != "parts"):
            # Flax's own layers compute the same everywhere, so there is nothing to compare. The loss may still fail in
            # the manual region of replicas, which tracing shows.
            lines = [] if self._compared else self._try_parts(params, carried, batch)
            return [self._line(reason)] if reason and not self.facts else lines + self._resumed_line(had)
        lines = self._compare(params, carried, batch, gradients=False, reason=reason)
        self._compared = True
        return lines + self._resumed_line(had)

    def _resumed_line(self, had: str) -> list[str]:
        """Return a line about a loss that runs in parts now, but did not before the checkpoint."""
        if not had or self._part_count(self._begun) == 1 or self.strategy != "parts":
            return []
        self.facts = {}
        return [f"rows: {_INSTEAD['parts']}, as its program shows; before the checkpoint it did not: {had}"]

    def _reason(self, verdict: Verdict) -> str:
        if verdict.kind == "weighted":
            return f"the loss is {verdict.reason}: weight= keeps it in parts"
        if verdict.in_turn:
            return verdict.reason
        return f"rows do not go by themselves: {verdict.reason}"

    def _try_parts(self, params: Params, carried: Params, batch: Any) -> list[str]:
        """Trace the loss in parts; if that fails, run all rows at once and return a line that says why."""
        try:
            self._comparison(gradients=False).traced(self.strategy, params, carried, batch)
        except UserError:
            raise
        except Exception as error:  # from jax's manual axes, or from code that relies on the rows of a full batch
            self.strategy = "whole" if self.strategy == "parts" else self.strategy
            return self._compare(
                params, carried, batch, gradients=False, reason=f"{_RUNS['parts']} the loss fails: {first_line(error)}"
            )
        return []

    def _comparison(self, *, gradients: bool) -> Comparison:
        if gradients not in self._comparisons:
            self._comparisons[gradients] = Comparison(self._program, self._batches, gradients=gradients)
        return self._comparisons[gradients]

    def _compare(self, params: Params, carried: Params, batch: Any, *, gradients: bool, reason: str = "") -> list[str]:
        """Take the first strategy that matches all rows at once; `reason` says why parts are ruled out, if they are."""
        comparison = self._comparison(gradients=gradients)
        all_rows, batch = comparison.all_rows(params, carried, batch)
        want = all_rows(0.0)
        results, lines, noisy = dict[Strategy, Results](), [reason] if reason else [], None
        coupled = bool(reason) and self._batches.microbatches > 1
        for strategy in _STRATEGIES[_STRATEGIES.index(self.strategy) :]:
            try:
                results[strategy] = comparison.run(strategy, self._batches, params, carried, batch)(0.0)
            except UserError:
                raise
            except Exception as error:  # from jax's manual axes, or from code that relies on the rows of a full batch
                lines.append(f"{_RUNS[strategy]} the loss fails: {first_line(error)}")
                continue
            if coupled:  # microbatches differ from all rows under every strategy, so take the first that runs
                break
            differences = find_differences(results[strategy], want)
            if differences:
                noisy = noisy or all_rows(comparison.rounding)
                differences = find_differences(results[strategy], want, noisy)
            if not differences:
                self.strategy = strategy
                return [self._line(lines[0])] if lines else []
            more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
            lines.append(f"{_RUNS[strategy]} {differences[0]}{more}")
        if not results:
            if self._batches.microbatches > 1:
                accepted = f"1 with a loss that runs on all rows of a batch at once alone; {lines[-1]}"
                raise UserError("microbatches", self._batches.microbatches, accepted)
            return [f"rows: {line}" for line in lines]
        same = {"parts", "whole"} <= set(results) and not find_differences(results["parts"], results["whole"])
        best: tuple[Strategy, ...] = ("parts",) if same else ("whole", "xla", "parts")
        self.strategy = next(strategy for strategy in best if strategy in results)
        return [self._line(lines[0])]

    def _unproven(self, error: Exception, params: Params, carried: Params, batch: Any) -> str:
        """Take a strategy that needs no proof, as the loss of all rows fails on one device; return a line about it.

        Parts are ruled out, as nothing shows that rows do not see each other. Raises the error if no strategy runs.
        """
        why = f"the loss of all rows at once fails: {first_line(error)}"
        runs: list[Strategy] = []
        comparison = self._comparison(gradients=False)
        for strategy in _STRATEGIES[::-1]:
            try:
                comparison.run(strategy, self._batches, params, carried, batch)(0.0)
                runs.append(strategy)
            except Exception:  # from sharded layers, about sizes of shards
                continue
        if not runs:
            raise error from error.__cause__
        count = self._batches.microbatches
        fallback = next((strategy for strategy in _STRATEGIES[1:] if strategy in runs), None)
        if fallback is None or (count > 1 and self._rows == "auto"):
            field, value = ("rows", "auto") if fallback is None else ("microbatches", count)
            raise UserError(field, value, f'rows="parts" where no row sees another, which cannot be proven: {why}')
        self.strategy = fallback
        return self._line(f"not compared, as {why}")

    def _line(self, reason: str) -> str:
        count = self._batches.microbatches
        changed = f"; microbatches = {count} change what is learned, 1 would not" if count > 1 else ""
        self.facts = {"way": self.strategy, "reason": reason}
        return f"rows: {_INSTEAD[self.strategy]}; {reason}{changed}"


_RUNS: dict[Strategy, str] = {
    "parts": "in parts of the rows",
    "whole": "on the rows of all replicas",
    "xla": "with layers left to XLA",
}
_INSTEAD: dict[Strategy, str] = {
    "parts": "the loss runs in parts of the rows",
    "whole": 'the loss runs on the rows of all replicas (rows="whole")',
    "xla": "the loss runs on the rows of all replicas, its layers left to XLA",
}


def _shapes(params: Weights) -> Params:
    """Return the shapes of parameters, for a pruned one its dense shape."""
    return {n: v if isinstance(v, jax.Array) else jax.eval_shape(_dense, v) for n, v in params.items()}  # type: ignore[misc]


def _dense(weight: Any) -> jax.Array:
    return weight.shard()  # type: ignore[no-any-return]
