"""Work of one device in a traced step: FLOPs, bytes through memory, and the most bytes at a time."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, NamedTuple

from jax.extend.core import Jaxpr, JaxprEqn

from axonn_jax.core.backend.jaxprs import bodies, same_body
from axonn_jax.core.tensor.specs import spec_axes

_FUSED = frozenset({
    "abs", "add", "add_any", "and", "argmax", "argmin", "broadcast_in_dim", "ceil", "clamp", "convert_element_type",
    "cos", "div", "eq", "erf", "exp", "exp2", "floor", "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log",
    "log1p", "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "real", "reduce_max", "reduce_min",
    "reduce_sum", "rsqrt", "select_n", "sign", "sin", "slice", "sqrt", "square", "sub", "tanh", "transpose", "xor",
})  # fmt: skip
"""Operations that XLA fuses into the readers of their results, which then take no memory."""
_DEAR = frozenset({"cos", "erf", "exp", "exp2", "log", "log1p", "logistic", "pow", "rsqrt", "sin", "sqrt", "tanh"})
"""Expensive elementwise operations that XLA computes once if several operations read the result."""
_SAME = frozenset({
    "copy", "expand_dims", "name", "optimization_barrier", "pvary", "reshape", "reshard", "squeeze", "stop_gradient",
})  # fmt: skip
"""Operations whose result shares the memory of their input."""
_REDUCED = frozenset({"argmax", "argmin", "reduce_max", "reduce_min", "reduce_sum"})
_MOST_FUSED = 8
"""Largest number of arrays that a fused computation reads; a longer chain writes its result to memory."""


class DeviceWork(NamedTuple):
    """Work of a device in a program."""

    flops: float
    """FLOPs of matmuls and convolutions."""
    moved: float
    """Bytes written and read by all other operations."""
    peak: float
    """Peak bytes of live arrays, without the program's inputs."""


@dataclass
class _Array:
    """A traced value: its buffers, or those of the values that it is computed from, and its number of shards."""

    buffers: frozenset[int]
    shards: int
    size: float = 0.0
    """Bytes on a device."""
    computed: bool = False
    """True if the value is fused into its readers and has no memory."""
    stored: bool = False
    """True if the value is an input that operations outside of manual regions gather before they read it."""


def device_work(jaxpr: Jaxpr, split: Sequence[int], stored: int, sizes: Mapping[str, int], rows: int) -> DeviceWork:
    """Return the work of one device in a traced program.

    Shapes inside a manual region (`shard_map`) are those of one device. Outside, XLA propagates the sharding of the
    inputs, so each device does the share of an operation by which its result is split.

    Args:
        jaxpr: The program.
        split: Number of devices between which each input is split.
        stored: Number of inputs, the first ones, that are parameters or state.
        sizes: Devices along each mesh axis.
        rows: Number of devices between which the batch is split.
    """
    walk = _Walk(sizes, rows)
    inputs = [replace(walk.array(0.0, parts), stored=at < stored) for at, parts in enumerate(split)]
    results = walk.run(jaxpr, inputs, manual=False)
    return DeviceWork(walk.flops, walk.moved, walk.peak(results))


