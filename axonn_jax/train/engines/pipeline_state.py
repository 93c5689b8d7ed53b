"""State of a pipelined model in this process: a store for each rank of the pipe, and the names of checkpoints."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonn_jax.checkpoint.naming import State
from axonn_jax.memory.host_arrays import joined
from axonn_jax.memory.precision import HostScale, on_mesh
from axonn_jax.pipeline.stage_state import StateOptions, stage_store
from axonn_jax.state.param_store import ParamStore, Read, state_shapes
from axonn_jax.tensor.params import Params, SplitModule


class PipelineState:
    """The state of the pipe's ranks here.

    `names` are the parameters of every rank of the pipe, `masked` those of all that may be held in another form.
    """

    def __init__(
        self,
        parts: SplitModule,
        names: Sequence[Sequence[str]],
        meshes: Mapping[int, Mesh],
        options: StateOptions,
        model: Any,
        scale: HostScale,
        masked: Collection[str],
    ):
        self._parts, self._names, self._optimizer, self._scale = parts, names, options.optimizer, scale
        self._masked = masked
        holders = Counter(name for held in names for name in held)
        shared = {name for name, count in holders.items() if count > 1}
        self.stores: dict[int, ParamStore] = {
            pp_rank: stage_store(parts, names[pp_rank], shared & set(names[pp_rank]), mesh, options, model)
            for pp_rank, mesh in meshes.items()
        }

    @property
    def params(self) -> Params:
        """The weights by name, float32 or frozen; of one held at both ends of the pipe the first copy."""
        by_rank = sorted(self.stores.items(), reverse=True)
        return {name: joined(p) for _, store in by_rank for name, p in {**store.masters, **store.frozen.own}.items()}

    @property
    def opt_state(self) -> dict[int, Any]:
        """The optimizer state by rank."""
        return {pp_rank: joined(store.opt_state) for pp_rank, store in self.stores.items()}

    def by_rank(self) -> dict[int, State]:
        """Return the state that training changes, by rank and name."""
        return {pp_rank: store.named(on_mesh(self._scale.state, store.mesh)) for pp_rank, store in self.stores.items()}

    def saved(self) -> State:
        """State that this process saves: an array of several ranks is saved by the first of them, wherever that is."""
        elsewhere = {name for pp_rank in range(min(self.stores)) for name in self._shapes(pp_rank)}
        last_first = sorted(self.by_rank().items(), reverse=True)
        merged = {name: value for _, state in last_first for name, value in state.items()}
        return {name: value for name, value in merged.items() if name not in elsewhere}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's state, of all ranks."""
        ranks = range(len(self._names))
        return {name: value.shape for pp_rank in ranks for name, value in self._shapes(pp_rank).items()}

    def load(self, read: Read, wanted: Callable[[str], bool]) -> None:
        """Replace the wanted arrays by those that `read` makes for their shapes, types and layouts; a call a rank."""
        scale = self._scale.state
        for store in self.stores.values():
            self._scale.restore(store.load(read, wanted, on_mesh(scale, store.mesh)))

    def _shapes(self, pp_rank: int) -> State:
        trained = self._parts.trained
        sizes = {name: trained[name].shape for name in self._names[pp_rank] if name in trained}
        params: Any = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
        masked = [name for name in self._masked if name in sizes]
        return state_shapes(params, self._optimizer, self._scale.state, masked)
