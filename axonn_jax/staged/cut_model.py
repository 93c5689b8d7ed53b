"""Model cut into the stages of a pipeline, for batches of one form."""

from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

import jax
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.batches import rows_of, with_rows
from axonn_jax.any_flax.modules.loss_model import LossModel
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import Activations
from axonn_jax.core.tensor.params import SplitModule, key_of
from axonn_jax.core.tensor.specs import Replicated, is_replicated
from axonn_jax.pipe.schedule.partition import SegmentCost
from axonn_jax.pipe.schedule.policies import Backwards
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.staged.crossing import Crossing
from axonn_jax.staged.loss_trace import LossTrace, Replicas, TraceSlot, trace_loss
from axonn_jax.staged.stage import LossStage, StageSides
from axonn_jax.staged.stage_trace import StageBuilder, float_positions, name_of, shapes, stage_parts
from axonn_jax.staged.units import Flow, Unit, bytes_of, flops_of, units_of

Ranges = Callable[[Sequence[SegmentCost]], list[range]]
"""Function from the costs of the units to the units of every virtual stage."""


class CutModel:
    """A model and its loss, traced for a training step and for an evaluation and cut into the same stages.

    Args:
        model: The model, laid out on the mesh of a rank.
        replicas: Replicas on that mesh.
        parts: The parameters of the full model.
        state: Abstract state, by path.
        batch: Shapes of one replica's rows of a microbatch, in the tree of the batch.
        shape: Sizes of the pipeline.
        ranges: Choice of the units of every stage.
        unit_names: Names of the units of every stage, where another batch has been cut; None to choose by `ranges`.

    Raises:
        UserError: The loss cannot be cut into so many stages.
    """

    def __init__(
        self,
        model: LossModel,
        replicas: Replicas,
        parts: SplitModule,
        state: Mapping[str, Any],
        batch: Any,
        shape: PipelineShape,
        ranges: Ranges,
        unit_names: list[list[str]] | None,
    ):
        self.replicas, self._batch, self._shape, self._state = replicas, batch, shape, state
        self._rows = rows_of(batch)[0].shape[0]
        params = {name: p.shape for name, p in parts.params.items()}
        self._sizes = {name: int(p.size) for name, p in parts.params.items()}
        shapes_of = {name: jax.ShapeDtypeStruct(size, "float32") for name, size in params.items()}
        self._flows = [
            Flow(trace_loss(model, replicas, shapes_of, state, batch, training=training)) for training in (True, False)
        ]
        written = {slot.name for slot in self._train.results if slot.kind == "state"}
        if strange := sorted(written & self._sizes.keys()):
            raise UserError("model", f"{strange[0]}, a parameter that a call writes", "in a pipeline, state beside it")
        known = None if unit_names is None else {name for names in unit_names for name in names}
        train = units_of(self._flows[0], self._sizes, model.collections, known)
        # An evaluation, in which less may cross, is cut where a step is.
        known = known or {unit.name for unit in train}
        self._units = [train, units_of(self._flows[1], self._sizes, model.collections, known)]
        if unit_names is None:
            costs = [SegmentCost(unit.name, unit.flops, 2 * unit.flops, unit.params) for unit in train]
            unit_names = [[train[number].name for number in numbers] for numbers in ranges(costs)]
        self._choose(unit_names)

    def _choose(self, unit_names: list[list[str]]) -> None:
        self.unit_names = unit_names
        """Names of the units of every stage."""
        self.begins = [_cuts(units, unit_names) for units in self._units]
        """Steps of the trace with which the stages begin, in a training step and in an evaluation."""
        self._parts = [stage_parts(flow, begins) for flow, begins in zip(self._flows, self.begins, strict=True)]
        train, evaluation = self._parts
        written = {slot.name for part in train for slot in part.results if slot.kind == "state"}
        for name in sorted(written):
            readers = [number for parts in self._parts for number, part in enumerate(parts) if name in part.state]
            writers = [n for n, part in enumerate(train) if TraceSlot("state", name) in part.results]
            if set(readers) - set(writers):
                accepted = f"state that one stage reads and writes; stages {readers} read and {writers} write it"
                raise UserError("model", name, accepted)
        self.names = [
            tuple(
                dict.fromkeys(
                    name
                    for stage in self._shape.stages_of(rank)
                    for part in (train[stage], evaluation[stage])
                    for name in part.params
                )
            )
            for rank in range(self._shape.pipe)
        ]
        """Parameters of every rank of the pipe."""
        read = {name for names in self.names for name in names}
        # What the loss does not read has a gradient of zero, and the optimizer may still decay it: it needs a home.
        self.names[0] += tuple(name for name in self._sizes if name not in read)
        self._messages = [self._message(number) for number in range(self._shape.last)]

    @property
    def _train(self) -> LossTrace:
        return self._flows[0].trace

    @property
    def aux(self) -> Any:
        """Structure of the metrics."""
        return self._train.aux

    @property
    def metrics(self) -> int:
        """Number of metrics."""
        return int(self.aux.num_leaves)

    def params_of(self, stage: int) -> tuple[str, ...]:
        """Return the parameters of a stage."""
        return tuple(dict.fromkeys(name for parts in self._parts for name in parts[stage].params))

    def state_names(self, pp_rank: int) -> tuple[str, ...]:
        """Return the state of a rank of the pipe."""
        stages = self._shape.stages_of(pp_rank)
        names = (name for stage in stages for parts in self._parts for name in parts[stage].state)
        found = dict.fromkeys(names)
        if pp_rank == 0:  # state that nothing reads is saved with the first stage
            read = {name for parts in self._parts for part in parts for name in part.state}
            found |= dict.fromkeys(name for name in self._state if name not in read)
        return tuple(found)

    def trained_of(self, stage: int) -> tuple[str, ...]:
        """Return the parameters of a stage that have gradients."""
        return self._parts[0][stage].params

    def sides(self, stage: int) -> StageSides:
        """Return the messages of a stage."""
        incoming = self._messages[stage - 1] if stage else None
        return StageSides(incoming, self._messages[stage] if stage < self._shape.last else None)

    def batch_of(self, arrays: Mapping[str, jax.Array]) -> tuple[Callable[[Any], Any], list[jax.Array]]:
        """Return a function from the rows of a part to its batch, and the rows [replicas, rows, ...] of all parts.

        Args:
            arrays: Arrays of a microbatch, by the names of the stages' inputs.
        """
        rows = [arrays[name_of(TraceSlot("rows", str(at)))] for at in range(len(rows_of(self._batch)))]
        numbers = count()

        def fixed(_: Any) -> jax.Array:
            return arrays[name_of(TraceSlot("fixed", str(next(numbers))))]

        marked = jax.tree.map(
            lambda leaf: Replicated(jax.tree.map(fixed, leaf.value)) if is_replicated(leaf) else leaf,
            self._batch,
            is_leaf=is_replicated,
        )
        return lambda rows: with_rows(marked, rows), rows

    def compiled(
        self,
        stage: int,
        stored: Mapping[str, Any],
        idle: Mapping[str, Any],
        grad_dtype: Any,
        *,
        activations: Activations,
        backwards: Backwards,
        joins: bool,
    ) -> LossStage:
        """Compile a stage.

        Args:
            stage: Its number.
            stored: Its parameters, or their shapes, dtypes and layouts, by path.
            idle: Parameters of its rank that have no gradient in any stage, likewise.
            grad_dtype: Dtype in which gradients accumulate.
            activations: Policy for the values that the forward pass saves.
            backwards: Variants of the backward pass.
            joins: True if the last stage joins forwards and backwards.
        """
        structs, idle_structs = (
            {name: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=v.sharding) for name, v in each.items()}
            for each in (stored, idle)
        )
        sides = self.sides(stage)
        builder = StageBuilder(self.replicas, structs, self._inputs(), sides.incoming, sides.outgoing)
        train, evaluation = (parts[stage] for parts in self._parts)
        function, slots = builder.function(train, backward=True)
        forward, forward_slots = builder.function(evaluation, backward=False)
        sums, zeros = (
            {n: self.replicas.by_replica(s.update(dtype=grad_dtype), s.sharding.spec) for n, s in each.items()}
            for each in ({name: structs[name] for name in function.gradients.values()}, idle_structs)
        )
        return LossStage(
            self.replicas,
            sides,
            function,
            forward,
            (slots, forward_slots),
            sums,
            zeros,
            activations=activations,
            backwards=backwards,
            joins=joins,
        )

    def report(self) -> list[str]:
        """Return lines about what each stage has, and what crosses between them."""
        lines = []
        units = {unit.name: unit for unit in self._units[0]}
        total = sum(unit.flops for unit in units.values()) or 1
        for stage, names in enumerate(self.unit_names):
            span = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
            share = sum(units[name].flops for name in names) / total
            elements = sum(self._sizes[name] for name in self.params_of(stage))
            place = self._shape.rank_of(stage)
            line = f"stage {stage} (place {place}): {span}, {elements:,} parameters, {share:.0%} of FLOPs"
            if stage < self._shape.last:
                leaving = self._parts[0][stage].leaving
                size = sum(bytes_of(var) for var in leaving)
                line += (
                    f"; sends {len(leaving)} array{'s' * (len(leaving) != 1)}, {size:,} bytes a replica's microbatch"
                )
            lines.append(line)
        scanned = max((flops_of(eqn) for eqn in self._flows[0].steps if eqn.primitive.name == "scan"), default=0)
        if 2 * scanned > total:
            share = scanned / total
            lines.append(f"a scan with {share:.0%} of FLOPs stays in one stage: layers of a list (nnx.List) are cut")
        return lines

    def _inputs(self) -> dict[str, Any]:
        """Return the form of every input of the stages but parameters and messages."""
        replicas = self.replicas
        over = replicas.row_axes(self._rows)
        forms: dict[str, Any] = {
            name_of(TraceSlot("state", name)): replicas.by_replica(value) for name, value in self._state.items()
        }
        by_slot = {slot: var.aval for flow in self._flows for var, slot in flow.slot_of.items()}
        for slot, aval in by_slot.items():
            if slot.kind == "rows":
                forms[name_of(slot)] = replicas.by_replica(aval, P(over))
            elif slot.kind == "share":
                forms[name_of(slot)] = replicas.by_replica(aval)
            elif slot.kind in ("fixed", "scale", "number"):
                forms[name_of(slot)] = replicas.struct(aval.shape, aval.dtype)
            elif slot.kind == "key":
                forms[name_of(slot)] = replicas.struct((), jax.eval_shape(lambda: key_of(0)).dtype)
        return forms

    def _message(self, number: int) -> Crossing:
        """Return the form of the messages between a stage and the next one."""
        train, evaluation = (shapes(parts[number].leaving) for parts in self._parts)
        for aval in (*train, *evaluation):
            if jax.numpy.issubdtype(aval.dtype, jax.numpy.complexfloating):
                accepted = "real numbers between stages; pipeline.split cuts elsewhere"
                raise UserError("model", f"{aval.dtype} ahead of {self.unit_names[number + 1][0]}", accepted)
        return Crossing(
            self.replicas, self._rows, (train, tuple(train[at] for at in float_positions(train)), evaluation)
        )


def _cuts(units: Sequence[Unit], unit_names: Sequence[Sequence[str]]) -> list[int]:
    """Return where every stage but the first begins, for units that may be others in an evaluation.

    Raises:
        UserError: A stage has none of the units.
    """
    begin_of = {unit.name: unit.begin for unit in units}
    cuts = []
    for names in unit_names[1:]:
        begins = [begin_of[name] for name in names if name in begin_of]
        if not begins:
            raise UserError("model", f"an evaluation without {names[0]}", "one that calls a layer of every stage")
        cuts.append(min(begins))
    return cuts
