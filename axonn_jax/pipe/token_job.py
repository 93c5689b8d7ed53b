"""Job of a pipelined `models.protocol.Model` on token ids."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import optax
from flax import nnx

from axonn_jax.core.engines.engine import TokenBatches
from axonn_jax.core.engines.optimizer import check_optimizer
from axonn_jax.core.engines.step import masters
from axonn_jax.core.grid import Grid
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.models.protocol import check_model
from axonn_jax.core.models.vocabulary import fit_vocabulary, padding_of
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig
from axonn_jax.core.state.published_matrices import published_matrices
from axonn_jax.core.tensor.params import Params, abstract_module, shapes_of, split_module
from axonn_jax.pipe.engine_state import place_module
from axonn_jax.pipe.job import PipelineJob, RankStates
from axonn_jax.pipe.schedule.policies import may_split, policy_of
from axonn_jax.pipe.stages import build
from axonn_jax.pipe.stages.cut import check_pipeline
from axonn_jax.pipe.stages.rank_worker import CompiledRanks
from axonn_jax.pipe.stages.trace import StepShape


@dataclass
class TokenJob(PipelineJob):
    """A `models.protocol.Model` in a pipeline; see `PipelineJob`."""

    segments: Sequence[Segment] = ()
    ranges: Sequence[range] = ()
    """Segments of every virtual stage."""
    seq_len: int | None = None
    _names: list[tuple[str, ...]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Plan for a tiny batch: the assignment of parameters to stages does not depend on the batch.
        plan = self._plan(self.grid.shape.batch_shards, (self.seq_len or 2) + 1)
        self._names = build.names_by_pp_rank(plan, self.shape)

    @property
    def names(self) -> Sequence[tuple[str, ...]]:  # noqa: D102
        return self._names

    def settle(self, batch: np.ndarray, *, train: bool) -> None:
        """Do nothing: the model declares its segments."""

    def form_of(self, batch: np.ndarray) -> tuple[int, int]:  # noqa: D102
        return self.batches.global_rows(batch) // self.batches.microbatches, batch.shape[1]  # type: ignore[attr-defined]

    def microbatches(self, batch: np.ndarray) -> list[Any]:  # noqa: D102
        return list(batch.reshape(self.batches.microbatches, -1, batch.shape[1]))

    def compile(self, batch: np.ndarray, state: RankStates, alive: Callable[[], None]) -> CompiledRanks:  # noqa: D102
        forms = {pp_rank: store.forms for pp_rank, store in state.stores.items()}
        plan = self._plan(*self.form_of(batch), forms)
        grad_specs = {pp_rank: store.placement.state_specs for pp_rank, store in state.stores.items()}
        settings = (grad_specs, state.shared, self.policy, self.memory.bucket, alive)
        return build.compile_ranks(plan, self.grid, self.shape, *settings)

    def model(self, params: Params, carried: Params) -> Any:  # noqa: D102
        return self.parts.merge(params)

    def lines(self, channel: str) -> list[str]:  # noqa: D102
        return build.describe(self.segments, self.ranges, self.shape, self.pipeline.policy, channel)

    def _plan(self, rows: int, width: int, forms: Any = {}) -> build.Plan:  # noqa: B006
        dtypes, sizes = self.precisions, (rows, width, self.batches.microbatches)
        work = StepShape(*sizes, dtypes.compute, self.memory.activations, dtypes.grad_dtype)
        return build.plan(self.parts, self.grid, self.shape, self.ranges, work, self.draws, forms)


def token_job(
    model: nnx.Module | Callable[[], nnx.Module],
    optimizer: optax.GradientTransformation,
    grid: Grid,
    *,
    microbatches: int,
    memory: MemoryConfig,
    pipeline: PipelineConfig,
    prune: PruneConfig = PruneConfig(),  # noqa: B008 (frozen)
) -> TokenJob:
    """Check a `models.protocol.Model`, or a function that builds one, and return its job; nothing is compiled yet.

    Raises:
        UserError: Model, optimizer and settings do not fit together.
    """

    def fitted() -> nnx.Module:
        module: Any = check_model(model if isinstance(model, nnx.Module) else model())
        return fit_vocabulary(module, grid.shape)

    module = fitted() if isinstance(model, nnx.Module) else None
    abstract, source = (abstract_module(fitted), fitted) if module is None else (module, module)
    checked, split = check_model(abstract), split_module(abstract)
    checked.check_grid(grid.shape)
    segments = list(checked.segments)
    shape, ranges = check_pipeline(grid.shape.pipe, microbatches, pipeline, segments)
    policy = policy_of(pipeline.policy, pipeline.in_flight, may_split(pipeline.split_backward, memory.activations))
    check_optimizer(optimizer, checked, split, memory, prune)
    optimizer = published_matrices(optimizer, abstract, split.trained)
    if counts := checked.counts(split.loads):
        optimizer = counts.optimizer(optimizer)
    precisions = replace(masters(memory, grid, separate=prune.prunes)[2], wide=frozenset(split.roles))
    return TokenJob(
        grid,
        optimizer,
        TokenBatches(grid, microbatches, packed=checked.packed),
        shapes_of(split, precisions.compute if split.adapters else precisions.weights),
        partial(place_module, source),
        owned=module is None,
        precisions=precisions,
        policy=policy,
        shape=shape,
        memory=memory,
        pipeline=pipeline,
        prune=prune,
        draws=checked.drops_out,
        padding=padding_of(abstract),
        counts=counts,
        segments=segments,
        ranges=ranges,
        seq_len=checked.seq_len,
    )
