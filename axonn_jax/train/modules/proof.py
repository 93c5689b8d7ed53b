"""Way in which a loss runs, by proof: the first whose results are those of all rows at once on one device."""

from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp

from axonn_jax.backend.dependence.rows import Verdict
from axonn_jax.errors import UserError, first_line
from axonn_jax.options import Rows
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.specs import values_of
from axonn_jax.tensor.weight_gather import Weights
from axonn_jax.train.modules.all_rows import Comparison
from axonn_jax.train.modules.apart import Loss, Way, say_first
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.probes import Results, apart
from axonn_jax.train.modules.program import LossProgram
from axonn_jax.train.modules.row_verdict import verdict_of

ROWS: tuple[Rows, ...] = get_args(Rows)
_WAYS: tuple[Way, ...] = ("parts", "whole", "xla")

_HALVES = (jnp.bfloat16, jnp.float16)


class Proof:
    """Choice of the way in which a loss runs: by its program, and by its results where layers are split.

    The traced program of the loss says whether parts of the rows are all rows at once, for every batch and every draw
    (`verdict_of`). It is read again for each shape of a batch. What it does not see is whether split layers compute
    what Flax's do: before the first step the loss, its numbers and its state are compared with those of one device.
    Where a primitive is not understood results and gradients are compared, and again before steps 1, 2, 4, 8 and so on,
    counted from 0, since masks may be alike in all parts of one batch.

    Every random number is a constant where results are compared, as rows in parts draw others. They are compared with
    the weights and with weights moved at random, since gates may be zero and two policies the same at first.

    Args:
        rows: "auto", or "parts" or "whole" for the way to take.
        program: The program of the gradients.
        batches: The form of batches.
    """

    def __init__(self, rows: Rows, program: LossProgram, batches: TreeBatches):
        shape = program.grid.shape
        kept = program.model.split or shape.z * shape.y * shape.x == 1
        self.way: Way = rows if rows != "auto" else "parts" if kept else "xla"
        self.facts: dict[str, Any] = {}
        """The way and the reason for it, where the loss does not run in parts of the rows though it might have."""
        self._begun = self.way
        self._program, self._batches = replace(program, model=program.model.exact(), forms=None), batches
        self._rows = rows
        self._split = not program.model.one_device_each
        self._done = shape.devices == batches.microbatches == 1 or rows == "parts"
        self._comparisons: dict[bool, Comparison] = {}
        self._verdicts: dict[str, Verdict] = {}
        """By the shapes of a batch."""
        self._evaluations: dict[tuple[Loss | None, str], Verdict] = {}
        """By the loss and by the shapes of a batch."""
        self._compared, self._due = False, 0
        """Number of the next step before which results are compared, where the program is not understood."""
        if rows == "parts" and self._parts(self.way) > 1:
            say_first('rows="parts": the loss of parts of the rows is not compared with that of all rows')
        if not kept:
            say_first(
                "rows: layers without ax.parallelize_linen are left to XLA, their parameters spread over z, y and x"
            )

    def changes(self, step: int, params: Weights, carried: Params, batch: Any) -> bool:
        """Choose the way for batches of this shape; True if it is another one from now on, which a line says.

        `batch` has this process's rows, on the host.
        """
        if self._done:
            return False
        form = str(jax.tree.map(jnp.shape, values_of(batch)))
        known = form in self._verdicts
        if known and (self._verdicts[form].kind != "not understood" or step < self._due):
            return False
        before = self.way
        dense = {name: v if isinstance(v, jax.Array) else jax.jit(_dense)(v) for name, v in params.items()}
        # Moves are smaller than the roundings of weights that are kept in half precision beside their masters.
        dense = {name: v.astype(jnp.float32) if v.dtype in _HALVES else v for name, v in dense.items()}
        with jax.default_matmul_precision("highest"):
            try:
                verdict = self._verdicts.get(form) or self._verdict(dense, carried, batch)
                lines = self._chosen(verdict, step, dense, carried, batch, first=not known)
            except UserError:
                raise
            except Exception as error:  # of a stranger's code, which a step will meet too
                verdict, lines = Verdict("coupled"), [self._unproven(error, dense, carried, batch)]
        self._verdicts[form] = verdict
        say_first(*lines)
        return self.way != before

    def evaluates_at_once(self, loss: Loss | None, params: Weights, carried: Params, batch: Any) -> bool:
        """Return whether an evaluation's loss is that of all rows only if it sees them at once, which a line says.

        `loss` is another loss than the trainer's, which sees the rows of all replicas in any case.
        """
        beside = self._program.grid.shape.data if self.way == "parts" and loss is None else 1
        parts = (self._batches.microbatches, beside)
        if parts == (1, 1) or (self._rows == "parts" and loss is None):
            return False
        form = (loss, str(jax.tree.map(jnp.shape, values_of(batch))))
        if form not in self._evaluations:
            program = replace(self._program.of(loss, at_once=False), way=self.way)
            try:
                rows = self._batches.all_rows(batch)
                verdict = verdict_of(program, _shapes(params), carried, batch, rows, parts, training=False)
            except Exception:  # of a stranger's code, which the evaluation will meet too
                return False
            self._evaluations[form] = verdict
            if verdict.kind != "proven":
                say_first(f"evaluate: the loss runs on all rows of a batch at once; {verdict.reason}")
        return self._evaluations[form].kind != "proven"

    def _parts(self, way: Way) -> int:
        return self._batches.microbatches * (self._program.grid.shape.data if way == "parts" else 1)

    def _verdict(self, params: Params, carried: Params, batch: Any) -> Verdict:
        """Return what the program says; raises what the loss of all rows at once raises."""
        in_turn, beside = self._batches.microbatches, self._parts(self.way) // self._batches.microbatches
        if in_turn * beside == 1:
            return Verdict("proven")
        parts = (in_turn, beside)
        return verdict_of(self._program, params, carried, batch, self._batches.all_rows(batch), parts, training=True)

    def _chosen(
        self, verdict: Verdict, step: int, params: Params, carried: Params, batch: Any, *, first: bool
    ) -> list[str]:
        """Choose the way by the verdict, and by results where they may differ; return lines about what differs."""
        if verdict.kind == "not understood":
            if first and not self._verdicts and (way := self.facts.get("way")) in _WAYS[_WAYS.index(self.way) :]:
                # Where only numbers tell, those of the steps before the checkpoint did: they need not come again.
                self.way, self._done = way, True
                return [self._line(f"{self.facts['reason']}, as before the checkpoint")]
            told = [f"rows: compared with all rows at once before steps 0, 1, 2, 4, ...; {verdict.reason}"]
            lines = self._compare(params, carried, batch, gradients=True)
            self._due = 1 << step.bit_length()
            if lines or self.way != "parts":  # what differs has been said
                self._done = True
            return lines or (told if first else [])
        reason = "" if verdict.kind == "proven" else self._reason(verdict)
        had = "" if self._verdicts or reason else self.facts.get("reason", "")
        if reason and self.way == "parts" and self._batches.replicas > 1 and not verdict.in_turn:
            self.way = "whole"
        elif self._compared or not (self._split or self.way != "parts"):
            # Layers are those that Flax wrote: nothing is left to compare, but the loss may fail beside its replicas.
            lines = [] if self._compared else self._tried(params, carried, batch)
            return [self._line(reason)] if reason and not self.facts else lines + self._again(had)
        lines = self._compare(params, carried, batch, gradients=False, reason=reason)
        self._compared = True
        return lines + self._again(had)

    def _again(self, had: str) -> list[str]:
        """Return a line about a loss that runs in parts, which before the checkpoint it did not."""
        if not had or self._parts(self._begun) == 1 or self.way != "parts":
            return []
        self.facts = {}
        return [f"rows: {_INSTEAD['parts']}, as its program shows; before the checkpoint it did not: {had}"]

    def _reason(self, verdict: Verdict) -> str:
        if verdict.kind == "weighted":
            return f"the loss is {verdict.reason}: weight= keeps it in parts"
        if verdict.in_turn:
            return verdict.reason
        return f"rows do not go by themselves: {verdict.reason}"

    def _tried(self, params: Params, carried: Params, batch: Any) -> list[str]:
        """Trace the loss in parts; return a line about what fails there, for which all rows run at once."""
        try:
            self._comparison(gradients=False).traced(self.way, params, carried, batch)
        except UserError:
            raise
        except Exception as error:  # of jax's manual axes, or of code that counts on the rows of a whole batch
            self.way = "whole" if self.way == "parts" else self.way
            return self._compare(
                params, carried, batch, gradients=False, reason=f"{_RUNS['parts']} the loss fails: {first_line(error)}"
            )
        return []

    def _comparison(self, *, gradients: bool) -> Comparison:
        if gradients not in self._comparisons:
            self._comparisons[gradients] = Comparison(self._program, self._batches, gradients=gradients)
        return self._comparisons[gradients]

    def _compare(self, params: Params, carried: Params, batch: Any, *, gradients: bool, reason: str = "") -> list[str]:
        """Take the first way whose results are those of all rows at once; return lines about what differs.

        `reason` says why parts are none.
        """
        comparison = self._comparison(gradients=gradients)
        all_rows, batch = comparison.all_rows(params, carried, batch)
        want = all_rows(0.0)
        by_way, lines, noisy = dict[Way, Results](), [reason] if reason else [], None
        coupled = bool(reason) and self._batches.microbatches > 1
        for way in _WAYS[_WAYS.index(self.way) :]:
            try:
                by_way[way] = comparison.run(way, self._batches, params, carried, batch)(0.0)
            except UserError:
                raise
            except Exception as error:  # of jax's manual axes, or of code that counts on the rows of a whole batch
                lines.append(f"{_RUNS[way]} the loss fails: {first_line(error)}")
                continue
            if coupled:  # by microbatches, whose results differ from those of all rows
                break
            differences = apart(by_way[way], want)
            if differences:
                noisy = noisy or all_rows(comparison.rounding)
                differences = apart(by_way[way], want, noisy)
            if not differences:
                self.way = way
                return [self._line(lines[0])] if lines else []
            more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
            lines.append(f"{_RUNS[way]} {differences[0]}{more}")
        if not by_way:
            if self._batches.microbatches > 1:
                accepted = f"1 with a loss that runs on all rows of a batch at once alone; {lines[-1]}"
                raise UserError("microbatches", self._batches.microbatches, accepted)
            return [f"rows: {line}" for line in lines]
        same = {"parts", "whole"} <= set(by_way) and not apart(by_way["parts"], by_way["whole"])
        best: tuple[Way, ...] = ("parts",) if same else ("whole", "xla", "parts")
        self.way = next(way for way in best if way in by_way)
        return [self._line(lines[0])]

    def _unproven(self, error: Exception, params: Params, carried: Params, batch: Any) -> str:
        """Take a way that needs no proof, as the loss of all rows at once fails with an error; return a line about it.

        Parts of the rows are none: nothing says that rows do not see each other. Raises the error where no way runs.
        """
        why = f"the loss of all rows at once fails: {first_line(error)}"
        runs: list[Way] = []
        comparison = self._comparison(gradients=False)
        for way in _WAYS[::-1]:
            try:
                comparison.run(way, self._batches, params, carried, batch)(0.0)
                runs.append(way)
            except Exception:  # of split layers, about shards
                continue
        if not runs:
            raise error from error.__cause__
        count = self._batches.microbatches
        whole = next((way for way in _WAYS[1:] if way in runs), None)
        if whole is None or (count > 1 and self._rows == "auto"):
            field, value = ("rows", "auto") if whole is None else ("microbatches", count)
            raise UserError(field, value, f'rows="parts" where no row sees another, which cannot be proven: {why}')
        self.way = whole
        return self._line(f"not compared, as {why}")

    def _line(self, reason: str) -> str:
        count = self._batches.microbatches
        changed = f"; microbatches = {count} change what is learned, 1 would not" if count > 1 else ""
        self.facts = {"way": self.way, "reason": reason}
        return f"rows: {_INSTEAD[self.way]}; {reason}{changed}"


_RUNS: dict[Way, str] = {
    "parts": "in parts of the rows",
    "whole": "on the rows of all replicas",
    "xla": "with layers left to XLA",
}
_INSTEAD: dict[Way, str] = {
    "parts": "the loss runs in parts of the rows",
    "whole": 'the loss runs on the rows of all replicas (rows="whole")',
    "xla": "the loss runs on the rows of all replicas, its layers left to XLA",
}


def _shapes(params: Weights) -> Params:
    """Return the shapes of parameters, of a pruned one the whole's."""
    return {n: v if isinstance(v, jax.Array) else jax.eval_shape(_dense, v) for n, v in params.items()}  # type: ignore[misc]


def _dense(weight: Any) -> jax.Array:
    return weight.shard()  # type: ignore[no-any-return]
