"""The trainer of a grid with a pipeline: stages instead of one program, the same methods."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from math import isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.channels.choose import choose
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.memory.account import StateBytes
from axonn_jax.memory.activations import checked_policies
from axonn_jax.memory.elementwise import check_elementwise
from axonn_jax.memory.placement import Where
from axonn_jax.memory.precision import Accumulate, Precision, precisions
from axonn_jax.memory.scale import HostScale
from axonn_jax.memory.update import clip_factor
from axonn_jax.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.pipeline.build import Pipe, Pipes, Plan, names_by_place, plan, shared
from axonn_jax.pipeline.collect import collect
from axonn_jax.pipeline.connect import connect
from axonn_jax.pipeline.described import described
from axonn_jax.pipeline.holding import Keeping
from axonn_jax.pipeline.picture import draw
from axonn_jax.pipeline.timeline import TIMELINE, Recorder, write_trace
from axonn_jax.pipeline.trace import Work
from axonn_jax.schedule.dispatcher import Dispatcher, Follower
from axonn_jax.schedule.forward_only import ForwardOnly
from axonn_jax.schedule.policies import backwards, default_in_flight, joins, may_split
from axonn_jax.state.names import State
from axonn_jax.tensor.gather import Gather
from axonn_jax.tensor.params import Params, shapes_of, take_apart
from axonn_jax.train.batch import local_rows
from axonn_jax.train.check import check_fits, check_gather, check_not_scanned, check_pipeline
from axonn_jax.train.config import OverlapConfig, PipelineConfig, ScanLayers
from axonn_jax.train.places import Places
from axonn_jax.train.separable import check_separable
from axonn_jax.train.step import StepMetrics
from axonn_jax.train.trainer import Trainer


class PipelineTrainer(Trainer):
    """Trains a model whose layers are spread over the places of a pipe.

    `model` offers what `pipeline.trace.Sequenced` asks for, as `Transformer` does. Given as a function that makes it,
    each process makes only the parameters of its own stages. The optimizer must treat every parameter by itself; the
    loss, the gradients' global norm and clipping are those of the whole model. Metrics are numbers of the host.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        microbatches: int = 1,
        clip: float = 0.0,
        precision: Precision = "auto",
        accumulate: Accumulate = "fp32",
        offload: Where = "none",
        zero: int = 0,
        activations: str = "none",
        gather: Gather = "layer",
        bucket: int = 16_000_000,
        seed: int = 0,
        pipeline: PipelineConfig | None = None,
        overlap: OverlapConfig | None = None,
        scan_layers: ScanLayers = "auto",
    ):
        check_not_scanned(scan_layers)
        check_gather(gather)
        pipeline = pipeline or PipelineConfig()
        if isinstance(model, nnx.Module):
            model = abstract = fit_vocabulary(model, grid.shape)
        else:
            make = model

            def model() -> nnx.Module:
                return fit_vocabulary(make(), grid.shape)

            abstract = nnx.eval_shape(model)
        self._padding = padding_of(abstract)
        shape = getattr(abstract, "shape", None)
        check_fits(abstract, grid.shape)
        policies = checked_policies(activations, abstract)
        policies.check_pipelined()
        self._split = may_split(pipeline.split_backward, policies.uniform)
        if not hasattr(abstract, "stretch"):
            raise UserError(
                "model", type(abstract).__name__, "where grid.pipe is above 1, a Transformer or a Sequence of layers"
            )
        sequence: Any = abstract
        self._pieces = list(sequence.pieces)
        self.layout, self.ranges = check_pipeline(grid.shape.pipe, microbatches, pipeline, self._pieces)
        self.grid, self.microbatches, self.optimizer, self.pipeline = grid, microbatches, optimizer, pipeline
        split = zero > 0 and grid.shape.data > 1
        if offload != "none":
            check_elementwise(optimizer, "memory.offload = optimizer")
        self.precisions = precisions(precision, accumulate, apart=split or offload != "none")
        self.parts = shapes_of(take_apart(abstract), self.precisions.weights)
        self._scale = HostScale(scaled=self.precisions.scaled)
        self.steps_done = 0
        self._clip, self._bucket, self._activations = clip, bucket, activations
        self._seed = seed
        self._keyed = getattr(shape, "dropout", 0.0) > 0.0
        self._rows: dict[int, list[int]] = {}
        self._pipes = Pipes()
        self._half_done: Literal["", "tasks", "update"] = ""  # in a step, what an exception would leave half done
        self._channel = choose(pipeline.channel, grid.size)
        self._links = connect(grid, self.layout, pipeline.policy, pipeline.stall_timeout)
        self._links.watch.start()
        # Which stage holds which parameters does not depend on the batch, so any small one will do.
        seq_len = getattr(shape, "seq_len", 2)
        names = names_by_place(self._plan(grid.shape.batch_shards, seq_len + 1), self.layout)
        self._shared = shared(names)
        for place in grid.meshes:
            check_separable(optimizer, self.parts.params, names[place])
        keeping = Keeping(optimizer, self.precisions, bucket, offload != "none", split, self._at)
        self._places = Places(self.parts, names, grid.meshes, keeping, model, self._scale)
        self.holdings = self._places.holdings
        self._links.status.now("between steps")

    @property
    def params(self) -> Params:
        """The float32 weights that this process holds, by name; of one held at both ends of the pipe the first copy."""
        places = sorted(self._places.params.items(), reverse=True)
        return {name: p for _, params in places for name, p in params.items()}

    @property
    def opt_state(self) -> Any:
        """The optimizer state by place of the pipe, of the places here."""
        return self._places.opt_state

    @property
    def recorder(self) -> Recorder:
        """What this process's devices did in the last steps."""
        return self._links.recorder

    def close(self) -> None:
        """Ends threads and channels; call it before the process ends (the last step's results stay readable)."""
        self._pipes.close()
        self._links.close()

    def rows(self, global_batch: int) -> list[int]:
        """Rows of a global batch that this process must load (all of them in a run of one process)."""
        if global_batch not in self._rows:
            self.grid.shape.check_batch(global_batch, self.microbatches)
            sharding = NamedSharding(self.grid.mesh, P(None, BATCH_AXES))
            self._rows[global_batch] = local_rows(sharding, global_batch, self.microbatches)
        return self._rows[global_batch]

    def place(self, batch: np.ndarray) -> jax.Array:
        """Not for pipelines, whose first and last stage take their tokens microbatch by microbatch."""
        raise NotImplementedError("a pipeline has no single array of a batch")

    def compiled_step(self, batch: np.ndarray) -> jax.stages.Compiled:
        """Not for pipelines, whose step is many programs."""
        raise NotImplementedError("a pipeline has no single program of a step")

    def step(self, batch: np.ndarray) -> StepMetrics:
        """One optimizer step on this process's rows [rows, seq + 1] of a global batch of token ids.

        Waits for the gradients, since clipping needs all stages' norms, and all places skip a step that is not finite;
        the update itself is still under way on return.
        Messages: activations between neighbouring stages, [rows, seq, hidden] in the compute dtype each way a
        microbatch; once a step 16 bytes a place, and the gradient of a tied table between its two holders.
        Collectives within a stage are those of `Trainer`.
        """
        pipe, microbatches = self._prepare(batch)
        with self._started():
            return self._run(pipe, microbatches)

    def _run(self, pipe: Pipe, microbatches: list[np.ndarray]) -> StepMetrics:
        status, together, step = self._links.status, self._links.together, self.steps_done + 1
        scale = self._scale.factor
        for place, rank in pipe.ranks.items():
            key = rank.key(self._seed, self.steps_done) if self._keyed else None
            rank.begin(self.holdings[place].weights, microbatches, key, train=True, scale=scale)
        pipe.executor.run({place: self._dispatcher(place, pipe) for place in pipe.ranks}, step)
        at = time.monotonic()
        status.now(running="the reduction of the gradients")
        grads = {place: pipe.reductions[place].reduce(rank.take_sums()) for place, rank in pipe.ranks.items()}
        for name, places in self._shared.items():
            status.now(running=f"the exchange of the gradients of {name} between places {places} of the pipe")
            theirs = together.swap({place: grads[place][name] for place in places if place in grads}, *places)
            for place in list(theirs):  # each is free again once it is added
                grads[place][name] = _add(grads[place][name], theirs.pop(place))
        squares = {place: pipe.reductions[place].squares(grads[place]) for place in grads}
        losses = pipe.losses()
        own = {place: (float(squares[place]), float(losses.get(place, 0.0))) for place in grads}
        status.now(running="the agreement on loss and norm")
        square, loss = together.sums(own)
        norm = sqrt(square) / (scale or 1.0)
        finite = isfinite(norm) and isfinite(loss)
        self._scale.tell(finite=finite)
        if finite:
            factor = float(clip_factor(norm, self._clip)) / (scale or 1.0)
            self._half_done = "update"
            for place, holding in self.holdings.items():
                pipe.executor.then(place, holding.apply(grads[place], factor), "update", "optimizer", step, at)
        pipe.find_room(self.grid.size)
        self.steps_done += 1
        skipped = np.int32(self._scale.skipped)
        metrics: StepMetrics = {"loss": np.float32(loss), "grad_norm": np.float32(norm), "skipped": skipped}
        if scale is not None:
            metrics["loss_scale"] = np.float32(scale)
        return metrics

    def planned_memory(self) -> dict[int, StateBytes]:  # noqa: D102
        return self._places.planned_memory()

    def memory(self) -> dict[int, dict[str, Any]]:  # noqa: D102
        return self._places.memory()

    def _mean_loss(self, batch: np.ndarray) -> float:
        pipe, microbatches = self._prepare(batch)
        with self._started():
            return self._forward(pipe, microbatches)

    def _forward(self, pipe: Pipe, microbatches: list[np.ndarray]) -> float:
        for place, rank in pipe.ranks.items():
            rank.begin(self.holdings[place].weights, microbatches, None, train=False)
        orders = {place: ForwardOnly(self.layout, place) for place in pipe.ranks}
        pipe.executor.run(orders, self.steps_done, train=False)
        losses = pipe.losses()
        self._links.status.now(running="the agreement on the loss")
        own = {place: (float(losses.get(place, 0.0)),) for place in pipe.ranks}
        return self._links.together.sums(own)[0]

    def finite(self) -> bool:  # noqa: D102
        return self._places.finite()

    def state(self) -> dict[int, State]:  # noqa: D102
        return self._places.state()

    def state_elsewhere(self) -> frozenset[str]:  # noqa: D102
        return self._places.elsewhere()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return without_padding(self._places.shapes(), self._padding)

    def _put_state(self, states: Mapping[int, State]) -> None:
        self._places.put(states)

    @contextlib.contextmanager
    def saving(self) -> Iterator[Callable[[str], None]]:  # noqa: D102
        self._links.status.now("saving")
        yield self._at
        self._links.status.now("between steps")

    def lost(self) -> bool:
        """Whether another process is known to have gone; if so, the watch says which and ends this one."""
        return self._links.watch.lost()

    def explain(self, sequences: int) -> list[str]:
        """Lines for people: the pieces and parameters of every stage, and what the schedule is like."""
        return described(self._pieces, self.ranges, self.layout, self.pipeline.policy, self._channel)

    def leave_timeline(self, directory: Path) -> list[Path]:
        """Writes timeline.json and timeline.png of the last steps; every process of the run must call it."""
        first_of_stage = self.grid.rank % self.grid.stage_processes == 0
        spans = collect(self._links.recorder, self._links.pipe) if first_of_stage else []
        if self.grid.rank != 0 or not spans:
            return []
        write_trace(directory / TIMELINE, spans)
        picture = directory / "timeline.png"
        draw(spans, picture)
        return [picture]

    def _at(self, what: str) -> None:
        self._links.status.now(running=what)

    def _prepare(self, batch: np.ndarray) -> tuple[Pipe, list[np.ndarray]]:
        """The pipeline for batches of this shape, and the batch as [microbatches, rows, seq + 1]."""
        share = len(self.rows(self.grid.shape.batch_shards * self.microbatches))
        if batch.ndim != 2 or len(batch) == 0 or len(batch) % share:
            raise UserError("batch", batch.shape, f"[rows, seq_len + 1] token ids, rows in a multiple of {share}")
        rows, width = len(batch) // share * self.grid.shape.batch_shards, batch.shape[1]
        if self._half_done:
            self._recover()
        pipe = self._pipes.get((rows, width), lambda: self._make_pipe(rows, width))
        return pipe, list(batch.reshape(self.microbatches, -1, width))

    def _make_pipe(self, rows: int, width: int) -> Pipe:
        self._links.status.now("compiling")
        try:
            return Pipe(
                self._plan(rows, width),
                self.grid,
                self.layout,
                self._links,
                {place: holding.state_specs for place, holding in self.holdings.items()},
                channel=self._channel,
                backwards=backwards(self.pipeline.policy, self.layout, self._split),
                joins=joins(self.pipeline.policy, self.layout),
                bucket=self._bucket,
            )
        finally:
            self._links.status.now("between steps")

    @contextlib.contextmanager
    def _started(self) -> Iterator[None]:
        """Around what an exception, Ctrl-C say, would leave half done."""
        self._half_done = "tasks"
        try:
            yield
            self._half_done = ""
        finally:
            self._links.status.now("between steps")

    def _recover(self) -> None:
        """Makes good for a step that an exception ended, Ctrl-C say: it is as if that step had not begun.

        Raises ``RuntimeError`` where that cannot be.
        """
        if self._half_done == "update" or self.grid.size > 1:
            half = "the others went on" if self._half_done == "tasks" else "some weights are of it and some are not"
            raise RuntimeError(
                f"step {self.steps_done + 1} was broken off in process {self.grid.rank}, and {half}: make the trainer "
                "again (in every process) and load a checkpoint"
            )
        self._pipes.reopen()
        self._half_done = ""

    def _plan(self, rows: int, width: int) -> Plan:
        work = Work(
            rows,
            width,
            self.microbatches,
            self.precisions.compute,
            self._activations,
            self.precisions.sums,
            self.precisions.scaled,
        )
        return plan(self.parts, self.grid, self.layout, self.ranges, work, keyed=self._keyed)

    def _dispatcher(self, place: int, pipe: Pipe) -> Follower:
        orders = self._links.orders
        if orders is not None and not orders.leads:
            return Follower(self.layout, place)
        in_flight = self.pipeline.in_flight
        if in_flight == 0 and self.layout.virtual_stages == 1:  # the first step tells how much memory there is for more
            in_flight = min(default_in_flight(self.layout), self.layout.pipe + pipe.room.get(place, 0))
        return Dispatcher(self.layout, place, self.pipeline.policy, in_flight, self._split)


@jax.jit
def _add(mine: jax.Array, theirs: jax.Array) -> jax.Array:
    """The sum, the same to the last bit at both holders, since addition of two commutes."""
    return mine + theirs
