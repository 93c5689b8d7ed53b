"""What this process holds of a pipelined model, place by place, and as state that checkpoints know by name."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from axonn_jax.memory.account import StateBytes, counted, report
from axonn_jax.memory.finite import all_finite
from axonn_jax.memory.held import whole
from axonn_jax.memory.scale import HostScale, on_mesh
from axonn_jax.pipeline.holding import Holding, Keeping
from axonn_jax.state.names import State, flatten, unflatten, unflatten_scale
from axonn_jax.tensor.params import Params, Parts


class Places:
    """The holdings of the places here; `names` are the parameters of every place of the pipe."""

    def __init__(
        self,
        parts: Parts,
        names: Sequence[Sequence[str]],
        meshes: Mapping[int, Mesh],
        keeping: Keeping,
        model: Any,
        scale: HostScale,
    ):
        self._parts, self._names, self._optimizer, self._scale = parts, names, keeping.optimizer, scale
        holders = Counter(name for held in names for name in held)
        shared = {name for name, count in holders.items() if count > 1}
        self.holdings = {
            place: Holding(parts, names[place], shared & set(names[place]), mesh, keeping, model)
            for place, mesh in meshes.items()
        }

    @property
    def params(self) -> dict[int, Params]:
        """The float32 weights by place and name."""
        return {place: whole(holding.masters) for place, holding in self.holdings.items()}

    @property
    def opt_state(self) -> dict[int, Any]:
        """The optimizer state by place."""
        return {place: whole(holding.opt_state) for place, holding in self.holdings.items()}

    def finite(self) -> bool:
        """Whether weights and optimizer state of the places here are finite numbers."""
        return all(all_finite(holding.state) for holding in self.holdings.values())

    def state(self) -> dict[int, State]:
        """All that training changes, by place and name; offloaded arrays that are in parts are `Held`."""
        return {
            place: flatten(holding.masters, holding.opt_state, on_mesh(self._scale.state, holding.mesh))
            for place, holding in self.holdings.items()
        }

    def elsewhere(self) -> frozenset[str]:
        """Names of arrays here that another process's place saves: what an earlier place holds too."""
        return frozenset(name for place in range(min(self.holdings)) for name in self._abstract(place))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of the whole model's state, of all places."""
        places = range(len(self._names))
        return {name: value.shape for place in places for name, value in self._abstract(place).items()}

    def put(self, states: Mapping[int, State]) -> None:
        """Takes over what `state` gave, here or on another grid."""
        for place, state in states.items():
            params = self._params(place)
            self.holdings[place].restore(*unflatten(state, params, jax.eval_shape(self._optimizer.init, params)))
            self._scale.restore(unflatten_scale(state, self._scale.state))

    def planned_memory(self) -> dict[int, StateBytes]:
        """The bytes of model state of one device by formula, by place."""
        return {place: holding.bytes for place, holding in self.holdings.items()}

    def memory(self) -> dict[int, dict[str, Any]]:
        """Where the bytes of one device of each place are; see `memory.account.report`."""
        found = {}
        for place, holding in self.holdings.items():
            arrays = counted(jax.tree.leaves(holding.state), holding.mesh.local_devices[0])
            found[place] = report(holding.bytes, arrays, holding.mesh)
        return found

    def _abstract(self, place: int) -> State:
        params = self._params(place)
        return flatten(params, jax.eval_shape(self._optimizer.init, params), self._scale.state)

    def _params(self, place: int) -> Any:
        sizes = {name: self._parts.params[name].shape for name in self._names[place]}
        return {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in sizes.items()}
