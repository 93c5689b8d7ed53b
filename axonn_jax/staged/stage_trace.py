"""Trace of one stage: its forward and backward pass as one function, for the pipeline to cut into programs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Var, jaxpr_as_fun
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.loss_model import REPLICAS
from axonn_jax.core import compat
from axonn_jax.core.backend.small_products import compile_traced
from axonn_jax.pipe.stages.region import Region
from axonn_jax.pipe.stages.stage_programs import StageFunction
from axonn_jax.pipe.stages.trace import DY, Traced, X
from axonn_jax.staged.crossing import Crossing
from axonn_jax.staged.loss_trace import Replicas, TraceSlot
from axonn_jax.staged.units import Flow, needed


@dataclass(frozen=True)
class StagePart:
    """The equations of a stage: a program of inputs of the loss and of values that arrive."""

    closed: compat.ClosedJaxpr
    """Inputs: those of `slots`, then `arriving`. Results: those of the loss, then `leaving`."""
    slots: tuple[TraceSlot, ...]
    arriving: tuple[Var, ...]
    leaving: tuple[Var, ...]
    results: tuple[TraceSlot, ...]

    @property
    def params(self) -> tuple[str, ...]:
        """Paths of the parameters that the stage reads."""
        return tuple(slot.name for slot in self.slots if slot.kind == "param")

    @property
    def state(self) -> tuple[str, ...]:
        """Paths of the state that the stage reads."""
        return tuple(slot.name for slot in self.slots if slot.kind == "state")


def stage_parts(flow: Flow, cuts: Sequence[int]) -> list[StagePart]:
    """Cut a traced loss into stages.

    Args:
        flow: The traced loss.
        cuts: Number of the first step of every stage but the first.
    """
    jaxpr, results = flow.trace.closed.jaxpr, flow.trace.results
    bounds = [0, *cuts, len(flow.steps)]
    state_of = {slot.name: var for var, slot in flow.slot_of.items() if slot.kind == "state"}
    parts: list[StagePart] = []
    for number, begin in enumerate(bounds[:-1]):
        end, last = bounds[number + 1], number == len(cuts)
        arriving, leaving = flow.crossing(begin), [] if last else flow.crossing(end)
        slots: list[TraceSlot] = []
        outvars: list[Any] = []
        for var, slot in zip(jaxpr.outvars, results, strict=True):
            if slot.kind == "state":
                step = flow.step_of.get(var) if isinstance(var, Var) else None
                # State that depends on state alone, such as a counter, is written by the first stage.
                chosen = number == 0 if step is None else begin <= step < end
            else:
                chosen = last
            if chosen:
                slots.append(slot)
                outvars.append(var)
        defined = set(arriving)
        eqns, read = needed(flow, [*outvars, *leaving], defined, range(begin, end))
        extra = [state_of[slot.name] for slot in slots if slot.kind == "state" and state_of[slot.name] not in read]
        invars = [*read, *extra]
        full = jaxpr.replace(invars=[*invars, *arriving], outvars=[*outvars, *leaving], eqns=eqns)
        closed = compat.ClosedJaxpr(full, flow.trace.closed.consts)
        names = tuple(flow.slot_of[var] for var in invars)
        parts.append(StagePart(closed, names, tuple(arriving), tuple(leaving), tuple(slots)))
    return parts


def name_of(slot: TraceSlot) -> str:
    """Return the name of a stage's input; the leading space keeps it distinct from paths of parameters."""
    return slot.name if slot.kind == "param" else f" {slot.kind} {slot.name}".rstrip()


def float_positions(avals: Sequence[Any]) -> list[int]:
    """Return the positions of the values that have gradients."""
    return [at for at, aval in enumerate(avals) if jnp.issubdtype(aval.dtype, jnp.floating)]


def shapes(variables: Sequence[Var]) -> tuple[Any, ...]:
    """Return the shapes and dtypes of traced values."""
    return tuple(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables)  # type: ignore[attr-defined]


