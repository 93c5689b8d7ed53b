"""Pipeline engine, whose step is many programs on stages of layers and messages between them."""

import contextlib
import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any, Literal

import numpy as np

from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.engines.step import StepMetrics
from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.optimizer_state import clip_factor
from axonn_jax.core.models.vocabulary import without_padding
from axonn_jax.core.state.param_store import ParamStore, Read
from axonn_jax.core.tensor.params import Params, SplitModule
from axonn_jax.pipe.channels.choice import choose
from axonn_jax.pipe.engine_state import PipelineState, global_shapes, sums_of_ranks
from axonn_jax.pipe.job import PipelineJob
from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher, forward_only
from axonn_jax.pipe.schedule.message_driven import dispatcher_of
from axonn_jax.pipe.schedule.policies import ByArrival
from axonn_jax.pipe.stages import build
from axonn_jax.pipe.timeline.picture import draw
from axonn_jax.pipe.timeline.spans import collect
from axonn_jax.pipe.timeline.trace import TIMELINE, write_trace

_SHAPES = 4
"""Most batch shapes whose programs, threads and communicators are cached."""


class PipelineEngine:
    """Engine of a model whose layers are spread over the ranks of a pipe; see `engine.Engine` for each member.

    The optimizer must treat every parameter independently; the loss, the gradients' global norm and clipping are those
    of the full model. Metrics are host numbers.
    """

    def __init__(self, job: PipelineJob, *, clip: float, seed: int):
        self.grid, self.batches, self.job = job.grid, job.batches, job
        self._clip, self._seed = clip, seed
        self.steps_done = 0
        self._pipes: dict[Hashable, build.CompiledPipeline] = {}  # LRU cache by the batch's form, latest last
        self._half_done: Literal["", "tasks", "update"] = ""  # the phase of a step that an exception interrupted
        self._channel = choose(job.pipeline.channel, job.grid.size)
        self._links = build.connect(job.grid, job.policy, job.pipeline.stall_timeout)
        self.heartbeat: Heartbeat | None = self._links.heartbeat
        self._links.heartbeat.start()
        self.stores: Mapping[int, ParamStore[Any]] = {}
        self._placed: PipelineState | None = None
        self._pending: list[tuple[Read, Callable[[str], bool]]] = []
        """Loads that wait for the stages to be known."""
        if job.names is not None:
            self._place()
        self._links.status.now("between steps")

    def _place(self) -> None:
        """Create the state of this process's stages, once they are known, and load what has been asked for."""
        assert self.job.names is not None
        self._placed = PipelineState(self.job, self.job.names, progress=self._at)
        self.stores = self._placed.stores
        self.job.forget_source()
        pending, self._pending = self._pending, []
        for read, should_load in pending:
            self._placed.load(read, should_load)

    @property
    def _states(self) -> PipelineState:
        if self._placed is None:
            accepted = "a step or an evaluation first: a batch shows which parameters each stage of your model reads"
            raise UserError("trainer", "without a batch so far", accepted)
        return self._placed

    @property
    def parts(self) -> SplitModule:  # noqa: D102
        return self.job.parts

    @property
    def params(self) -> Params:
        """This process's float32 weights by name; of a parameter at both ends of the pipe, the first rank's copy."""
        return self._states.params

    def merged(self, params: Params) -> Any:  # noqa: D102
        return self.job.model(params, self._states.carried)

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

    def step(self, batch: Any) -> StepMetrics:
        """Run an optimizer step on this process's rows of a global batch.

        Waits for the gradients, since clipping needs all stages' norms; the update may still be running on return.
        Messages: activations between neighboring stages, each way per microbatch (of a transformer [sequences, seq,
        hidden] in the compute dtype); per step, 24 bytes per rank and a tied table's gradient. Collectives:
        `StageProgram.gradients`.
        """
        with self._started(batch) as (pipe, microbatches):
            return self._run(pipe, microbatches)

    def _run(self, pipe: build.CompiledPipeline, microbatches: list[Any]) -> StepMetrics:
        states = self._states
        status, sync, step, scale = self._links.status, self._links.sync, self.steps_done + 1, states.scale.factor
        for pp_rank, rank in pipe.ranks.items():
            key = rank.key(self._seed, self.steps_done) if self.job.draws else None
            rank.begin(self.stores[pp_rank].weights, microbatches, key, train=True, scale=scale)
        pipe.executor.run({pp_rank: self._dispatcher(pp_rank, pipe) for pp_rank in pipe.ranks}, step)
        begin = time.monotonic()
        status.now(running="the reduction of the gradients")
        grads = {pp_rank: rank.gradients() for pp_rank, rank in pipe.ranks.items()}
        for name, pp_ranks in states.shared.items():
            status.now(running=f"the exchange of the gradients of {name} between ranks {pp_ranks} of the pipe")
            # No name is left to the other ranks' gradients, which would hold their memory through the update.
            for pp_rank, total in sums_of_ranks(name, grads, sync.exchange, pp_ranks).items():
                grads[pp_rank][name] = total
        measured = {pp_rank: rank.measure(grads[pp_rank]) for pp_rank, rank in pipe.ranks.items()}
        for pp_rank, (square, _, _) in measured.items() if self.grid.shape.data > 1 else ():
            pipe.executor.then(pp_rank, square, "reduction", "communication", step, begin)
        losses, totals = {pp_rank: rank.loss for pp_rank, rank in pipe.ranks.items()}, {}
        for pp_rank, (square, count, centred) in measured.items():
            grads[pp_rank] |= centred
            # A stage without counts reports -inf, which the maximum below ignores.
            numbers = (float(square), float(losses[pp_rank]), -inf if count is None else float(count))
            totals[pp_rank] = (*numbers, *pipe.ranks[pp_rank].numbers())
        status.now(running="the agreement on loss and norm")
        squares, means, counts, *further = zip(*sync.gathered(totals), strict=True)
        norm, loss = sqrt(sum(squares)) / (scale or 1.0), sum(means)
        finite = isfinite(norm) and isfinite(loss)
        states.scale.tell(finite=finite)
        if finite:
            factor = float(clip_factor(norm, self._clip)) / (scale or 1.0)
            self._half_done, begin = "update", time.monotonic()
            for pp_rank, store in self.stores.items():
                done = store.apply(grads[pp_rank], factor, loss)
                pipe.ranks[pp_rank].commit()
                pipe.executor.then(pp_rank, done, "update", "optimizer", step, begin)
        pipe.find_room(self.grid.size)
        self.steps_done, skipped = self.steps_done + 1, np.int32(states.scale.skipped)
        metrics: StepMetrics = {"loss": np.float32(loss), "grad_norm": np.float32(norm), "skipped": skipped}
        metrics |= {} if scale is None else {"loss_scale": np.float32(scale)}
        metrics |= self.job.metrics([sum(values) for values in further])
        if self.job.counts is not None:
            metrics[self.job.counts.metric] = np.float32(max(counts))
        return metrics

    def memory(self) -> dict[int, dict[str, Any]]:  # noqa: D102
        return {pp_rank: store.memory() for pp_rank, store in self.stores.items()}

    def mean_loss(self, batch: Any) -> tuple[float, float]:  # noqa: D102
        loss, targets, _ = self.numbers(batch)
        return loss, targets

    def numbers(self, batch: Any, loss: Any = None) -> tuple[float, float, Any]:
        """Return the mean loss of a batch, its weight and auxiliary numbers.

        Raises:
            UserError: Another loss than the job's is asked for.
        """
        if loss is not None:
            accepted = "the trainer's own in a pipeline, whose stages are cut from it; trainer.model computes others"
            raise UserError("evaluate: loss", getattr(loss, "__name__", type(loss).__name__), accepted)
        with self._started(batch, train=False) as (pipe, microbatches):
            for pp_rank, rank in pipe.ranks.items():
                rank.begin(self.stores[pp_rank].weights, microbatches, None, train=False)
            orders = {pp_rank: forward_only(self.job.shape, pp_rank) for pp_rank in pipe.ranks}
            pipe.executor.run(orders, self.steps_done, train=False)
            self._links.status.now(running="the agreement on the loss")
            totals = {
                pp_rank: (float(rank.loss), rank.targets, *rank.numbers()) for pp_rank, rank in pipe.ranks.items()
            }
            means, targets, *further = zip(*self._links.sync.gathered(totals), strict=True)
            return sum(means), sum(targets), self.job.aux([sum(values) for values in further])

    def finite(self) -> bool:  # noqa: D102
        return all(store.finite() for store in self.stores.values())

    def state(self) -> State:  # noqa: D102
        return self._states.saved()

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        return without_padding(global_shapes(self.job), self.job.padding)

    def load(self, read: Callable[[State], State], should_load: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns; calls `read` once per rank.

        Where a batch has to show the stages first, `read` is called then.
        """
        if self._placed is None:
            self._pending.append((read, should_load))
            return
        self._placed.load(read, should_load)
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
        return self.job.lines(self._channel)

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

    def _prepare(self, batch: Any, *, train: bool = True) -> tuple[build.CompiledPipeline, list[Any]]:
        if self._half_done:
            self._recover()
        self.job.settle(batch, train=train)
        if self._placed is None:
            self._place()
        form = self.job.form_of(batch)
        pipe = self._pipes.pop(form, None)
        if pipe is None:
            while len(self._pipes) >= _SHAPES:
                self._pipes.pop(next(iter(self._pipes))).free()
            pipe = self._make_pipe(batch)
        self._pipes[form] = pipe
        return pipe, self.job.microbatches(batch)

    def _close_pipes(self) -> None:
        for pipe in self._pipes.values():
            pipe.close()
        self._pipes.clear()

    def _make_pipe(self, batch: Any) -> build.CompiledPipeline:
        status = self._links.status
        status.now("compiling")
        try:
            # A stage may take minutes to compile: tell the heartbeat that this process is alive.
            ranks = self.job.compile(batch, self._states, status.now)
            return build.CompiledPipeline(ranks, self.job.shape, self._links, self._channel)
        finally:
            status.now("between steps")

    @contextlib.contextmanager
    def _started(self, batch: Any, *, train: bool = True) -> Iterator[tuple[build.CompiledPipeline, list[Any]]]:
        prepared = self._prepare(batch, train=train)
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

    def _dispatcher(self, pp_rank: int, pipe: build.CompiledPipeline) -> OrderedDispatcher:
        shape, policy = self.job.shape, self.job.policy
        if (leader := self._links.leader) is not None and not leader.leads:
            return OrderedDispatcher(shape, pp_rank)
        room = pipe.room.get(pp_rank, 0)  # unknown, hence 0, until the first step has shown how much memory is free
        return dispatcher_of(shape, pp_rank, policy.within(shape, room) if isinstance(policy, ByArrival) else policy)