class _Walk:
    """One pass over a program in its order."""

    def __init__(self, sizes: Mapping[str, int], rows: int):
        self.sizes, self.rows = sizes, rows
        self.flops = self.moved = 0.0
        self.bytes: list[float] = []
        self.born: list[int] = []
        self.read: list[int] = []
        self.scratch: list[float] = []
        """Bytes that each operation needs while it runs, in addition to its inputs and results."""

    def array(self, size: float, shards: int) -> _Array:
        """Return a new array in memory."""
        self.bytes.append(size)
        self.born.append(len(self.scratch))
        self.read.append(len(self.scratch))
        return _Array(frozenset([len(self.bytes) - 1]), shards, size)

    def peak(self, results: Iterable[_Array]) -> float:
        """Return the peak bytes of live arrays if the results stay alive to the end."""
        end = len(self.scratch)
        for result in results:
            for buffer in result.buffers:
                self.read[buffer] = end
        change = [0.0] * (end + 2)
        for size, born, read in zip(self.bytes, self.born, self.read, strict=True):
            change[born] += size
            change[read + 1] -= size
        most = live = 0.0
        for at in range(end + 1):
            live += change[at]
            most = max(most, live + (self.scratch[at] if at < end else 0.0))
        return most

    def run(self, jaxpr: Jaxpr, arrive: Sequence[_Array], *, manual: bool) -> list[_Array]:
        """Return the results of a jaxpr for its inputs; with `manual` its shapes are those of one device."""
        env: dict[object, _Array] = dict(zip(jaxpr.invars, arrive, strict=True))

        def of(var: object) -> _Array:
            nothing = _Array(frozenset(), 1)
            return nothing if hasattr(var, "val") else env.get(var, nothing)  # a literal is not hashable

        # XLA removes dead code, which traces of user functions contain, so it must not count either.
        eqns = _needed(jaxpr)
        readers = Counter(var for eqn in eqns for var in eqn.invars if not hasattr(var, "val"))
        readers.update(var for var in jaxpr.outvars if not hasattr(var, "val"))
        for eqn in eqns:
            shared = any(readers[var] > 1 for var in eqn.outvars)
            results = self._equation(eqn, [of(var) for var in eqn.invars], manual, shared)
            env.update(zip(eqn.outvars, results, strict=True))
        return [of(var) for var in jaxpr.outvars]

    def _gathered(self, value: _Array, size: float) -> _Array:
        """Return a value as an operation outside of manual regions reads it: stored inputs are gathered."""
        return self.array(size, 1) if value.stored and value.shards > 1 else value

    def _materialize(self, values: Iterable[_Array]) -> frozenset[int]:
        """Return the buffers of values that an operation reads from memory, after writing the fused ones to memory."""
        for value in values:
            if value.computed:
                for buffer in value.buffers:
                    self.read[buffer] = len(self.scratch)
                value.buffers, value.computed = self.array(value.size, value.shards).buffers, False
        return frozenset[int]().union(*(value.buffers for value in values))

    def _equation(self, eqn: JaxprEqn, inputs: list[_Array], manual: bool, shared: bool) -> list[_Array]:
        kind = eqn.primitive.name
        if kind == "shard_map":
            (region,) = bodies(eqn)
            inside = self.run(region, inputs, manual=True)
            parts = [prod(self.sizes[axis] for axis in spec_axes(spec)) for spec in eqn.params["out_specs"]]
            for array, split in zip(inside, parts, strict=True):
                array.shards = split
            return inside
        if kind in ("scan", "while", "cond"):
            return self._loop(eqn, inputs, manual)
        if (body := same_body(eqn)) is not None:
            return self.run(body, inputs, manual=manual)
        if kind in _SAME:
            return inputs[: len(eqn.outvars)]
        if not manual:
            inputs = [self._gathered(array, _size(var.aval)) for var, array in zip(eqn.invars, inputs, strict=True)]
        shards = [1 if manual else self._shards(var.aval, eqn, inputs) for var in eqn.outvars]
        buffers = frozenset[int]().union(*(array.buffers for array in inputs))
        recomputed = not (kind in _DEAR and shared)
        if kind in _FUSED and recomputed and len(buffers) <= _MOST_FUSED:
            sizes = (_size(var.aval) / split for var, split in zip(eqn.outvars, shards, strict=True))
            return [_Array(buffers, split, size, True) for split, size in zip(shards, sizes, strict=True)]
        if kind.startswith(("scatter", "dynamic_update_slice")) and inputs[0].computed:
            # A fused operand is written directly into the result, so it needs no memory of its own.
            inputs = inputs[1:]
        buffers = buffers if kind in _FUSED else self._materialize(inputs)
        flops = _flops(eqn) / (1 if manual else max(array.shards for array in inputs))
        self.flops += flops
        results = [self.array(_size(v.aval) / split, split) for v, split in zip(eqn.outvars, shards, strict=True)]
        for buffer in buffers:
            self.read[buffer] = len(self.scratch)
        if not flops:
            self.moved += sum(array.size for array in (*inputs, *results))
        self.scratch.append(0.0)
        return results

    def _shards(self, aval: Any, eqn: JaxprEqn, inputs: list[_Array]) -> int:
        """Return the number of shards of a result outside of manual regions.

        It is that of the largest input; reductions of the rows leave at most the shards of the batch.
        """
        pairs = [(_size(var.aval), array) for var, array in zip(eqn.invars, inputs, strict=True) if array.buffers]
        if _flops(eqn):
            return 1 if _sums_rows(eqn) else max(array.shards for _, array in pairs)
        largest = max((size for size, _ in pairs), default=0.0)
        split = max((array.shards for size, array in pairs if size == largest), default=1)
        for size, array in pairs:
            if size == largest and array.shards < split and eqn.primitive.name in _FUSED:
                self._split_more(array, split)
        if _size(aval) < largest and eqn.primitive.name in _REDUCED:
            split = min(split, self.rows) if aval.ndim else 1
        return max(1, split)

    def _split_more(self, value: _Array, shards: int) -> None:
        """Give a value more shards, as XLA does when it propagates a sharding backwards from an operation."""
        part = value.shards / shards
        value.size, value.shards = value.size * part, shards
        if not value.computed:
            for buffer in value.buffers:
                self.bytes[buffer] *= part

    def _loop(self, eqn: JaxprEqn, inputs: list[_Array], manual: bool) -> list[_Array]:
        """Return the results of a loop, whose iterations share memory, or of the most expensive branch of a choice."""
        # Each body is walked on its own: its arrays are freed after an iteration, so they only add to the peak once.
        inner = list(bodies(eqn))
        times = int(eqn.params.get("length", 1)) if eqn.primitive.name == "scan" else 1
        traced = []
        for body in inner:
            walk = _Walk(self.sizes, self.rows)
            at = len(inputs) - len(body.invars)
            operands = inputs[at:] if at >= 0 else [*inputs, *[_Array(frozenset(), 1)] * -at]
            arrive = [replace(walk.array(0.0, array.shards), stored=array.stored) for array in operands]
            results = walk.run(body, arrive, manual=manual)
            traced.append((walk.flops, walk.moved, walk.peak(results), results))
        flops, moved, most, results = max(traced, key=lambda run: run[0])
        self.flops += times * flops
        self.moved += times * moved
        split = [max(array.shards, 1) for array in results]
        split += [max((array.shards for array in inputs), default=1)] * (len(eqn.outvars) - len(split))
        outs = zip(eqn.outvars, split, strict=False)
        outputs = [self.array(_size(var.aval) / (1 if manual else parts), parts) for var, parts in outs]
        for buffer in self._materialize(inputs):
            self.read[buffer] = len(self.scratch)
        self.scratch.append(most)
        return outputs