@dataclass(frozen=True)
class StageBuilder:
    """Traces a stage's function on a mesh.

    Args:
        replicas: Replicas on the mesh of the stage.
        stored: Shape, stored dtype and layout of every parameter of the stage, by path.
        inputs: Shape and layout of the loss's other inputs, by their names here.
        incoming: Form of the messages that arrive; None for a first stage.
        outgoing: Form of the messages that leave; None for a last stage.
    """

    replicas: Replicas
    stored: Mapping[str, jax.ShapeDtypeStruct]
    inputs: Mapping[str, jax.ShapeDtypeStruct]
    incoming: Crossing | None
    outgoing: Crossing | None

    def function(self, part: StagePart, *, backward: bool) -> tuple[StageFunction, dict[int, TraceSlot]]:
        """Return a stage's forward pass, and its backward pass if asked for, traced as one function.

        Beside it are the loss's other results by position.

        Args:
            part: The equations of the stage.
            backward: False for an evaluation.
        """
        names = [name_of(slot) for slot in part.slots]
        structs: dict[str, Any] = {
            name: self.stored[slot.name] if slot.kind == "param" else self.inputs[name]
            for name, slot in zip(names, part.slots, strict=True)
        }
        if self.incoming is not None:
            structs[X] = self.incoming.struct
        if backward and self.outgoing is not None:
            structs[DY] = self.outgoing.struct
        last = self.outgoing is None
        heads: dict[int, Any] = {}
        gradients: dict[int, str] = {}
        further: dict[int, TraceSlot] = {}
        arriving, leaving = shapes(part.arriving), shapes(part.leaving)
        floats_in, floats_out = float_positions(arriving), float_positions(leaving)

        def run(*arrays: Any) -> list[Any]:
            by_name = dict(zip(structs, arrays, strict=True))
            values = [
                by_name[name].astype(jnp.float32) if slot.kind == "param" else by_name[name]
                for name, slot in zip(names, part.slots, strict=True)
            ]
            trained = [at for at, slot in enumerate(part.slots) if slot.kind == "param"]
            came = [] if self.incoming is None else self.incoming.unpack(by_name[X], arriving)

            def forward(params: list[Any], moving: list[Any]) -> tuple[list[Any], list[Any]]:
                filled, crossed = list(values), list(came)
                for at, value in zip(trained, params, strict=True):
                    filled[at] = value
                for at, value in zip(floats_in, moving, strict=True):
                    crossed[at] = value
                out = jaxpr_as_fun(part.closed)(*filled, *crossed)
                results, left = out[: len(part.results)], out[len(part.results) :]
                differentiated = [results[0]] if last else [left[at] for at in floats_out]
                return differentiated, [results, left]

            args = ([values[at] for at in trained], [came[at] for at in floats_in])
            if backward:
                differentiated, pull, (results, left) = jax.vjp(forward, *args, has_aux=True)
                if last:
                    seeds = [jnp.ones_like(differentiated[0])]
                else:
                    assert self.outgoing is not None
                    seeds = self.outgoing.unpack(by_name[DY], [leaving[at] for at in floats_out])
                dparams, dmoving = pull(seeds)
            else:
                _, (results, left) = forward(*args)
            head = results[0] if last else self.outgoing.pack(left)  # type: ignore[union-attr]
            outputs, further_results = [head], results[1:] if last else results
            heads[0] = None if last or self.outgoing is None else self.outgoing.struct
            if backward:
                if self.incoming is not None:
                    heads[1] = self.incoming.struct
                    outputs.append(self.incoming.pack(dmoving))
                for at, value in zip(trained, dparams, strict=True):
                    gradients[len(outputs)] = part.slots[at].name
                    outputs.append(value)
            for slot, value in zip(part.results[1:] if last else part.results, further_results, strict=True):
                further[len(outputs)] = slot
                outputs.append(value)
            return outputs

        closed = self.replicas.traced(run, [_of_replica(struct) for struct in structs.values()])
        avals = [atom.aval for atom in closed.jaxpr.outvars]
        # State is the same in all replicas, as the verdict admits a loss only if every replica computes it alike.
        heads |= {0: self.replicas.by_replica(avals[0])} if last else {}
        heads |= {at: self.replicas.by_replica(avals[at]) for at in further}
        traced = Traced(closed, list(structs))
        function = StageFunction(traced, structs, part.params, heads, gradients, last, further=frozenset(further))
        return function, further


