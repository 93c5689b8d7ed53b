"""The trainer of a grid with a pipeline: stages instead of one program, the same methods."""

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import sqrt
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.channels.choose import choose
from axonn_jax.errors import UserError
from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.memory.activations import Activations
from axonn_jax.memory.precision import Precision, compute_dtype
from axonn_jax.pipeline.build import Pipe, Plan, names_by_place, plan, shared
from axonn_jax.pipeline.collect import collect
from axonn_jax.pipeline.connect import connect
from axonn_jax.pipeline.picture import draw
from axonn_jax.pipeline.timeline import TIMELINE, Recorder, write_trace
from axonn_jax.pipeline.trace import Work
from axonn_jax.pipeline.update import clip_scale
from axonn_jax.schedule.dispatcher import Dispatcher, Follower
from axonn_jax.schedule.forward_only import ForwardOnly
from axonn_jax.state.names import State, flatten, unflatten
from axonn_jax.tensor.params import Params, Parts, take_apart
from axonn_jax.train.batch import local_rows
from axonn_jax.train.check import check_pipeline
from axonn_jax.train.config import OverlapConfig, PipelineConfig
from axonn_jax.train.layout import state_layout
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
        activations: Activations = "none",
        bucket: int = 16_000_000,
        seed: int = 0,
        pipeline: PipelineConfig | None = None,
        overlap: OverlapConfig | None = None,
    ):
        pipeline = pipeline or PipelineConfig()
        real = take_apart(model) if isinstance(model, nnx.Module) else None
        abstract = model if isinstance(model, nnx.Module) else nnx.eval_shape(model)
        shape = getattr(abstract, "shape", None)
        if shape is not None:
            grid.shape.check_model(shape)
        if not hasattr(abstract, "stretch"):
            raise UserError(
                "model", type(abstract).__name__, "where grid.pipe is above 1, a Transformer or a Sequence of layers"
            )
        sequence: Any = abstract
        self._pieces = list(sequence.pieces)
        self.layout, self.ranges = check_pipeline(grid.shape.pipe, microbatches, pipeline, self._pieces)
        self.grid, self.microbatches, self.optimizer, self.pipeline = grid, microbatches, optimizer, pipeline
        self.parts = _abstract(take_apart(abstract))
        self.steps_done = 0
        self._clip, self._bucket, self._activations = clip, bucket, activations
        self._dtype = compute_dtype(precision)
        self._seed = seed
        self._keyed = getattr(shape, "dropout", 0.0) > 0.0
        self._rows: dict[int, list[int]] = {}
        self._pipes: dict[tuple[int, int], Pipe] = {}
        self._channel = choose(pipeline.channel, grid.size, jax.default_backend())
        self._links = connect(grid, self.layout, pipeline.policy, pipeline.stall_timeout)
        self._links.watch.start()
        # Which stage holds which parameters does not depend on the batch, so any small one will do.
        seq_len = getattr(shape, "seq_len", 2)
        names = names_by_place(self._plan(grid.shape.batch_shards, seq_len + 1), self.layout)
        self._names, self._shared = names, shared(names)
        self.places: dict[int, Params] = {}
        self._states: dict[int, Any] = {}
        for place in grid.meshes:
            check_separable(optimizer, self.parts.params, names[place])
            self.places[place] = self._materialise(place, names[place], model, real)
            self._states[place] = self._optimizer_state(place)
        self._links.status.now("between steps")

    @property
    def params(self) -> Params:  # type: ignore[override]
        """The parameters that this process holds, by name; of one held at both ends of the pipe the first copy."""
        return {name: p for place in sorted(self.places, reverse=True) for name, p in self.places[place].items()}

    @property
    def opt_state(self) -> Any:  # type: ignore[override]
        """The optimizer state by place of the pipe, of the places here."""
        return self._states

    @property
    def recorder(self) -> Recorder:
        """What this process's devices did in the last steps."""
        return self._links.recorder

    def close(self) -> None:
        """Ends threads and channels; call it before the process ends (the last step's results stay readable)."""
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()
        self._links.watch.close()

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

        Waits for the gradients, since clipping needs all stages' norms; the update itself is still under way on return.
        Messages: activations between neighbouring stages, [rows, seq, hidden] in the compute dtype each way a
        microbatch; once a step 16 bytes a place, and the gradient of a tied table between its two holders.
        Collectives within a stage are those of `Trainer`.
        """
        pipe, microbatches = self._prepare(batch)
        status, together, step = self._links.status, self._links.together, self.steps_done + 1
        for place, rank in pipe.ranks.items():
            key = rank.key(self._seed, self.steps_done) if self._keyed else None
            rank.begin(self.places[place], microbatches, key, train=True)
        pipe.executor.run({place: self._dispatcher(place) for place in pipe.ranks}, step)
        at = time.monotonic()
        status.now(running="the reduction of the gradients")
        grads = {place: pipe.updates[place].reduce(rank.take_sums()) for place, rank in pipe.ranks.items()}
        for name, places in self._shared.items():
            status.now(running=f"the exchange of the gradients of {name} between places {places} of the pipe")
            theirs = together.swap({place: grads[place][name] for place in places if place in grads}, *places)
            for place, value in theirs.items():
                grads[place][name] = _add(grads[place][name], value)
        squares = {place: pipe.updates[place].squares(grads[place]) for place in grads}
        losses = pipe.losses()
        own = {place: (float(squares[place]), float(losses.get(place, 0.0))) for place in grads}
        status.now(running="the agreement on loss and norm")
        square, loss = together.sums(own)
        norm = sqrt(square)
        for place, update in pipe.updates.items():
            scale = update.scale(clip_scale(norm, self._clip))
            self.places[place], self._states[place], done = update.apply(
                self.places[place], self._states[place], grads[place], scale
            )
            pipe.executor.then(place, done, "update", "optimizer", step, at)
        self.steps_done += 1
        status.now("between steps")
        return {"loss": np.float32(loss), "grad_norm": np.float32(norm)}

    def evaluate(self, batches: Iterable[np.ndarray]) -> float:
        """Mean loss over batches (this process's rows of each), without dropout; waits for the result."""
        results = []
        for batch in batches:
            pipe, microbatches = self._prepare(batch)
            for place, rank in pipe.ranks.items():
                rank.begin(self.places[place], microbatches, None, train=False)
            orders = {place: ForwardOnly(self.layout, place) for place in pipe.ranks}
            pipe.executor.run(orders, self.steps_done, train=False)
            losses = {
                place: mean(rank.losses) for place, rank in pipe.ranks.items() if (mean := pipe.updates[place].mean)
            }
            self._links.status.now(running="the agreement on the loss")
            own = {place: (float(losses.get(place, 0.0)),) for place in pipe.ranks}
            results.append(self._links.together.sums(own)[0])
            self._links.status.now("between steps")
        if not results:
            raise UserError("evaluate", "no batches", "at least one batch")
        return float(np.mean(results))

    def state(self) -> dict[int, State]:  # noqa: D102
        return {place: flatten(self.places[place], self._states[place]) for place in self.places}

    def state_elsewhere(self) -> frozenset[str]:
        """Names of arrays here that another process's place saves: what an earlier place holds too."""
        return frozenset(name for place in range(min(self.places)) for name in self._held(place))

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return {name: value.shape for place in range(self.layout.pipe) for name, value in self._held(place).items()}

    def _put_state(self, states: Mapping[int, State]) -> None:
        for place, state in states.items():
            self.places[place], self._states[place] = unflatten(state, self.places[place], self._states[place])

    def _held(self, place: int) -> State:
        params = {name: self.parts.params[name] for name in self._names[place]}
        return flatten(params, jax.eval_shape(self.optimizer.init, params))

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:  # noqa: D102
        self._links.status.now("saving")
        yield
        self._links.status.now("between steps")

    def lost(self) -> bool:
        """Whether another process is known to have gone; if so, the watch says which and ends this one."""
        return self._links.watch.lost()

    def explain(self) -> list[str]:
        """Lines for people: the pieces and parameters of every stage, and what the schedule is like."""
        names, layout = [piece.name for piece in self._pieces], self.layout
        lines = [
            f"stage {stage} (place {layout.rank_of(stage)}): {names[r[0]]} to {names[r[-1]]}, "
            f"{sum(piece.params for piece in self._pieces[r.start : r.stop]):,} parameters"
            for stage, r in enumerate(self.ranges)
        ]
        policy = self.pipeline.policy
        lines.append(f"{layout.microbatches} microbatches a step, policy {policy}, channel {self._channel}")
        if layout.microbatches < layout.pipe:
            idle = 1 - layout.microbatches / layout.pipe
            lines.append(
                f"train.microbatches = {layout.microbatches} is fewer than grid.pipe = {layout.pipe}: at least "
                f"{idle:.0%} of the places are idle at any time; {4 * layout.pipe} or more would keep them busy"
            )
        return lines

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

    def _prepare(self, batch: np.ndarray) -> tuple[Pipe, list[np.ndarray]]:
        """The pipeline for batches of this shape, and the batch as [microbatches, rows, seq + 1]."""
        share = len(self.rows(self.grid.shape.batch_shards * self.microbatches))
        if batch.ndim != 2 or len(batch) == 0 or len(batch) % share:
            raise UserError("batch", batch.shape, f"[rows, seq_len + 1] token ids, rows in a multiple of {share}")
        rows, width = len(batch) // share * self.grid.shape.batch_shards, batch.shape[1]
        if (rows, width) not in self._pipes:
            self._links.status.now("compiling")
            self._pipes[rows, width] = Pipe(
                self._plan(rows, width),
                self.grid,
                self.layout,
                self._links,
                self.optimizer,
                self._states,
                channel=self._channel,
                split=self._splits,
                bucket=self._bucket,
            )
            self._links.status.now("between steps")
        return self._pipes[rows, width], list(batch.reshape(self.microbatches, -1, width))

    @property
    def _splits(self) -> bool:
        policy = self.pipeline.policy
        return policy == "zero-bubble" or (policy == "message" and self.pipeline.split_backward)

    def _plan(self, rows: int, width: int) -> Plan:
        work = Work(rows, width, self.microbatches, self._dtype, self._activations)
        return plan(self.parts, self.grid, self.layout, self.ranges, work, keyed=self._keyed)

    def _dispatcher(self, place: int) -> Follower:
        orders = self._links.orders
        if orders is not None and not orders.leads:
            return Follower(self.layout, place)
        return Dispatcher(self.layout, place, self.pipeline.policy, self.pipeline.in_flight, self._splits)

    def _shardings(self, place: int, names: Iterable[str]) -> dict[str, NamedSharding]:
        return {name: NamedSharding(self.grid.meshes[place], self.parts.specs[name]) for name in names}

    def _materialise(self, place: int, names: tuple[str, ...], model: Any, real: Parts | None) -> Params:
        shardings = self._shardings(place, names)
        if real is not None:
            return jax.device_put({name: real.params[name] for name in names}, shardings)

        def make() -> Params:
            made = take_apart(model()).params
            return {name: made[name] for name in names}  # XLA drops what is not returned

        return jax.jit(make, out_shardings=shardings)()

    def _optimizer_state(self, place: int) -> Any:
        params, scalar = self.places[place], NamedSharding(self.grid.meshes[place], P())
        state = jax.eval_shape(self.optimizer.init, params)
        layout = state_layout(state, params, self._shardings(place, params), scalar)
        return jax.jit(self.optimizer.init, out_shardings=layout)(params)


@jax.jit
def _add(mine: jax.Array, theirs: jax.Array) -> jax.Array:
    """The sum, the same to the last bit at both holders, since addition of two commutes."""
    return mine + theirs


def _abstract(parts: Parts) -> Parts:
    shapes: Any = {name: jax.ShapeDtypeStruct(p.shape, p.dtype) for name, p in parts.params.items()}
    return parts._replace(params=shapes)
