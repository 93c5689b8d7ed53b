"""State of a pipelined model in this process: by rank of the pipe, and by the names of checkpoints."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonn_jax.checkpoint.naming import MASKS, State, flatten, unflatten, unflatten_scale
from axonn_jax.memory.host_arrays import joined
from axonn_jax.memory.precision import HostScale, on_mesh
from axonn_jax.memory.report import all_finite, counted, report
from axonn_jax.pipeline.stage_state import StageState, StateOptions
from axonn_jax.pruned.prune import prunable
from axonn_jax.tensor.params import Params, SplitModule
from axonn_jax.train.engines.engine import read_anew
from axonn_jax.train.engines.pruned import dense_forms, mask_forms, read_pruned


class PipelineState:
    """The state of the pipe's ranks here; `names` are the parameters of every rank of the pipe."""

    def __init__(
        self,
        parts: SplitModule,
        names: Sequence[Sequence[str]],
        meshes: Mapping[int, Mesh],
        keeping: StateOptions,
        model: Any,
        scale: HostScale,
    ):
        self._parts, self._names, self._optimizer, self._scale = parts, names, keeping.optimizer, scale
        self._prunable = prunable(parts, keeping.layers) if keeping.prune.prunes else []
        holders = Counter(name for held in names for name in held)
        shared = {name for name, count in holders.items() if count > 1}
        self.stages = {
            pp_rank: StageState(parts, names[pp_rank], shared & set(names[pp_rank]), mesh, keeping, model)
            for pp_rank, mesh in meshes.items()
        }

    @property
    def params(self) -> dict[int, Params]:
        """The float32 weights by rank and name."""
        return {pp_rank: joined(self._forms(stage)[0]) for pp_rank, stage in self.stages.items()}

    @property
    def opt_state(self) -> dict[int, Any]:
        """The optimizer state by rank."""
        return {pp_rank: joined(self._forms(stage)[1]) for pp_rank, stage in self.stages.items()}

    def finite(self) -> bool:
        """True if weights and optimizer state of the ranks here are finite numbers."""
        return all(all_finite(stage.state) for stage in self.stages.values())

    def by_rank(self) -> dict[int, State]:
        """Return the state that training changes, by rank and name; an array offloaded in parts is a `CutArray`."""
        return {
            pp_rank: flatten(*self._forms(stage), on_mesh(self._scale.state, stage.mesh)) | self._masks(stage)
            for pp_rank, stage in self.stages.items()
        }

    def _forms(self, stage: StageState) -> tuple[Params, Any]:
        state = (stage.masters, stage.opt_state)
        return state if stage.layout is None else dense_forms(stage.layout, stage.state.positions, state)

    def _masks(self, stage: StageState) -> State:
        if stage.layout is None:
            return {}
        return {MASKS + name: mask for name, mask in mask_forms(stage.layout, stage.state.positions).items()}

    def saved(self) -> State:
        """State that this process saves: an array of several ranks is saved by the first of them, wherever that is."""
        elsewhere = {name for pp_rank in range(min(self.stages)) for name in self._abstract(pp_rank)}
        last_first = sorted(self.by_rank().items(), reverse=True)
        merged = {name: value for _, state in last_first for name, value in state.items()}
        return {name: value for name, value in merged.items() if name not in elsewhere}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's state, of all ranks."""
        ranks = range(len(self._names))
        return {name: value.shape for pp_rank in ranks for name, value in self._abstract(pp_rank).items()}

    def load(self, read: Callable[[State], State], wanted: Callable[[str], bool]) -> None:
        """Replace the wanted arrays by those that `read` makes for their shapes, types and layouts; a call a rank."""
        states = self.by_rank()
        for pp_rank, stage in self.stages.items():
            state, kept = states.pop(pp_rank), None
            if stage.layout is None:
                state = read_anew(state, read, wanted)
            else:
                state, kept = read_pruned(state, read, wanted, stage.masks_of, stage.kept)
            params = self._params(pp_rank)
            own = unflatten(state, params, jax.eval_shape(self._optimizer.init, params))
            stage.restore(*own, kept)
            self._scale.restore(unflatten_scale(state, self._scale.state))

    def memory(self) -> dict[int, dict[str, Any]]:
        """Bytes of one device of each rank; see `memory.report.report`."""
        reports = {}
        for pp_rank, stage in self.stages.items():
            arrays = counted(jax.tree.leaves(stage.state), stage.mesh.local_devices[0])
            reports[pp_rank] = report(stage.bytes, arrays, stage.mesh)
        return reports

    def _abstract(self, pp_rank: int) -> State:
        params = self._params(pp_rank)
        masks = [name for name in self._prunable if name in params]
        state = flatten(params, jax.eval_shape(self._optimizer.init, params), self._scale.state)
        return state | {MASKS + name: params[name] for name in masks}

    def _params(self, pp_rank: int) -> Any:
        sizes = {name: self._parts.params[name].shape for name in self._names[pp_rank]}
        return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
