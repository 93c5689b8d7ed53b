"""Way in which a loss runs, by proof: the first whose results are those of all rows at once on one device."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import keystr, tree_leaves_with_path

from axonn_jax.errors import UserError
from axonn_jax.grid import without_mesh
from axonn_jax.memory.forms import Weights
from axonn_jax.tensor.params import Params
from axonn_jax.tensor.specs import is_replicated, values_of
from axonn_jax.terminal import say
from axonn_jax.train.modules.apart import Way
from axonn_jax.train.modules.batches import TreeBatches
from axonn_jax.train.modules.coupling import couples_rows
from axonn_jax.train.modules.numbers import averaged
from axonn_jax.train.modules.probes import constant_key, moved, sketches
from axonn_jax.train.modules.program import LossProgram

Rows = Literal["auto", "parts", "whole"]
ROWS: tuple[Rows, ...] = ("auto", "parts", "whole")
_WAYS: tuple[Way, ...] = ("parts", "whole", "xla")

_ROUNDING, _FLOOR = 2e-5, 1e-7
"""Difference that is rounding of float32, over the larger of two results; and of a number near 0."""
_SINGLE, _HALF = 2.0**-23, 2.0**-8
"""Rounding of a weight, by the precision that a model computes in."""
_NOISE = 8
"""Difference that is rounding, over what results differ by when each weight is moved by its rounding."""
_POINTS = {"": (0.0, 0.0), "with other weights ": (0.05, 0.02)}
"""Noise of the weights, of their root mean square and absolute, with which results are compared."""
_SMALL, _ROOM = 2**30, 2**31
"""Bytes of parameters, and of temporaries, up to which one device computes the loss of all rows."""


class Name(NamedTuple):
    """Name of a result."""

    weights: str
    """One of `_POINTS`."""
    kind: str
    """One of `_KINDS`."""
    path: str = ""

    def __str__(self) -> str:
        return f"{self.weights}{self.kind}{self.path}"


_KINDS = ("the loss", "aux ", "state ", "the gradient of ")
"""Kinds of results, in the order in which their differences are told."""

Results = dict[Name, np.ndarray]

Run = Callable[[float], Results]
"""Results of a loss with noise of the weights, of their root mean square."""


class Difference(NamedTuple):
    """Result that is not that of all rows at once."""

    name: Name
    got: np.ndarray
    want: np.ndarray

    def __str__(self) -> str:
        if self.got.ndim == self.want.ndim == 0:
            return f"{self.name} is {float(self.got):.7g}, of all rows at once {float(self.want):.7g}"
        relative = _off(self.got, self.want) / max(_largest(self.got), _largest(self.want))
        return f"{self.name} is {relative:.1e} off that of all rows at once"


class Proof:
    """Choice of the way in which a loss runs, by its results in a forward pass of training.

    Every random number is a constant there, as rows in parts draw others. Results are compared with the weights and
    with weights moved at random, since gates may be zero and two policies the same at first; and again before steps 1,
    2, 4, 8 and so on, counted from 0, since masks may be alike in all parts of one batch.

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
        self._half, self._couples, self._share = False, False, 1.0
        alone = shape.devices == batches.microbatches == 1
        self._due: int | None = None if alone or rows == "parts" else 0
        """Number of the next step before which results are compared; None for no more."""
        if rows == "parts" and not alone:
            _say(['rows="parts": the loss of parts of the rows is not compared with that of all rows'])
        if not kept:
            _say(["rows: layers without ax.parallelize_linen are left to XLA, their parameters kept in parts"])

    def changes(self, step: int, params: Weights, carried: Params, batch: Any) -> bool:
        """Compare results if that is due; True if the loss runs in another way from now on, which a line says.

        `batch` has this process's rows, on the host.
        """
        if self._due is None or step < self._due:
            return False
        before = self.way
        self._due = 1 << step.bit_length()
        dense = {name: v if isinstance(v, jax.Array) else jax.jit(_dense)(v) for name, v in params.items()}
        with jax.default_matmul_precision("highest"):
            lines = self._compare(dense, carried, batch)
        if lines or self.way != "parts":
            self._due = None  # what differs has been said
        _say(lines)
        return self.way != before

    def _compare(self, params: Params, carried: Params, batch: Any) -> list[str]:
        """Choose the way; return lines about what differs from all rows at once."""
        try:
            all_rows, batch = self._all_rows(params, carried, batch)
            want = all_rows(0.0)
        except UserError:
            raise
        except Exception as error:  # of a stranger's code, which a step will meet too
            return [f"rows: not compared with the loss of all rows at once, which fails: {_first_line(error)}"]
        by_way, lines, noisy = dict[Way, Results](), list[str](), None
        for way in _WAYS[_WAYS.index(self.way) :]:
            try:
                by_way[way] = self._run(way, self._batches, params, carried, batch)(0.0)
            except UserError:
                raise
            except Exception as error:  # of jax's manual axes, or of code that counts on the rows of a whole batch
                lines.append(f"{_RUNS[way]} the loss fails: {_first_line(error)}")
                continue
            differences = _apart(by_way[way], want)
            if differences:
                noisy = noisy or all_rows(_HALF if self._half else _SINGLE)
                differences = _apart(by_way[way], want, noisy)
            parts = self._batches.microbatches * (self._program.grid.shape.data if way == "parts" else 1)
            if not differences and not (self._couples and parts > 1):
                self.way = way
                return [f"rows: {_INSTEAD[way]}; {lines[-1]}"] if lines else []
            more = f", and {len(differences) - 1} more" if len(differences) > 1 else ""
            reason = f"{differences[0]}{more}" if differences else "the loss uses a number computed from all rows"
            lines.append(f"{_RUNS[way]} {reason}")
        if not by_way:
            if self._batches.microbatches > 1:
                accepted = f"1 with a loss that runs on all rows of a batch at once alone; {lines[0]}"
                raise UserError("microbatches", self._batches.microbatches, accepted)
            return [f"rows: {line}" for line in lines]
        same = {"parts", "whole"} <= set(by_way) and not _apart(by_way["parts"], by_way["whole"])
        best: tuple[Way, ...] = ("parts",) if same and not self._couples else ("whole", "xla", "parts")
        self.way = next(way for way in best if way in by_way)
        count = self._batches.microbatches
        advice = f"microbatches = {count} change what is learned unless weight= is what a part's mean counts: "
        return [f"rows: {_INSTEAD[self.way]}; {advice if count > 1 else ''}{lines[0]}"]

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
        layouts = {name: NamedSharding(self._mesh, spec) for name, spec in self._program.parts.specs.items()}
        batch = self._batches.first(batch, self._share)
        rest = jax.device_put((carried, values_of(batch)), device)
        if (form := str(jax.tree.map(jnp.shape, rest))) not in self._compiled:
            traced = jax.jit(self._run_alone).trace(jax.device_put(params, device), *rest)
            self._read(traced.jaxpr.jaxpr, batch)
            self._compiled[form] = compiled = traced.lower().compile()
            room = compiled.memory_analysis()
            if room is not None and room.temp_size_in_bytes > _ROOM and self._share == 1.0:
                self._share = _ROOM / room.temp_size_in_bytes
                return self._alone(params, carried, batch)

        def run(params: Params) -> Any:
            with without_mesh():
                results, grads = self._compiled[form](jax.device_put(params, device), *rest)
            return results, jax.device_put(grads, layouts)

        return partial(_at_points, run, params), batch

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
            self._compiled[form] = jax.jit(run, out_shardings=(NamedSharding(self._mesh, P()), None))
        rest = (carried, batches.shard(batch))
        return partial(_at_points, lambda params: self._compiled[form](params, *rest), params)


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