def _needed(jaxpr: Jaxpr) -> list[JaxprEqn]:
    """Return the equations whose results are read."""
    live = {var for var in jaxpr.outvars if not hasattr(var, "val")}
    needed = []
    for eqn in reversed(jaxpr.eqns):
        if any(var in live for var in eqn.outvars) or eqn.effects:
            needed.append(eqn)
            live.update(var for var in eqn.invars if not hasattr(var, "val"))
    return needed[::-1]


def _sums_rows(eqn: JaxprEqn) -> bool:
    """Return True if a matmul or convolution contracts the first dimension of its first operand, the rows."""
    if eqn.primitive.name.startswith("ragged_dot"):
        return 0 in eqn.params["ragged_dot_dimension_numbers"].dot_dimension_numbers[0][0]
    numbers = eqn.params["dimension_numbers"]
    if eqn.primitive.name == "dot_general":
        return 0 in numbers[0][0]
    return bool(hasattr(numbers, "lhs_spec") and numbers.lhs_spec[0] != 0)


def _size(aval: object) -> float:
    """Return the bytes of a value; 0 if it is not an array."""
    itemsize = getattr(getattr(aval, "dtype", None), "itemsize", 0)
    return float(prod(getattr(aval, "shape", ())) * itemsize)


def _flops(eqn: Any) -> float:
    """Return the FLOPs of a matmul or a convolution."""
    kind, out = eqn.primitive.name, eqn.outvars[0].aval
    if kind == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        return 2.0 * prod(out.shape) * prod(eqn.invars[0].aval.shape[dim] for dim in contracted)
    if kind == "conv_general_dilated":
        kernel, numbers = eqn.invars[1].aval, eqn.params["dimension_numbers"]
        return 2.0 * prod(out.shape) * prod(kernel.shape) / kernel.shape[numbers.rhs_spec[0]]
    if kind.startswith("ragged_dot"):
        return 2.0 * prod(eqn.invars[0].aval.shape) * out.shape[-1]
    return 0.0
