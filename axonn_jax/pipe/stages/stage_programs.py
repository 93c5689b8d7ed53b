"""Programs of a microbatch, run in sequence and compiled from the parts of one trace."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.options import Activations
from axonn_jax.pipe.stages.partition_jaxpr import cut, keeps
from axonn_jax.pipe.stages.region import Region
from axonn_jax.pipe.stages.trace import Traced


class Result(NamedTuple):
    """Results of a started program."""

    value: jax.Array | None
    """Activations or gradient for a neighbouring stage."""
    loss: jax.Array | None
    """Sum of losses, unreduced (see `SegmentPrograms.losses`); set by a last stage's program that has a forward."""
    further: dict[int, jax.Array]
    """Other results of the forward pass, by their position among the traced function's."""
    sums: dict[str, jax.Array]
    done: jax.Array
    """Array that is ready once the program has run; never donated."""


class _StageProgram(NamedTuple):
    compiled: Any
    inputs: list[int]
    """Positions of the program's inputs among the flat arguments of the traced function."""
    residual_inputs: list[tuple[int, int]]
    """Values from earlier programs, as (program, position among its residuals)."""
    live: set[tuple[int, int]]
    """Residuals that exist so far and that a subsequent program still reads."""
    reads: frozenset[str]
    """Names of inputs that subsequent programs read."""
    adds: bool
    """True if the program computes gradients of parameters."""
    heads: list[int]
    """Output positions of its other results: 0 is the forward result, 1 the gradient of the input."""


@dataclass(frozen=True)
class StageFunction:
    """Forward and backward pass of a stage, traced as one function, with the roles of its inputs and results."""

    traced: Traced
    inputs: Mapping[str, Any]
    """Shape and layout of every input by name; an input may be a pytree."""
    params: Collection[str]
    """Names of the inputs that are parameters: what depends on these alone is computed again in each program."""
    heads: Mapping[int, jax.ShapeDtypeStruct]
    """Shape and layout of each result that is no gradient of a parameter: 0 is the loss of a last stage, else the
    outgoing activations; 1 the gradient of the incoming ones; any others are `further`."""
    gradients: Mapping[int, str]
    """Parameters whose gradients the results are, by position."""
    last: bool
    """True if the first result is a loss."""
    boxed: frozenset[int] = frozenset()
    """Results, beside the loss, of which every device has its own: they get a leading dim, as residuals do."""
    further: frozenset[int] = frozenset()