def _say(lines: list[str]) -> None:
    if lines and jax.process_index() == 0:
        say("\n".join(lines))


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0].split('. ')[0]}"


def _dense(weight: Any) -> jax.Array:
    return weight.shard()  # type: ignore[no-any-return]


def _at_points(run: Callable[[Params], Any], params: Params, noise: float) -> Results:
    """Return the results with the weights, and with weights moved, on the host."""
    named: dict[Name, Any] = {}
    for weights, (relative, absolute) in _POINTS.items():
        (loss, *trees), grads = run(moved(params, relative + noise, absolute))
        trees.append(sketches(grads))
        named[Name(weights, _KINDS[0])] = loss
        for kind, tree in zip(_KINDS[1:], trees, strict=True):
            for path, value in tree_leaves_with_path(tree):
                named[Name(weights, kind, keystr(path, simple=True, separator="."))] = value
    return {name: np.asarray(value) for name, value in named.items()}


def _apart(got: Results, want: Results, noisy: Results | None = None) -> list[Difference]:
    """Return the results that differ by more than rounding, or than `_NOISE` times what `noisy` ones differ by.

    Results of replicas, [data, ...], are each compared.
    """
    differences = []
    for name in got.keys() & want.keys():
        exact = want[name].dtype.kind not in "fcV"
        rounding = max(_ROUNDING * _largest(want[name]), _FLOOR if name.kind in _KINDS[:2] else 0.0)
        noise = _NOISE * _off(noisy[name], want[name]) if noisy else 0.0
        if not _off(got[name], want[name]) <= (0.0 if exact else max(rounding, noise)):
            differences.append(Difference(name, got[name], want[name]))
    return sorted(differences, key=lambda each: (_KINDS.index(each.name.kind), each.name))


def _off(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of entries; equal infinities and two NaN are no difference."""
    a, b = a.astype(np.complex128), b.astype(np.complex128)
    with np.errstate(all="ignore"):
        return float(np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b)).max(initial=0))


def _largest(a: np.ndarray) -> float:
    return float(np.abs(a.astype(np.complex128)).max(initial=0, where=np.isfinite(a.astype(np.complex128))))
