"""State of a pipelined model in this process: a parameter store for each local rank of the pipe."""

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import reduce
from operator import add
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.checkpoint.naming import CARRIED, State
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.memory.offload import OffloadedOptimizer
from axonn_jax.core.memory.optimizer_state import DeviceOptimizer
from axonn_jax.core.memory.optimizer_traits import check_separable
from axonn_jax.core.memory.precision import HostScale, on_mesh
from axonn_jax.core.memory.zero import split_over_replicas
from axonn_jax.core.models.stacked import unstacked
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.pruned.prune import Pruner, prunable
from axonn_jax.core.state.param_store import ParamPlan, ParamStore, Read, state_shapes
from axonn_jax.core.tensor.params import Params, Specs, SplitModule, place_params, split_module
from axonn_jax.pipe.job import PipelineJob
from axonn_jax.pipe.stages import build


class PipelineState:
    """State of this process's ranks of the pipe.

    Args:
        job: The model and its settings.
        names: Parameters of every rank of the pipe. Those of several ranks are initialized and updated by separate
            programs, the same on each of these ranks, so that their copies stay equal to the bit.
        progress: Called with a line of text before each bucket of an offloaded update.
    """

    def __init__(self, job: PipelineJob, names: Sequence[Sequence[str]], *, progress: Callable[[str], None]):
        parts, memory, prune, optimizer = job.parts, job.memory, job.prune, job.optimizer
        self._job, self._names, self._progress = job, names, progress
        pruned = pruned_names(job)
        self.scale = HostScale(scaled=job.precisions.scaled)
        replicated = build.shared(names)
        self.shared = {name: pp_ranks for name, pp_ranks in replicated.items() if name in parts.trained}
        """The ranks of each trained parameter that several ranks of the pipe hold."""
        self.stores: dict[int, ParamStore[ParamPlan]] = {}
        self.carried_by_rank: dict[int, Params] = {}
        """Model state that is no parameter and that steps change, [replicas, ...], by rank and name."""
        for pp_rank, mesh in job.grid.meshes.items():
            stage_params = {name: parts.params[name] for name in names[pp_rank]}
            stage = parts._replace(params=stage_params, specs={name: parts.specs[name] for name in stage_params})
            check_separable(optimizer, parts.trained, list(stage.trained))
            rank_replicated = stage_params.keys() & replicated.keys()
            self.stores[pp_rank] = ParamStore(
                job.place(stage.specs, mesh, rank_replicated),
                optimizer,
                self._build(stage, rank_replicated, mesh, split=memory.zero > 0 and job.grid.shape.replicas > 1),
                Pruner(prune, pruned, stage.specs, mesh) if prune.prunes else None,
                owned=job.owned,
                dtype=job.precisions.compute,
            )
            self.carried_by_rank[pp_rank] = job.place_state(pp_rank)

    def _build(
        self, stage: SplitModule, shared: Collection[str], mesh: Mesh, *, split: bool
    ) -> Callable[[PrunedLayout | None], ParamPlan]:
        sizes = {name: p.shape for name, p in stage.trained.items()}
        trained, memory = {name: stage.specs[name] for name in sizes}, self._job.memory

        def build(forms: PrunedLayout | None) -> ParamPlan:
            shapes = sizes if forms is None else sizes | forms.value_shapes
            specs = split_over_replicas(shapes, trained, mesh) if split else trained
            settings = (self._job.precisions, memory.bucket, forms)
            update = DeviceOptimizer(self._job.optimizer, mesh, shapes, trained, specs, *settings)
            # With adapters, all weights of a rank may be frozen, and there is nothing to offload.
            if memory.offload == "none" or not sizes:
                return ParamPlan(unstacked(stage), update)
            resident = memory.resident_bytes
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

    @property
    def carried(self) -> Params:
        """This process's model state that is no parameter, by name."""
        by_rank = sorted(self.carried_by_rank.items(), reverse=True)
        return {name: value[0] for _, state in by_rank for name, value in state.items()}

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
        elsewhere |= {CARRIED + name for pp_rank in range(min(self.stores)) for name in self._job.state_names(pp_rank)}
        merged |= {CARRIED + name: value for name, value in self.carried.items()}
        return {name: value for name, value in merged.items() if name not in elsewhere}

    def load(self, read: Read, should_load: Callable[[str], bool]) -> None:
        """Replace the arrays whose names pass `should_load` by those `read` returns; calls `read` once per rank."""
        scale = self.scale.state
        for store in self.stores.values():
            self.scale.restore(store.load(read, should_load, on_mesh(scale, store.mesh)))
        for pp_rank, state in self.carried_by_rank.items():
            layout = NamedSharding(self.stores[pp_rank].mesh, P())
            forms: State = {
                CARRIED + name: jax.ShapeDtypeStruct(value.shape[1:], value.dtype, sharding=layout)  # type: ignore[misc]
                for name, value in state.items()
                if should_load(CARRIED + name)
            }
            for name, value in (read(forms) if forms else {}).items():
                old = state[name.removeprefix(CARRIED)]
                state[name.removeprefix(CARRIED)] = jax.device_put(jnp.broadcast_to(value, old.shape), old.sharding)

    def _shapes(self, pp_rank: int) -> State:
        return _shapes(self._job, self._names[pp_rank])


