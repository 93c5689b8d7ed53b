"""State of a pipelined model in this process: a parameter store for each local rank of the pipe."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axonn_jax.core.checkpoint.naming import State
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.memory.offload import OffloadedOptimizer
from axonn_jax.core.memory.optimizer_state import DeviceOptimizer
from axonn_jax.core.memory.optimizer_traits import check_separable
from axonn_jax.core.memory.precision import HostScale, Precisions, on_mesh
from axonn_jax.core.memory.zero import split_over_replicas
from axonn_jax.core.models.stacked import unstacked
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.prune import Pruner, prunable
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.state.param_store import ParamPlan, ParamStore, Read, state_shapes
from axonn_jax.core.tensor.params import Params, Specs, SplitModule, split_module
from axonn_jax.pipe.stages import build


class PipelineState:
    """State of this process's ranks of the pipe.

    Args:
        parts: The full model, with abstract parameters.
        model: The model, or a function that builds it, of which only the local ranks' parameters are allocated.
        names: Parameters of every rank of the pipe. Those of several ranks are initialized and updated by separate
            programs, the same on each of these ranks, so that their copies stay equal to the bit.
        grid: Grid of the run.
        optimizer: Optimizer for parameters under the model's names.
        precisions: Dtypes of the run.
        memory: Table [memory].
        prune: Table [prune].
        progress: Called with a line of text before each bucket of an offloaded update.
    """

    def __init__(
        self,
        parts: SplitModule,
        model: nnx.Module | Callable[[], nnx.Module],
        names: Sequence[Sequence[str]],
        grid: Grid,
        optimizer: optax.GradientTransformation,
        precisions: Precisions,
        memory: MemoryConfig,
        prune: PruneConfig,
        *,
        progress: Callable[[str], None],
    ):
        self._parts, self._names, self._optimizer, self._precisions = parts, names, optimizer, precisions
        self._memory, self._progress = memory, progress
        abstract: Any = parts.merge(parts.params)
        self._pruned = prunable(parts, abstract.layer_list) if prune.prunes else []
        self.scale = HostScale(scaled=precisions.scaled)
        replicated = build.shared(names)
        self.shared = {name: pp_ranks for name, pp_ranks in replicated.items() if name in parts.trained}
        """The ranks of each trained parameter that two ranks of the pipe hold."""
        self.stores: dict[int, ParamStore[ParamPlan]] = {}
        for pp_rank, mesh in grid.meshes.items():
            stage_params = {name: parts.params[name] for name in names[pp_rank]}
            stage = parts._replace(params=stage_params, specs={name: parts.specs[name] for name in stage_params})
            check_separable(optimizer, parts.trained, list(stage.trained))
            rank_replicated = stage_params.keys() & replicated.keys()
            self.stores[pp_rank] = ParamStore(
                _place_params(model, stage.specs, mesh, rank_replicated),
                optimizer,
                self._build(stage, rank_replicated, mesh, split=memory.zero > 0 and grid.shape.replicas > 1),
                Pruner(prune, self._pruned, stage.specs, mesh) if prune.prunes else None,
                owned=not isinstance(model, nnx.Module),
                dtype=precisions.compute,
            )

    def _build(
        self, stage: SplitModule, shared: Collection[str], mesh: Mesh, *, split: bool
    ) -> Callable[[PrunedLayout | None], ParamPlan]:
        sizes = {name: p.shape for name, p in stage.trained.items()}
        trained = {name: stage.specs[name] for name in sizes}

        def build(forms: PrunedLayout | None) -> ParamPlan:
            shapes = sizes if forms is None else sizes | forms.value_shapes
            specs = split_over_replicas(shapes, trained, mesh) if split else trained
            settings = (self._precisions, self._memory.bucket, forms)
            update = DeviceOptimizer(self._optimizer, mesh, shapes, trained, specs, *settings)
            # With adapters, all weights of a rank may be frozen, and there is nothing to offload.
            if self._memory.offload == "none" or not sizes:
                return ParamPlan(unstacked(stage), update)
            resident = self._memory.resident_bytes
            offloaded = OffloadedOptimizer(update, resident=resident, shared=shared, progress=self._progress)
            return ParamPlan(unstacked(stage), offloaded)

        return build

    @property
    def params(self) -> Params:
        """Float32 and frozen weights by name; of a parameter at both ends of the pipe, the first rank's copy."""
        # Descending, so that the first rank's copy overwrites the last rank's.
        by_rank = sorted(self.stores.items(), reverse=True)
        weights = ({**store.masters, **store.frozen.per_layer} for _, store in by_rank)
        return {name: materialize(p) for params in weights for name, p in params.items()}

    @property
    def opt_state(self) -> dict[int, Any]:
        """Optimizer state by rank."""
        return {pp_rank: materialize(store.opt_state) for pp_rank, store in self.stores.items()}

    def by_rank(self) -> dict[int, State]:
        """Return the state that training changes, by rank and checkpoint name."""
        return {
            pp_rank: store.checkpoint_state(on_mesh(self.scale.state, store.mesh))
            for pp_rank, store in self.stores.items()
        }

    def saved(self) -> State:
        """Return the state that this process saves."""
        # An array of several ranks is saved by the first of them, which may be in another process.
        elsewhere = {name for pp_rank in range(min(self.stores)) for name in self._shapes(pp_rank)}
        last_first = sorted(self.by_rank().items(), reverse=True)
        merged = {name: value for _, state in last_first for name, value in state.items()}
        return {name: value for name, value in merged.items() if name not in elsewhere}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return global shapes of the full model's state, over all ranks."""
        ranks = range(len(self._names))
        return {name: value.shape for pp_rank in ranks for name, value in self._shapes(pp_rank).items()}

    def load(self, read: Read, should_load: Callable[[str], bool]) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns; calls `read` once per rank."""
        scale = self.scale.state
        for store in self.stores.values():
            self.scale.restore(store.load(read, should_load, on_mesh(scale, store.mesh)))

    def _shapes(self, pp_rank: int) -> State:
        trained = self._parts.trained
        sizes = {name: trained[name].shape for name in self._names[pp_rank] if name in trained}
        params: Any = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
        return state_shapes(params, self._optimizer, self.scale.state, [n for n in self._pruned if n in sizes])


def _place_params(model: Any, specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    if isinstance(model, nnx.Module):
        params = split_module(model).params
        return jax.device_put({name: params[name] for name in shardings}, shardings)

    # Under jit, so that only this rank's shards are ever allocated.
    def create(layouts: dict[str, NamedSharding]) -> Params:
        def stage_params() -> Params:
            params = split_module(model()).params
            return {name: params[name] for name in layouts}  # XLA drops unused results

        return jax.jit(stage_params, out_shardings=layouts)()  # type: ignore[no-any-return]

    # Replicated parameters get a program with no other results: on all their ranks it is the same, to the bit.
    params = create({name: layout for name, layout in shardings.items() if name not in shared})
    params |= create({name: shardings[name] for name in sorted(shared)}) if shared else {}
    return {name: params[name] for name in shardings}
