"""State of a pipelined model: what this process holds, by rank of the pipe, and as checkpoints know it by name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonn_jax.checkpoint.naming import State, flatten, unflatten, unflatten_scale
from axonn_jax.memory.host_arrays import joined
from axonn_jax.memory.precision import HostScale, on_mesh
from axonn_jax.memory.report import all_finite, counted, report
from axonn_jax.pipeline.stage_state import StageState, StateOptions
from axonn_jax.tensor.params import Params, SplitModule


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
        holders = Counter(name for held in names for name in held)
        shared = {name for name, count in holders.items() if count > 1}
        self.stages = {
            pp_rank: StageState(parts, names[pp_rank], shared & set(names[pp_rank]), mesh, keeping, model)
            for pp_rank, mesh in meshes.items()
        }

    @property
    def params(self) -> dict[int, Params]:
        """The float32 weights by rank and name."""
        return {pp_rank: joined(stage.masters) for pp_rank, stage in self.stages.items()}

    @property
    def opt_state(self) -> dict[int, Any]:
        """The optimizer state by rank."""
        return {pp_rank: joined(stage.opt_state) for pp_rank, stage in self.stages.items()}

    def finite(self) -> bool:
        """Whether weights and optimizer state of the ranks here are finite numbers."""
        return all(all_finite(stage.state) for stage in self.stages.values())

    def by_rank(self) -> dict[int, State]:
        """All that training changes, by rank and name; what is offloaded in parts is a `CutArray`."""
        return {
            pp_rank: flatten(stage.masters, stage.opt_state, on_mesh(self._scale.state, stage.mesh))
            for pp_rank, stage in self.stages.items()
        }

    def saved(self) -> State:
        """What this process saves: of what several ranks hold, the first rank's, wherever that is."""
        elsewhere = {name for pp_rank in range(min(self.stages)) for name in self._abstract(pp_rank)}
        last_first = sorted(self.by_rank().items(), reverse=True)
        merged = {name: value for _, state in last_first for name, value in state.items()}
        return {name: value for name, value in merged.items() if name not in elsewhere}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's state, of all ranks."""
        ranks = range(len(self._names))
        return {name: value.shape for pp_rank in ranks for name, value in self._abstract(pp_rank).items()}

    def put(self, states: Mapping[int, State]) -> None:
        """Takes over what `by_rank` gave, here or on another grid."""
        for pp_rank, state in states.items():
            params = self._params(pp_rank)
            self.stages[pp_rank].restore(*unflatten(state, params, jax.eval_shape(self._optimizer.init, params)))
            self._scale.restore(unflatten_scale(state, self._scale.state))

    def memory(self) -> dict[int, dict[str, Any]]:
        """Where the bytes of one device of each rank are; see `memory.report.report`."""
        reports = {}
        for pp_rank, stage in self.stages.items():
            arrays = counted(jax.tree.leaves(stage.state), stage.mesh.local_devices[0])
            reports[pp_rank] = report(stage.bytes, arrays, stage.mesh)
        return reports

    def _abstract(self, pp_rank: int) -> State:
        params = self._params(pp_rank)
        return flatten(params, jax.eval_shape(self._optimizer.init, params), self._scale.state)

    def _params(self, pp_rank: int) -> Any:
        sizes = {name: self._parts.params[name].shape for name in self._names[pp_rank]}
        return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
