"""Programs that run one after the other on a microbatch, compiled from the parts of one trace."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.backend.small_products import compile_traced
from axonn_jax.pipeline.partition_jaxpr import cut, keeps
from axonn_jax.pipeline.trace import Stretch, Traced, crossing
from axonn_jax.tensor.specs import shard_mapped


class Result(NamedTuple):
    """Results of a started program."""

    value: jax.Array | None
    """Activations or gradient for a neighbour."""
    loss: jax.Array | None
    """Last stage's sum of losses (unreduced, see `Programs.losses`), of a program with its forward."""
    sums: dict[str, jax.Array]
    done: jax.Array
    """Array that is ready when the program has run; nothing donates it."""


class _StageProgram(NamedTuple):
    compiled: Any
    inputs: list[int]
    """The program's inputs among the arrays of the whole function."""
    taken: list[tuple[int, int]]
    """Values from earlier programs, as (program, position among its handed values)."""
    later: set[tuple[int, int]]
    """Values handed over so far that later programs take."""
    reads: frozenset[str]
    """Names of inputs that later programs take."""
    adds: bool
    """True if the program computes gradients of parameters."""
    heads: list[int]
    """Further results: 0 is the whole function's result, 1 the gradient of the input."""


class StagePrograms:
    """Programs that run one after the other on a microbatch and hand values on: compiled parts of one trace."""

    def __init__(
        self,
        stretch: Stretch,
        traced: Traced,
        goals: Mapping[str, list[int]],
        gradients: Mapping[int, str],
        sums: Mapping[str, jax.ShapeDtypeStruct],
        joined: Mapping[str, tuple[str, ...]] | None = None,
    ):
        self._stretch, self._traced = stretch, traced
        self._gradients, self._sums, self._inputs = gradients, sums, list(dict.fromkeys(traced.names))
        free = [i for i, name in enumerate(traced.names) if name in stretch.names]
        keep = {"keep": keeps(stretch.work.activations)} if "F" in goals else {}
        self._parts = cut(traced.closed, list(goals.values()), free, **keep)
        self._handed = [[crossing(var.aval, stretch.mesh) for var in part.handed] for part in self._parts]
        number = {name: i for i, name in enumerate(goals)}
        runs = {name: (name,) for name in goals} | dict(joined or {})
        self._programs = {name: self._compile(tuple(map(number.__getitem__, parts))) for name, parts in runs.items()}

    def bytes_kept(self) -> int:
        """Return the bytes that the first program hands to those behind it, over all devices of the stage."""
        return sum(s.size * s.dtype.itemsize for s in self._handed[0] if not _is_key(s))

    def reads(self, name: str) -> frozenset[str]:
        """Inputs that programs behind one read."""
        return self._programs[name].reads

    def run(self, name: str, given: Mapping[str, Any], kept: list[list[Any]], sums: dict[str, jax.Array]) -> Result:
        """Start a program by its name in `goals` or `joined`.

        `given` holds every input by name. `kept` are the values handed over by this microbatch's earlier programs; this
        one's are added, and values that nothing needs any more are dropped. `sums` are donated to a program that adds
        to them.
        """
        program = self._programs[name]
        arrays = jax.tree.leaves([given.get(name, 0) for name in self._inputs])
        inputs = [arrays[i] for i in program.inputs]
        taken = [kept[source][position] for source, position in program.taken]
        heads, handed, sums, done = program.compiled(inputs, taken, sums if program.adds else {})
        kept.append(handed)
        for source, values in enumerate(kept):
            for position in range(len(values)):
                if (source, position) not in program.later:
                    values[position] = None
        results = dict(zip(program.heads, heads, strict=True))
        loss = results.pop(0, None) if self._stretch.last else None
        return Result(next(iter(results.values()), None), loss, sums, done)

    def _compile(self, numbers: tuple[int, ...]) -> _StageProgram:
        mesh, gradients, parts = self._stretch.mesh, self._gradients, [self._parts[number] for number in numbers]
        known = jax.tree.leaves([*self._stretch.all_inputs.values()])
        which = list(dict.fromkeys(i for part in parts for i in part.inputs))
        before = list(dict.fromkeys(pair for part in parts for pair in part.taken if pair[0] not in numbers))
        adds = any(i in gradients for part in parts for i in part.outputs)
        inputs = [known[i] for i in which]
        taken = [self._handed[source][position] for source, position in before]
        sums = dict(self._sums) if adds else {}
        loss = self._stretch.last

        def body(inputs: list[Any], taken: list[Any], sums: dict[str, Any]) -> tuple[Any, ...]:
            given = dict(zip(which, inputs, strict=True))
            available = {pair: value[0] for pair, value in zip(before, taken, strict=True)}
            tops: list[Any] = []
            handed: list[Any] = []
            for number, part in zip(numbers, parts, strict=True):
                out, handed = part([given[i] for i in part.inputs], [available[pair] for pair in part.taken])
                available |= {(number, position): value for position, value in enumerate(handed)}
                values = dict(zip(part.outputs, out, strict=True))
                added = {gradients[i]: value[None] for i, value in values.items() if i in gradients}
                sums = sums | {name: sums[name] + value.astype(sums[name].dtype) for name, value in added.items()}
                tops += [values[i][None] if i == 0 and loss else values[i] for i in part.outputs if i not in gradients]
            # The last result tells that the program has run: unlike the sums it is never donated.
            return tops, [value[None] for value in handed], sums, jnp.zeros((), jnp.int32)

        done = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(mesh, P()))
        arguments = (inputs, taken, sums)
        which_heads = [i for part in parts for i in part.outputs if i not in gradients]
        heads = [self._head(i) for i in which_heads]
        outputs = (heads, self._handed[numbers[-1]], sums, done)
        specs = jax.tree.map(lambda s: s.sharding.spec, (arguments, outputs))
        run = shard_mapped(body, mesh, specs[0], specs[1])
        shardings = jax.tree.map(lambda s: s.sharding, outputs)
        traced = jax.jit(run, donate_argnums=2, out_shardings=shardings).trace(*arguments)
        behind = self._parts[numbers[-1] + 1 :]
        later = {pair for after in behind for pair in after.taken if pair[0] <= numbers[-1]}
        reads = frozenset(self._traced.names[i] for after in behind for i in after.inputs)
        return _StageProgram(compile_traced(traced), which, before, later, reads, adds, which_heads)

    def _head(self, position: int) -> jax.ShapeDtypeStruct:
        if position == 0 and self._stretch.last:
            return crossing(self._traced.closed.jaxpr.outvars[0].aval, self._stretch.mesh)
        struct = self._stretch.y if position == 0 else self._stretch.x
        assert struct is not None
        return struct


def _is_key(struct: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(struct.dtype, jax.dtypes.prng_key))
