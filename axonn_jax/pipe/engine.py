"""Pipeline engine, whose step is many programs on stages of layers and messages between them."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np
import optax
from flax import nnx

from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.engines.engine import TokenBatches
from axonn_jax.core.engines.optimizer import check_optimizer
from axonn_jax.core.engines.step import StepMetrics, masters
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.optimizer_state import clip_factor
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig
from axonn_jax.core.state.param_store import ParamStore
from axonn_jax.core.state.published_matrices import published_matrices
from axonn_jax.core.tensor.params import Params, abstract_module, shapes_of, split_module
from axonn_jax.pipe.channels.choice import choose
from axonn_jax.pipe.engine_state import PipelineState
from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher, forward_only
from axonn_jax.pipe.schedule.message_driven import dispatcher_of
from axonn_jax.pipe.schedule.policies import ByArrival, may_split, policy_of
from axonn_jax.pipe.stages import build
from axonn_jax.pipe.stages.cut import check_pipeline
from axonn_jax.pipe.stages.trace import StepShape
from axonn_jax.pipe.timeline.picture import draw
from axonn_jax.pipe.timeline.spans import collect
from axonn_jax.pipe.timeline.trace import TIMELINE, write_trace

_SHAPES = 4
"""Most batch shapes whose programs, threads and communicators are cached."""


class PipelineEngine:
    """Engine of a model whose layers are spread over the ranks of a pipe; see `engine.Engine` for each member.

    `model` is a `models.protocol.Model`. The optimizer must treat every parameter independently; the loss, the
    gradients' global norm and clipping are those of the full model. Metrics are host numbers.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        microbatches: int,
        clip: float,
        seed: int,
        memory: MemoryConfig,
        pipeline: PipelineConfig,
        prune: PruneConfig = PruneConfig(),  # noqa: B008 (frozen)
    ):
        def fitted() -> nnx.Module:
            module: Any = check_model(model if isinstance(model, nnx.Module) else model())
            return fit_vocabulary(module, grid.shape)

        module = fitted() if isinstance(model, nnx.Module) else None
        abstract, source = (abstract_module(fitted), fitted) if module is None else (module, module)
        checked, self._padding, split = check_model(abstract), padding_of(abstract), split_module(abstract)
        checked.check_grid(grid.shape)
        may = may_split(pipeline.split_backward, memory.activations)
        self.policy = policy_of(pipeline.policy, pipeline.in_flight, may)
        self._segments = list(checked.segments)
        self.pipe_shape, self.ranges = check_pipeline(grid.shape.pipe, microbatches, pipeline, self._segments)
        self.grid, self.batches, self.pipeline = grid, TokenBatches(grid, microbatches, packed=checked.packed), pipeline
        check_optimizer(optimizer, checked, split, memory, prune)
        optimizer = published_matrices(optimizer, abstract, split.trained)
        if counts := checked.counts(split.loads):
            optimizer = counts.optimizer(optimizer)
        self.precisions = replace(masters(memory, grid, separate=prune.prunes)[2], wide=frozenset(split.roles))
        self.parts = shapes_of(split, self.precisions.compute if split.adapters else self.precisions.weights)
        self._clip, self._memory, self._seed, self._keyed, self._counts = clip, memory, seed, checked.drops_out, counts
        self.steps_done = 0
        self._pipes: dict[tuple[int, int], build.CompiledPipeline] = {}  # LRU cache by batch shape, latest last
        self._half_done: Literal["", "tasks", "update"] = ""  # the phase of a step that an exception interrupted
        self._channel = choose(pipeline.channel, grid.size)
        self._links = build.connect(grid, self.policy, pipeline.stall_timeout)
        self.heartbeat: Heartbeat | None = self._links.heartbeat
        self._links.heartbeat.start()
        self.stores: Mapping[int, ParamStore[Any]] = {}
        # Plan for a tiny batch: the assignment of parameters to stages does not depend on the batch.
        names = build.names_by_pp_rank(self._plan(grid.shape.batch_shards, (checked.seq_len or 2) + 1), self.pipe_shape)
        settings = (optimizer, self.precisions, memory, prune)
        self._states = PipelineState(self.parts, source, names, grid, *settings, progress=self._at)
        self.stores, self._scale = self._states.stores, self._states.scale
        self._links.status.now("between steps")

    @property
    def params(self) -> Params:
        """This process's float32 weights by name; of a parameter at both ends of the pipe, the first rank's copy."""
        return self._states.params

    def merged(self, params: Params) -> Any:  # noqa: D102
        return self.parts.merge(params)

    @property
    def opt_state(self) -> Any:
        """Optimizer state by rank of the pipe, for this process's ranks."""
        return self._states.opt_state

    def close(self) -> None:
        """End threads and channels before the process exits; the last step's results stay readable."""
        self._close_pipes()
        self._links.close()

    def compiled_step(self, batch: np.ndarray) -> None:
        """Return None, since a pipeline has no single program of a step."""

    def step(self, batch: np.ndarray) -> StepMetrics:
        """Run an optimizer step on this process's [sequences, seq + 1] token ids of a global batch.

        Waits for the gradients, since clipping needs all stages' norms; the update may still be running on return.
        Messages: activations between neighboring stages, [sequences, seq, hidden] in the compute dtype each way per
        microbatch; per step, 24 bytes per rank and a tied table's gradient. Collectives: `StageProgram.gradients`.
        """
        with self._started(batch) as (pipe, microbatches):
            return self._run(pipe, microbatches)

    def _run(self, pipe: build.CompiledPipeline, microbatches: list[np.ndarray]) -> StepMetrics:
        status, sync, step, scale = self._links.status, self._links.sync, self.steps_done + 1, self._scale.factor
        for pp_rank, rank in pipe.ranks.items():
            key = rank.key(self._seed, self.steps_done) if self._keyed else None
            rank.begin(self.stores[pp_rank].weights, microbatches, key, train=True, scale=scale)
        pipe.executor.run({pp_rank: self._dispatcher(pp_rank, pipe) for pp_rank in pipe.ranks}, step)
        begin = time.monotonic()
        status.now(running="the reduction of the gradients")
        grads = {pp_rank: rank.gradients() for pp_rank, rank in pipe.ranks.items()}
        for name, pp_ranks in self._states.shared.items():
            status.now(running=f"the exchange of the gradients of {name} between ranks {pp_ranks} of the pipe")
            received = sync.swap({pp_rank: grads[pp_rank][name] for pp_rank in pp_ranks if pp_rank in grads}, *pp_ranks)
            for pp_rank in list(received):  # pop each, so that its memory is freed once it is added
                grads[pp_rank][name] = _add(grads[pp_rank][name], received.pop(pp_rank))
        measured = {pp_rank: rank.measure(grads[pp_rank]) for pp_rank, rank in pipe.ranks.items()}
        losses, totals = {pp_rank: rank.loss for pp_rank, rank in pipe.ranks.items()}, {}
        for pp_rank, (square, count, centred) in measured.items():
            grads[pp_rank] |= centred
            # A stage without counts reports -inf, which the maximum below ignores.
            totals[pp_rank] = (float(square), float(losses[pp_rank]), -inf if count is None else float(count))
        status.now(running="the agreement on loss and norm")
        squares, means, counts = zip(*sync.gathered(totals), strict=True)
        norm, loss = sqrt(sum(squares)) / (scale or 1.0), sum(means)
        finite = isfinite(norm) and isfinite(loss)
        self._scale.tell(finite=finite)
        if finite:
            factor = float(clip_factor(norm, self._clip)) / (scale or 1.0)
            self._half_done = "update"
            for pp_rank, store in self.stores.items():
                done = store.apply(grads[pp_rank], factor, loss)
                pipe.executor.then(pp_rank, done, "update", "optimizer", step, begin)
        pipe.find_room(self.grid.size)
        self.steps_done, skipped = self.steps_done + 1, np.int32(self._scale.skipped)
        metrics: StepMetrics = {"loss": np.float32(loss), "grad_norm": np.float32(norm), "skipped": skipped}
        metrics |= {} if scale is None else {"loss_scale": np.float32(scale)}
        if self._counts is not None:
            metrics[self._counts.metric] = np.float32(max(counts))
        return metrics

    def memory(self) -> dict[int, dict[str, Any]]:  # noqa: D102
        return {pp_rank: store.memory() for pp_rank, store in self.stores.items()}

    def mean_loss(self, batch: np.ndarray) -> tuple[float, float]:  # noqa: D102
        with self._started(batch) as (pipe, microbatches):
            for pp_rank, rank in pipe.ranks.items():
                rank.begin(self.stores[pp_rank].weights, microbatches, None, train=False)
            orders = {pp_rank: forward_only(self.pipe_shape, pp_rank) for pp_rank in pipe.ranks}
            pipe.executor.run(orders, self.steps_done, train=False)
            self._links.status.now(running="the agreement on the loss")
            totals = {pp_rank: (float(rank.loss), rank.targets) for pp_rank, rank in pipe.ranks.items()}
            means, targets = zip(*self._links.sync.gathered(totals), strict=True)
            return sum(means), sum(targets)

    def finite(self) -> bool:  # noqa: D102
        return all(store.finite() for store in self.stores.values())

    def state(self) -> State:  # noqa: D102
        return self._states.saved()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return without_padding(self._states.shapes(), self._padding)

    def load(self, read: Callable[[State], State], should_load: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns; calls `read` once per rank."""
        self._states.load(read, should_load)
        # The programs were compiled for the layout of the previous masks.
        if any(store.forms for store in self.stores.values()):
            self._close_pipes()

    @contextlib.contextmanager
    def saving(self) -> Iterator[Callable[[str], None]]:  # noqa: D102
        self._links.status.now("saving")
        yield self._at
        self._links.status.now("between steps")

    def explain(self, sequences: int) -> list[str]:
        """Return lines of text about the segments and parameters of every stage, and about the schedule."""
        return build.describe(self._segments, self.ranges, self.pipe_shape, self.pipeline.policy, self._channel)

    def write_timeline(self, directory: Path) -> list[Path]:
        """Write timeline.json and timeline.png of the last steps; every process of the run must call it."""
        first_of_stage = self.grid.rank % self.grid.stage_processes == 0  # a stage's processes run the same tasks
        spans = collect(self._links.recorder, self._links.pipe) if first_of_stage else []
        if self.grid.rank or not spans:
            return []
        write_trace(directory / TIMELINE, spans)
        draw(spans, picture := directory / "timeline.png")
        return [picture]

    def _at(self, text: str) -> None:
        self._links.status.now(running=text)

    def _prepare(self, batch: np.ndarray) -> tuple[build.CompiledPipeline, list[np.ndarray]]:
        rows, width = self.batches.global_rows(batch) // self.batches.microbatches, batch.shape[1]
        if self._half_done:
            self._recover()
        pipe = self._pipes.pop((rows, width), None)
        if pipe is None:
            while len(self._pipes) >= _SHAPES:
                self._pipes.pop(next(iter(self._pipes))).free()
            pipe = self._make_pipe(rows, width)
        self._pipes[rows, width] = pipe
        return pipe, list(batch.reshape(self.batches.microbatches, -1, width))

    def _close_pipes(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def _make_pipe(self, rows: int, width: int) -> build.CompiledPipeline:
        self._links.status.now("compiling")
        try:
            return build.CompiledPipeline(
                self._plan(rows, width),
                self.grid,
                self.pipe_shape,
                self._links,
                {pp_rank: store.placement.state_specs for pp_rank, store in self.stores.items()},
                self._states.shared,
                channel=self._channel,
                policy=self.policy,
                bucket=self._memory.bucket,
            )
        finally:
            self._links.status.now("between steps")

    @contextlib.contextmanager
    def _started(self, batch: np.ndarray) -> Iterator[tuple[build.CompiledPipeline, list[np.ndarray]]]:
        prepared = self._prepare(batch)
        self._half_done = "tasks"
        try:
            yield prepared
            self._half_done = ""
        finally:
            self._links.status.now("between steps")

    def _recover(self) -> None:
        """Recover from a step that an exception, such as Ctrl-C, interrupted.

        Raises ``RuntimeError`` if the step may have changed weights, or if other processes went on.
        """
        if self._half_done == "update" or self.grid.size > 1:
            half = "while other processes went on" if self._half_done == "tasks" else "while updating the weights"
            fault = f"step {self.steps_done + 1} was interrupted in process {self.grid.rank} {half}"
            raise RuntimeError(f"{fault}; create a new Trainer in every process and load a checkpoint")
        # Alone in the run and before the update: the weights are unchanged, and no peer waits for messages.
        for pipe in self._pipes.values():
            pipe.close()
            pipe.open()
        self._half_done = ""

    def _plan(self, rows: int, width: int) -> build.Plan:
        dtypes, sizes = self.precisions, (rows, width, self.batches.microbatches)
        shape = StepShape(*sizes, dtypes.compute, self._memory.activations, dtypes.grad_dtype)
        forms = {pp_rank: store.forms for pp_rank, store in self.stores.items()}
        return build.plan(self.parts, self.grid, self.pipe_shape, self.ranges, shape, self._keyed, forms)

    def _dispatcher(self, pp_rank: int, pipe: build.CompiledPipeline) -> OrderedDispatcher:
        if (leader := self._links.leader) is not None and not leader.leads:
            return OrderedDispatcher(self.pipe_shape, pp_rank)
        room = pipe.room.get(pp_rank, 0)  # unknown, hence 0, until the first step has shown how much memory is free
        policy = self.policy.within(self.pipe_shape, room) if isinstance(self.policy, ByArrival) else self.policy
        return dispatcher_of(self.pipe_shape, pp_rank, policy)


@jax.jit
def _add(mine: jax.Array, received: jax.Array) -> jax.Array:
    # Bitwise equal on both ranks, whose copies must not diverge, since adding two numbers commutes.
    return mine + received