def pruned_names(job: PipelineJob) -> Sequence[str]:
    """Return the names of the pruned parameters of the full model."""
    if not job.prune.prunes:
        return ()
    abstract: Any = job.parts.merge(job.parts.params)
    return prunable(job.parts, abstract.layer_list)


def global_shapes(job: PipelineJob) -> dict[str, tuple[int, ...]]:
    """Return global shapes of the full model's state, over all ranks, by checkpoint name."""
    arrays = _shapes(job, job.parts.params) | {CARRIED + name: value for name, value in job.state.items()}
    return {name: value.shape for name, value in arrays.items()}


def _shapes(job: PipelineJob, names: Iterable[str]) -> State:
    trained, scale = job.parts.trained, HostScale(scaled=job.precisions.scaled).state
    sizes = {name: trained[name].shape for name in names if name in trained}
    params: Any = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
    return state_shapes(params, job.optimizer, scale, [n for n in pruned_names(job) if n in sizes])


def place_module(
    model: nnx.Module | Callable[[], nnx.Module], specs: Specs, mesh: Mesh, shared: Collection[str]
) -> Params:
    """Return the parameters of a rank on its mesh.

    Args:
        model: The module, or a function that builds it, of which only these parameters are allocated.
        specs: Layouts by name.
        mesh: Mesh of the rank.
        shared: Names of the parameters that other ranks hold too.
    """
    if isinstance(model, nnx.Module):
        params = split_module(model).params
        return place_params({name: params[name] for name in specs}, specs, mesh)
    return create_params(lambda: split_module(model()).params, specs, mesh, shared)


def create_params(make: Callable[[], Params], specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    """Return some of the parameters that a function makes, of which only these are allocated, on a mesh.

    Args:
        make: Function that makes all parameters by name.
        specs: Layouts of the ones to return.
        mesh: The mesh.
        shared: Names of the parameters that other ranks of the pipe hold too.
    """
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}

    # Under jit, so that only this rank's shards are ever allocated.
    def create(layouts: dict[str, NamedSharding]) -> Params:
        def stage_params() -> Params:
            params = make()
            return {name: params[name] for name in layouts}  # XLA drops unused results

        return jax.jit(stage_params, out_shardings=layouts)()  # type: ignore[no-any-return]

    # Replicated parameters get a program with no other results: on all their ranks it is the same, to the bit.
    params = create({name: layout for name, layout in shardings.items() if name not in shared})
    params |= create({name: shardings[name] for name in sorted(shared)}) if shared else {}
    return {name: params[name] for name in shardings}


def sums_of_ranks(
    name: str, grads: dict[int, Params], exchange: Callable[..., Any], pp_ranks: tuple[int, ...]
) -> dict[int, jax.Array]:
    """Return the summed gradient of a parameter that several ranks hold, by this process's ranks.

    Args:
        name: The parameter.
        grads: Gradients by rank and name; the parameter's are taken out.
        exchange: Function from gradients by rank and the ranks to the gradients of all of them, by rank.
        pp_ranks: The ranks that hold the parameter.
    """
    local_grads = {pp_rank: grads[pp_rank].pop(name) for pp_rank in pp_ranks if pp_rank in grads}
    return {pp_rank: _sum(values) for pp_rank, values in exchange(local_grads, pp_ranks).items()}


@jax.jit
def _sum(values: list[jax.Array]) -> jax.Array:
    # Bitwise equal on all ranks, whose copies must not diverge, since all add in the order of the ranks.
    return reduce(add, values)