class StagePrograms:
    """Programs of a microbatch, run in sequence, which hand residuals on; each is a compiled part of one trace."""

    def __init__(
        self,
        function: StageFunction,
        region: Region,
        goals: Mapping[str, list[int]],
        sums: Mapping[str, jax.ShapeDtypeStruct],
        activations: Activations,
        combined: Mapping[str, tuple[str, ...]] | None = None,
    ):
        traced = function.traced
        self._function, self._region, self._sums = function, region, sums
        self._inputs = list(dict.fromkeys(traced.names))
        free = [i for i, name in enumerate(traced.names) if name in function.params]
        # The activation policy limits what a separate forward saves. In "FI" and "FB" the backward follows at once.
        keep = {"keep": keeps(activations)} if "F" in goals else {}
        self._parts = cut(traced.closed, list(goals.values()), free, **keep)
        self._residuals: list[Any] = [[region.boxed(var.aval) for var in part.residuals] for part in self._parts]
        number = {name: i for i, name in enumerate(goals)}
        sequences = {name: (name,) for name in goals} | dict(combined or {})
        self._programs = {
            name: self._compile(tuple(map(number.__getitem__, parts))) for name, parts in sequences.items()
        }

    def residual_bytes(self) -> int:
        """Return the bytes of the first program's residuals, over all devices of the stage."""
        return sum(s.size * s.dtype.itemsize for s in self._residuals[0] if not _is_key(s))

    def reads(self, name: str) -> frozenset[str]:
        """Return the names of inputs that the programs after `name` read."""
        return self._programs[name].reads

    def run(
        self, name: str, inputs: Mapping[str, Any], residuals: list[list[Any]], sums: dict[str, jax.Array]
    ) -> Result:
        """Start a program.

        Args:
            name: Its name in `goals` or `combined`.
            inputs: Every input, by name.
            residuals: Residuals of this microbatch's earlier programs; this program's are appended, and those that no
                program reads any more are replaced with None.
            sums: Accumulated gradients, by name; donated to a program that adds to them.
        """
        program = self._programs[name]
        # A program's flat argument positions count every input of the trace, including those that are missing here
        # because it does not read them (a forward has no `dy`): 0 stands in for each.
        arrays = jax.tree.leaves([inputs.get(name, 0) for name in self._inputs])
        arguments = [arrays[i] for i in program.inputs]
        residual_inputs = [residuals[source][position] for source, position in program.residual_inputs]
        heads, new_residuals, sums, done = program.compiled(arguments, residual_inputs, sums if program.adds else {})
        residuals.append(new_residuals)
        for source, values in enumerate(residuals):
            for position in range(len(values)):
                if (source, position) not in program.live:
                    values[position] = None
        results = dict(zip(program.heads, heads, strict=True))
        loss = results.pop(0, None) if self._function.last else None
        further = {i: results.pop(i) for i in self._function.further if i in results}
        return Result(next(iter(results.values()), None), loss, further, sums, done)

    def _compile(self, numbers: tuple[int, ...]) -> _StageProgram:
        function, region = self._function, self._region
        gradients, parts = function.gradients, [self._parts[number] for number in numbers]
        structs = jax.tree.leaves([*function.inputs.values()])
        positions = list(dict.fromkeys(i for part in parts for i in part.inputs))
        sources = list(dict.fromkeys(pair for part in parts for pair in part.residual_inputs if pair[0] not in numbers))
        adds = any(i in gradients for part in parts for i in part.outputs)
        inputs = [structs[i] for i in positions]
        residual_inputs = [self._residuals[source][position] for source, position in sources]
        sums = dict(self._sums) if adds else {}
        boxed = function.boxed | ({0} if function.last else set())

        def body(inputs: list[Any], residual_inputs: list[Any], sums: dict[str, Any]) -> tuple[Any, ...]:
            by_position = dict(zip(positions, inputs, strict=True))
            available = {pair: region.unbox(value) for pair, value in zip(sources, residual_inputs, strict=True)}
            heads: list[Any] = []
            residuals: list[Any] = []
            for number, part in zip(numbers, parts, strict=True):
                out, residuals = part(
                    [by_position[i] for i in part.inputs], [available[pair] for pair in part.residual_inputs]
                )
                available |= {(number, position): value for position, value in enumerate(residuals)}
                values = dict(zip(part.outputs, out, strict=True))
                added = {gradients[i]: region.box(value) for i, value in values.items() if i in gradients}
                sums = sums | {name: sums[name] + value.astype(sums[name].dtype) for name, value in added.items()}
                heads += [
                    region.box(values[i]) if i in boxed else values[i] for i in part.outputs if i not in gradients
                ]
            # The last result tells that the program has run: unlike the sums it is never donated.
            return heads, [region.box(value) for value in residuals], sums, jnp.zeros((), jnp.int32)

        done = jax.ShapeDtypeStruct((), jnp.int32, sharding=NamedSharding(region.mesh, P()))
        head_positions = [i for part in parts for i in part.outputs if i not in gradients]
        outputs = ([function.heads[i] for i in head_positions], self._residuals[numbers[-1]], sums, done)
        compiled, (_, self._residuals[numbers[-1]], _, _) = region.compile(
            body, (inputs, residual_inputs, sums), outputs
        )
        subsequent = self._parts[numbers[-1] + 1 :]
        live = {pair for part in subsequent for pair in part.residual_inputs if pair[0] <= numbers[-1]}
        reads = frozenset(function.traced.names[i] for part in subsequent for i in part.inputs)
        return _StageProgram(compiled, positions, sources, live, reads, adds, head_positions)


def _is_key(struct: jax.ShapeDtypeStruct) -> bool:
    return bool(jnp.issubdtype(struct.dtype, jax.dtypes.prng_key))
