"""Job of any Flax model in a pipeline: a batch shows where its loss is cut, and each process makes its stages alone."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.any_flax.modules.batches import TreeBatches, rows_of
from axonn_jax.any_flax.modules.loss_model import LossModel
from axonn_jax.any_flax.modules.metrics import Weight, is_total
from axonn_jax.any_flax.modules.program import LossProgram
from axonn_jax.any_flax.modules.row_verdict import verdict_of
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import Rows
from axonn_jax.core.tensor.params import Params, copied
from axonn_jax.core.tensor.specs import is_replicated, values_of
from axonn_jax.core.terminal import say, size
from axonn_jax.pipe.job import PipelineJob, RankStates
from axonn_jax.pipe.stages import build
from axonn_jax.pipe.stages.cut import ranges_of
from axonn_jax.pipe.stages.rank_worker import CompiledRanks, RankWorker
from axonn_jax.staged.cut_model import CutModel
from axonn_jax.staged.loss_trace import Replicas
from axonn_jax.staged.worker import LossWorker, MicrobatchRows


@dataclass
class LossJob(PipelineJob):
    """A user's model and loss in a pipeline; see `PipelineJob`."""

    model_on: Callable[[Mesh, Any], LossModel] | None = None
    """Function from a mesh and the shapes of a batch to the model there, with abstract arrays and split layers."""
    values: Callable[[], Params] = dict
    """Function that makes the values of `state`."""
    weight: Weight | None = None
    rows: Rows = "auto"
    _models: dict[int, LossModel] = field(default_factory=dict)
    """The model on the mesh of each rank of this process, once a batch is there."""
    _cut: CutModel | None = None
    _traced: dict[tuple[str, int], CutModel] = field(default_factory=dict)
    """Cuts by the form of a batch and a rank, until their programs are compiled."""
    _settled: set[tuple[str, bool]] = field(default_factory=set)
    """Forms of batches whose loss may run in parts, in steps and in evaluations."""
    _memory_told: bool = False

    @property
    def names(self) -> Sequence[tuple[str, ...]] | None:  # noqa: D102
        return None if self._cut is None else self._cut.names

    def settle(self, batch: Any, *, train: bool) -> None:  # noqa: D102
        form = self.form_of(batch)
        if (form, train) in self._settled:
            return
        if not self._models:
            self._make_models(self._part_of(batch))
        # A step and an evaluation of a form have one cut.
        cut = None if (form, not train) in self._settled else self._cut_for(batch)
        self._check_rows(batch, train=train)
        if self._cut is None and cut is not None:
            self._cut = cut
            self._say(*cut.report())
        elif cut is not None and self._cut is not None and [*map(set, cut.names)] != [*map(set, self._cut.names)]:
            accepted = "batches whose loss reads the parameters of every stage that the first batch's did"
            raise UserError("batch", form, accepted)
        self._settled.add((form, train))

    def form_of(self, batch: Any) -> str:  # noqa: D102
        leaves, structure = jax.tree.flatten(values_of(batch))
        return f"{[(np.shape(leaf), str(leaf.dtype)) for leaf in leaves]} in {structure}"

    def microbatches(self, batch: Any) -> list[MicrobatchRows]:  # noqa: D102
        batches = self._tree_batches
        if batches.ragged(batch):
            raise UserError("batch", f"{batches.rows(batch)} rows", f"a multiple of {batches.share} rows here")
        if any(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) for leaf in rows_of(batch)):
            accepted = "numbers in a pipeline; a loss of (model, batch, key) gets the key of its part"
            raise UserError("batch", "random keys in it", accepted)
        total = batches.all_rows(batch)
        numbers, _ = batches.numbers(total)
        local = batches.local(total)
        leaves = [np.asarray(leaf) for leaf in rows_of(batch)]
        fixed = [leaf.value for leaf in jax.tree.leaves(batch, is_leaf=is_replicated) if is_replicated(leaf)]
        everywhere = {f" fixed {at}": partial(_on_all, leaf) for at, leaf in enumerate(jax.tree.leaves(fixed))}

        def part(number: int) -> MicrobatchRows:
            arrays = {f" rows {at}": partial(_by_rows, leaf, numbers[number], local) for at, leaf in enumerate(leaves)}
            return MicrobatchRows(numbers.shape[2], {**arrays, **everywhere})

        return [part(number) for number in range(batches.microbatches)]

    def compile(self, batch: Any, state: RankStates, alive: Callable[[], None]) -> CompiledRanks:  # noqa: D102
        assert self._cut is not None
        backwards, joins = self.policy.backwards(self.shape), self.policy.joins(self.shape)
        workers: dict[int, RankWorker] = {}
        arriving: dict[int, Any] = {}
        returning: dict[int, Any] = {}
        for pp_rank, store in state.stores.items():
            cut = self._cut_for(batch, pp_rank)
            stages, weights = {}, store.weights
            rank_stages = self.shape.stages_of(pp_rank)
            idle = weights.keys() - {name for stage in rank_stages for name in cut.trained_of(stage)}
            for stage in rank_stages:
                alive()
                stages[stage] = cut.compiled(
                    stage,
                    {name: weights[name] for name in cut.params_of(stage)},
                    {name: weights[name] for name in sorted(idle)} if stage == rank_stages[0] else {},
                    self.precisions.grad_dtype,
                    activations=self.memory.activations,
                    backwards=backwards,
                    joins=joins,
                )
                sides = cut.sides(stage)
                if sides.incoming is not None:
                    arriving[stage] = sides.incoming.struct
                if sides.outgoing is not None:
                    returning[stage] = sides.outgoing.struct
            workers[pp_rank] = LossWorker(
                pp_rank,
                stages,
                cut.replicas,
                self.parts.specs,
                store.placement.state_specs,
                bucket=self.memory.bucket,
                carried=state.carried_by_rank[pp_rank],  # type: ignore[arg-type]
                microbatches=self.batches.microbatches,
                weight=self.weight,
                batch_of=cut.batch_of,
                metrics=cut.metrics,
                borrowed=build.borrowed(state.shared, pp_rank),
            )
        self._traced.clear()
        if not self._memory_told:
            self._say(*(self._memory_line(pp_rank, worker) for pp_rank, worker in workers.items()))
            self._memory_told = True
        # The first stage receives gradients alone.
        return CompiledRanks(workers, {**returning, **arriving}, returning)

    def forget_source(self) -> None:  # noqa: D102
        super().forget_source()
        self.values = dict

    def model(self, params: Params, carried: Params) -> Any:  # noqa: D102
        return next(iter(self._models.values())).restored(params, carried)

    def state_names(self, pp_rank: int) -> Sequence[str]:  # noqa: D102
        return () if self._cut is None else self._cut.state_names(pp_rank)

    def place_state(self, pp_rank: int) -> Params:  # noqa: D102
        replicas, names = Replicas(self.grid.meshes[pp_rank]), self.state_names(pp_rank)
        if not names:
            return {}
        layouts = {name: replicas.by_replica(self.state[name]).sharding for name in names}

        def make() -> Params:
            values = self.values()
            return {name: jnp.broadcast_to(values[name], (replicas.count, *values[name].shape)) for name in names}

        return jax.jit(make, out_shardings=layouts)()  # type: ignore[no-any-return]

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:  # noqa: D102
        aux = self.aux(numbers)
        if not jax.tree.leaves(aux):
            return {}
        return {"aux": jax.tree.map(lambda leaf: leaf.value if is_total(leaf) else leaf, aux, is_leaf=is_total)}

    def aux(self, numbers: Sequence[float]) -> Any:  # noqa: D102
        assert self._cut is not None
        return jax.tree.unflatten(self._cut.aux, [np.float32(number) for number in numbers])

    def lines(self, channel: str) -> list[str]:  # noqa: D102
        return (
            []
            if self._cut is None
            else [*self._cut.report(), *build.schedule_lines(self.shape, self.pipeline.policy, channel)]
        )

    def _memory_line(self, pp_rank: int, worker: RankWorker) -> str:
        arriving = [stage.x for stage in worker.stages.values() if stage.x is not None]
        total = sum(stage.residual_bytes() for stage in worker.stages.values())
        total += sum(x.size * x.dtype.itemsize for x in arriving)
        stages, live = self.shape.virtual_stages, self.policy.live(self.shape, pp_rank)
        return (
            f"memory: place {pp_rank} keeps {size(total / worker.mesh.size)} of a microbatch on a device until "
            f"its backward pass, of at most {-(-live // stages)} at a time"
        )

    def _say(self, *lines: str) -> None:
        if self.grid.rank == 0:
            say("\n".join(lines))

    @property
    def _tree_batches(self) -> TreeBatches:
        assert isinstance(self.batches, TreeBatches)
        return self.batches

    def _cut_for(self, batch: Any, pp_rank: int | None = None) -> CutModel:
        """Cut the loss of batches of this form, traced on the mesh of a rank."""
        pp_rank = next(iter(self._models)) if pp_rank is None else pp_rank
        part = self._part_of(batch)
        if (key := (self.form_of(batch), pp_rank)) not in self._traced:
            replicas = Replicas(self.grid.meshes[pp_rank])
            ranges = partial(ranges_of, self.shape, self.pipeline.split)
            # Costs differ with the length of rows: cut where the first batch was, whose stages have their parameters.
            names = None if self._cut is None else self._cut.unit_names
            settings = (self.parts, self.state, part, self.shape, ranges, names)
            cut = CutModel(self._models[pp_rank], replicas, *settings)
            # Two ranks that cut at different steps would leave steps out, or run them twice, without an error.
            if any(other.begins != cut.begins for (form, _), other in self._traced.items() if form == key[0]):
                raise RuntimeError(f"rank {pp_rank} of the pipe cuts the loss at {cut.begins}, another rank elsewhere")
            self._traced[key] = cut
        return self._traced[key]

    def _part_of(self, batch: Any) -> Any:
        """Return the shapes of one replica's rows of a microbatch, in the tree of the batch."""
        batches = self._tree_batches
        rows = batches.all_rows(batch) // (batches.microbatches * batches.replicas)

        def of_part(leaf: Any) -> Any:
            if is_replicated(leaf):
                return type(leaf)(jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.shape, v.dtype), leaf.value))
            return jax.ShapeDtypeStruct((rows, *leaf.shape[1:]), leaf.dtype)

        return jax.tree.map(of_part, batch, is_leaf=is_replicated)

    def _make_models(self, part: Any) -> None:
        assert self.model_on is not None
        for pp_rank, mesh in self.grid.meshes.items():
            with jax.set_mesh(mesh):
                self._models[pp_rank] = self.model_on(mesh, part)
        if not Replicas(next(iter(self.grid.meshes.values()))).manual:
            # The comparison takes all parameters and rows on one device, and no process of a pipeline has them.
            self._say(
                "layers: split ones are not compared with Flax's own in a pipeline, as they are with grid.pipe = 1"
            )
        for model in self._models.values():
            model.params, model.carried = dict(self.parts.params), dict(self.state)
        self.parts = self.parts._replace(specs=next(iter(self._models.values())).specs)

    def _check_rows(self, batch: Any, *, train: bool) -> None:
        """Check that the mean loss of all rows is the mean of the parts', as no stage sees all rows.

        Raises:
            UserError: In a step it is not, or nothing shows that it is.
        """
        batches = self._tree_batches
        parts = (batches.microbatches, batches.replicas)
        if parts == (1, 1):
            return
        if self.rows == "parts":
            self._say('rows="parts": the loss of parts of the rows is not compared with that of all rows')
            return
        model = next(iter(self._models.values()))
        program = LossProgram(self.parts, self.grid, self.precisions, self.memory, model=model, weight=self.weight)
        rows = batches.all_rows(batch)
        verdict = verdict_of(program, dict(model.params), dict(self.state), batch, rows, parts, training=train)
        if verdict.kind == "proven":
            return
        reason = f"the loss is {verdict.reason}: weight= makes it one" if verdict.kind == "weighted" else verdict.reason
        if not train:
            self._say(f"evaluate: the loss runs on a replica's microbatch at a time, not on all rows; {reason}")
        # Without replicas a microbatch is seen as it is without a pipeline.
        elif verdict.in_turn or batches.replicas == 1:
            count = batches.microbatches
            changes = "may change" if verdict.kind == "not understood" else "change"
            self._say(f"rows: {reason}; microbatches = {count} {changes} what is learned, 1 would not")
        else:
            accepted = f'"parts", to train on the loss of parts of the rows: no stage of a pipeline sees all; {reason}'
            raise UserError("rows", self.rows, accepted)


def _by_rows(leaf: np.ndarray, numbers: np.ndarray, local: Sequence[int], replicas: Replicas) -> jax.Array:
    """Put this process's rows of a microbatch, whose numbers are [replicas, rows], onto a mesh."""
    layout = NamedSharding(replicas.mesh, P("data", replicas.row_axes(numbers.shape[1])))

    def shard(index: Any) -> np.ndarray:
        shard_numbers = numbers[index[:2]]
        # `leaf` only has this process's rows, in ascending order: translate global numbers to positions in it.
        positions = np.searchsorted(local, shard_numbers.ravel())
        return leaf[positions].reshape(*shard_numbers.shape, *leaf.shape[1:])

    return jax.make_array_from_callback((*numbers.shape, *leaf.shape[1:]), layout, shard)


def _on_all(leaf: Any, replicas: Replicas) -> jax.Array:
    return copied(leaf, NamedSharding(replicas.mesh, P()))
