"""Way in which a loss runs, by proof: the first whose results are those of all rows at once on one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.small_products import compile_traced, jitted
from axonn_jax.errors import UserError, first_line
from axonn_jax.grid import without_mesh
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.specs import is_replicated, values_of
from axonn_jax.tensor.weight_gather import Weights
from axonn_jax.train.modules.apart import Way, say_first
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.coupling import couples_rows
from axonn_jax.train.modules.numbers import averaged
from axonn_jax.train.modules.probes import HALF, SINGLE, Results, Run, apart, at_points, constant_key
from axonn_jax.train.modules.program import LossProgram

Rows = Literal["auto", "parts", "whole"]
ROWS: tuple[Rows, ...] = ("auto", "parts", "whole")
_WAYS: tuple[Way, ...] = ("parts", "whole", "xla")

_SMALL, _ROOM = 2**30, 2**31
"""Bytes of parameters, and of temporaries, up to which one device computes the loss of all rows."""

_HALVES = (jnp.bfloat16, jnp.float16)
_FORMS = 2
"""Shapes of batches that are compared; each takes programs of its own."""


class Proof:
    """Choice of the way in which a loss runs, by its results and gradients.

    Every random number is a constant there, as rows in parts draw others. Results are compared with the weights and
    with weights moved at random, since gates may be zero and two policies the same at first; and again before steps 1,
    2, 4, 8 and so on, counted from 0, since masks may be alike in all parts of one batch. A batch of a second shape,
    as of an evaluation, is compared when it comes.

    Args:
        rows: "auto", or "parts" or "whole" for the way to take.
        program: The program of the gradients.
        batches: The form of batches.
    """

    def __init__(self, rows: Rows, program: LossProgram, batches: TreeBatches):
        shape = program.grid.shape
        kept = program.model.split or shape.z * shape.y * shape.x == 1
        self.way: Way = rows if rows != "auto" else "parts" if kept else "xla"
        self._program, self._batches = replace(program, model=program.model.exact(), forms=None), batches
        self._mesh = program.grid.mesh
        self._compiled: dict[Any, Callable[..., Any]] = {}
        self._rows, self._half, self._couples, self._share = rows, False, False, 1.0
        alone = shape.devices == batches.microbatches == 1
        self._due: int | None = None if alone or rows == "parts" else 0
        """Number of the next step before which results are compared; None for no more."""
        self._forms = set[str]()
        """Shapes of the batches that were compared."""
        if rows == "parts" and not alone:
            say_first('rows="parts": the loss of parts of the rows is not compared with that of all rows')
        if not kept:
            say_first(
                "rows: layers without ax.parallelize_linen are left to XLA, their parameters spread over z, y and x"
            )

    def changes(self, step: int, params: Weights, carried: Params, batch: Any) -> bool:
        """Compare results if that is due; True if the loss runs in another way from now on, which a line says.

        `batch` has this process's rows, on the host.
        """
        if self._due is None:
            return False
        form = str(jax.tree.map(jnp.shape, values_of(batch)))
        if step < self._due if form in self._forms else len(self._forms) == _FORMS:
            return False
        before = self.way
        dense = {name: v if isinstance(v, jax.Array) else jax.jit(_dense)(v) for name, v in params.items()}
        # Moves are smaller than the roundings of weights that are kept in half precision beside their masters.
        dense = {name: v.astype(jnp.float32) if v.dtype in _HALVES else v for name, v in dense.items()}
        with jax.default_matmul_precision("highest"):
            lines = self._compare(dense, carried, batch)
        self._forms.add(form)
        self._due = None if lines or self.way != "parts" else 1 << step.bit_length()  # what differs has been said
        say_first(*lines)
        return self.way != before

    def _compare(self, params: Params, carried: Params, batch: Any) -> list[str]:
        """Choose the way; return lines about what differs from all rows at once."""
        try:
            all_rows, batch = self._all_rows(params, carried, batch)
            want = all_rows(0.0)
        except UserError:
            raise
        except Exception as error:  # of a stranger's code, which a step will meet too
            return [self._unproven(error, params, carried, batch)]
        by_way, lines, noisy = dict[Way, Results](), list[str](), None
        for way in _WAYS[_WAYS.index(self.way) :]:
            try:
                by_way[way] = self._run(way, self._batches, params, carried, batch)(0.0)
            except UserError:
                raise
            except Exception as error:  # of jax's manual axes, or of code that counts on the rows of a whole batch
                lines.append(f"{_RUNS[way]} the loss fails: {first_line(error)}")
                continue
            differences = apart(by_way[way], want)
            if differences:
                noisy = noisy or all_rows(HALF if self._half else SINGLE)
                differences = apart(by_way[way], want, noisy)
            parts = self._batches.microbatches * (self._program.grid.shape.data if way == "parts" else 1)
            if not differences and not (self._couples and parts > 1):
                self.way = way
                return [self._line(lines[-1])] if lines else []
            more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
            reason = f"{differences[0]}{more}" if differences else "the loss uses a number computed from all rows"
            lines.append(f"{_RUNS[way]} {reason}")
        if not by_way:
            if self._batches.microbatches > 1:
                accepted = f"1 with a loss that runs on all rows of a batch at once alone; {lines[0]}"
                raise UserError("microbatches", self._batches.microbatches, accepted)
            return [f"rows: {line}" for line in lines]
        same = {"parts", "whole"} <= set(by_way) and not apart(by_way["parts"], by_way["whole"])
        best: tuple[Way, ...] = ("parts",) if same and not self._couples else ("whole", "xla", "parts")
        self.way = next(way for way in best if way in by_way)
        count = self._batches.microbatches
        changed = f"; microbatches = {count} change what is learned, 1 would not" if count > 1 else ""
        return [self._line(lines[0] + changed)]

    def _unproven(self, error: Exception, params: Params, carried: Params, batch: Any) -> str:
        """Take a way that needs no proof, as the loss of all rows at once fails with an error; return a line about it.

        Parts of the rows are none: nothing says that rows do not see each other. Raises the error where no way runs.
        """
        why = f"the loss of all rows at once fails: {first_line(error)}"
        runs: list[Way] = []
        for way in _WAYS[::-1]:
            try:
                self._run(way, self._batches, params, carried, batch)(0.0)
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
        mends = "" if self._program.weight else " (weight= keeps the mean of what a mask counts in parts)"
        return f"rows: {_INSTEAD[self.way]}{mends}; {reason}"

    def _all_rows(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return the results of all rows at once, by one device where it has room, and the rows."""
        if jax.process_count() == 1 and sum(value.size * value.dtype.itemsize for value in params.values()) <= _SMALL:
            with without_mesh():
                return self._alone(params, carried, batch)
        batch, at_once = self._batches.first(batch, 1 / self._batches.microbatches), TreeBatches(self._program.grid, 1)
        self._read(jax.make_jaxpr(self._run_alone)(params, carried, values_of(batch)).jaxpr, batch)
        run = self._run("whole", at_once, params, carried, batch)
        try:
            run(0.0)
        except Exception:  # of jax's manual axes
            run = self._run("xla", at_once, params, carried, batch)
        return run, batch

    def _alone(self, params: Params, carried: Params, batch: Any) -> tuple[Run, Any]:
        """Return the results of one device, and the rows, of a batch that is too large the first of every part."""
        device = self._mesh.local_devices[0]
        batch = self._batches.first(batch, self._share)
        rest = jax.device_put((carried, values_of(batch)), device)
        if (form := str(jax.tree.map(jnp.shape, rest))) not in self._compiled:
            traced = jax.jit(self._run_alone).trace(jax.device_put(params, device), *rest)
            self._read(traced.jaxpr.jaxpr, batch)
            self._compiled[form] = compiled = compile_traced(traced)
            room = compiled.memory_analysis()
            if room is not None and room.temp_size_in_bytes > _ROOM and self._share == 1.0:
                self._share = _ROOM / room.temp_size_in_bytes
                return self._alone(params, carried, batch)

        def run(params: Params) -> Any:
            with without_mesh():
                results, grads = self._compiled[form](jax.device_put(params, device), *rest)
            return results, jax.device_put(grads, self._program.shardings())

        return partial(at_points, run, params, self._mesh), batch

    def _run_alone(self, params: Params, carried: Params, rows: Any) -> Any:
        key = jax.random.fold_in(constant_key(), 0)  # as of the one part

        def part(params: Params) -> Any:
            result = self._program.model.run(params, carried, key, rows, training=True, way="xla")
            return result.loss, (averaged(1.0, result.aux), result.carried)

        (loss, (aux, changed)), grads = jax.value_and_grad(part, has_aux=True)(params)
        return (loss, aux, changed), grads

    def _read(self, jaxpr: Any, batch: Any) -> None:
        """Learn from a traced loss, whose last inputs are a batch, what one batch may not show."""
        text = str(jaxpr)
        self._half = any(f"{name}[" in text for name in ("bf16", "f16"))
        marked = jax.tree.map(
            lambda leaf: jax.tree.map(lambda _: not is_replicated(leaf), values_of(leaf)), batch, is_leaf=is_replicated
        )
        of_rows = jax.tree.leaves(marked)
        of_rows = [False] * (len(jaxpr.invars) - len(of_rows)) + of_rows
        self._couples = self._program.weight is None and couples_rows(jaxpr, of_rows)

    def _run(self, way: Way, batches: TreeBatches, params: Params, carried: Params, batch: Any) -> Run:
        program = replace(self._program, way=way)

        def run(params: Weights, carried: Params, batch: Any) -> Any:
            result = program.forward(params, carried, batch, constant_key(), training=True)
            return (result.loss, result.aux, result.carried), result.grads

        form = (way, batches.microbatches)
        if form not in self._compiled:
            layouts = (NamedSharding(self._mesh, P()), program.shardings())
            self._compiled[form] = jitted(run, out_shardings=layouts)
        rest = (carried, batches.shard(batch))
        return partial(at_points, lambda params: self._compiled[form](params, *rest), params, self._mesh)


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


def _dense(weight: Any) -> jax.Array:
    return weight.shard()  # type: ignore[no-any-return]