class StageRegion(Region):
    """Region of a stage of any Flax model: traced for one replica, and run for all of them side by side.

    Where every replica is one device, all share a manual region. Otherwise layers have manual regions of their own in
    a global program, `jax.vmap` splits all of them over `data`, and the compiler lays out what lies between them.
    """

    def __init__(self, replicas: Replicas):
        self._replicas, self.mesh = replicas, replicas.mesh

    def boxed(self, aval: Any) -> jax.ShapeDtypeStruct | None:  # noqa: D102
        return self._replicas.by_replica(aval) if self._replicas.manual else None

    def box(self, value: jax.Array) -> jax.Array:
        """Return the value itself, as `compile` brings in the dim of replicas."""
        return value

    def unbox(self, value: jax.Array) -> jax.Array:
        """Return the value itself, as `compile` takes the dim of replicas away."""
        return value

    def compile(self, body: Callable[..., Any], arguments: Any, outputs: Any) -> tuple[jax.stages.Compiled, Any]:  # noqa: D102
        run = self._manual(body, arguments) if self._replicas.manual else self._mapped(body, arguments)
        shardings = jax.tree.map(
            lambda leaf: None if leaf is None else leaf.sharding, outputs, is_leaf=lambda leaf: leaf is None
        )
        with jax.set_mesh(self.mesh):
            traced = jax.jit(run, donate_argnums=2, out_shardings=shardings).trace(*arguments)
            compiled = compile_traced(traced)
        forms = jax.tree.map(
            lambda info, layout: jax.ShapeDtypeStruct(info.shape, info.dtype, sharding=layout),
            traced.out_info,
            compiled.output_shardings,
        )
        return compiled, forms

    def _manual(self, body: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
        inputs = [has_replicas(struct) for struct in arguments[0]]
        by_replica = P(REPLICAS)

        def first(value: jax.Array) -> jax.Array:
            return value[0]

        def local(values: list[Any], residuals: list[Any], sums: dict[str, Any]) -> Any:
            values = [value[0] if split else value for value, split in zip(values, inputs, strict=True)]
            heads, left, added, done = body(values, jax.tree.map(first, residuals), jax.tree.map(first, sums))
            return (*jax.tree.map(lambda value: value[None], (heads, left, added)), done)

        in_specs = ([by_replica if split else P() for split in inputs], by_replica, by_replica)
        out_specs = (by_replica, by_replica, by_replica, P())
        return self._replicas.region(local, in_specs, out_specs)

    def _mapped(self, body: Callable[..., Any], arguments: Any) -> Callable[..., Any]:
        count = self._replicas.count
        copied = [not has_replicas(struct) and struct.ndim > 0 for struct in arguments[0]]
        axes = [0 if copy or has_replicas(struct) else None for copy, struct in zip(copied, arguments[0], strict=True)]
        mapped = jax.vmap(
            body,
            in_axes=(axes, 0, 0),
            out_axes=(0, 0, 0, None),
            spmd_axis_name="data",
            axis_name=REPLICAS,
            axis_size=count,
        )

        def copy(value: jax.Array, struct: Any) -> jax.Array:
            layout = NamedSharding(self.mesh, P("data", *struct.sharding.spec))
            return lax.with_sharding_constraint(jnp.broadcast_to(value, (count, *value.shape)), layout)

        def run(values: list[Any], residuals: list[Any], sums: dict[str, Any]) -> Any:
            # jax rejects a layer's region in which the rows vary over `data` and the parameters do not, so every
            # replica gets a copy, which each device has already.
            given = zip(values, copied, arguments[0], strict=True)
            return mapped([copy(value, struct) if due else value for value, due, struct in given], residuals, sums)

        return run


def has_replicas(struct: jax.ShapeDtypeStruct) -> bool:
    """Return whether an array's first dim is that of replicas."""
    spec = struct.sharding.spec  # type: ignore[union-attr]
    return bool(spec) and spec[0] == "data"


def _of_replica(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(struct.shape[has_replicas(struct) :], struct.dtype)
