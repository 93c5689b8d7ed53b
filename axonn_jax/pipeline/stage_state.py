"""State of a pipe rank: parameters, their optimizer state, and the update."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import REPLICA_AXES
from axonn_jax.memory.offload import OffloadedOptimizer
from axonn_jax.memory.optimizer_state import DeviceOptimizer
from axonn_jax.memory.precision import Precisions
from axonn_jax.memory.report import StateBytes
from axonn_jax.memory.zero import split_over_replicas
from axonn_jax.pipeline.stage import replicated
from axonn_jax.pipeline.trace import POSITIONS
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.prune import KeptEntries, keep, make_masks, prunable
from axonn_jax.tensor.params import Params, Specs, SplitModule, split_module
from axonn_jax.tensor.specs import size_over


@dataclass(frozen=True)
class StateOptions:
    """Options of every pipe rank's state."""

    optimizer: optax.GradientTransformation
    precisions: Precisions
    bucket: int
    """Elements that are communicated together."""
    offload: bool
    """True if optimizer state is in host memory."""
    split: bool
    """True if masters and optimizer state are split over `data`."""
    prune: PruneConfig = PruneConfig()  # noqa: RUF009 (frozen)
    layers: str = ""
    """Prefix of the names of layers' parameters, some of which may be pruned."""
    progress: Callable[[str], None] = lambda what: None
    """Callback with a line of text for each step of a long update."""


class StageState:
    """The parameters of a pipe rank and their optimizer state.

    `parts` is the whole model with abstract parameters, `names` those of the rank, and `shared` those that other ranks
    have too; these have programs of their own, the same on all ranks, so that copies stay equal to the bit. `model` is
    the model, or a function that makes it; then only these parameters are made.
    """

    def __init__(
        self,
        parts: SplitModule,
        names: Sequence[str],
        shared: Collection[str],
        mesh: Mesh,
        keeping: StateOptions,
        model: Any,
    ):
        self.mesh, self._keeping, self._shared = mesh, keeping, shared
        self._prunable = prunable(parts, keeping.layers)
        self.specs = {name: parts.specs[name] for name in names}
        self._sizes = {name: parts.params[name].shape for name in names}
        params, kept, owned = self._made(model, shared), None, not isinstance(model, nnx.Module)
        if keeping.prune.prunes:
            kept = self.kept(self.masks_of(params))
            params = kept.compressed(params, used_up=owned)
        self._begin(kept)
        self.state = self._update.start(params, kept.positions if kept else {}, owned=owned)
        self._apply = self._update.program(self.state)

    def _begin(self, kept: KeptEntries | None) -> None:
        """Make the update of parameters of which these entries are kept; nothing is compiled."""
        self.layout = kept and kept.layout
        sizes = self._sizes if kept is None else self._sizes | kept.layout.value_shapes
        keeping, mesh = self._keeping, self.mesh
        self.state_specs: Specs = split_over_replicas(sizes, self.specs, mesh) if keeping.split else self.specs
        layouts, precisions = (self.specs, self.state_specs), keeping.precisions
        update = DeviceOptimizer(keeping.optimizer, mesh, sizes, *layouts, precisions, keeping.bucket, self.layout)
        self._update: DeviceOptimizer | OffloadedOptimizer = update
        if keeping.offload:
            self._update = OffloadedOptimizer(update, shared=self._shared, progress=keeping.progress)

    def masks_of(self, weights: Params) -> Params:
        """Masks of the entries that are to be kept of dense weights."""
        own = {name: weights[name] for name in self._prunable if name in weights}
        return make_masks(self._keeping.prune, own, self._prunable)

    def kept(self, masks: Params) -> KeptEntries:
        """Return the layout and positions of the entries that masks keep."""
        return keep(masks, self.specs, self.mesh, multiple=size_over(self.mesh, REPLICA_AXES))

    @property
    def weights(self) -> Params:
        """The weights that the stages read."""
        return self.state.weights

    @property
    def given(self) -> Params:
        """Inputs of the stages: weights, and positions of pruned ones."""
        return self.weights | {POSITIONS + name: value for name, value in self.state.positions.items()}

    @property
    def masters(self) -> Params:
        """The float32 weights by name; with offload in host memory, `CutArray` where they are cut."""
        return self._update.masters(self.state)

    @property
    def bytes(self) -> StateBytes:
        """Bytes of one device, by formula."""
        return self._update.bytes()

    @property
    def opt_state(self) -> Any:
        """Return the optax state; with offload its arrays are in host memory, and `CutArray` where cut."""
        return self._update.opt_state(self.state)

    def restore(self, masters: Params, optimizer: Any, kept: KeptEntries | None = None) -> None:
        """Replace weights and optimizer state, in the form of `masters` and `opt_state`, and use them up."""
        if kept is not None:
            self._begin(kept)
        self.state = self._update.restored(masters, optimizer, kept.positions if kept else {}, owned=True)
        if kept is not None:
            self._apply = self._update.program(self.state)

    def apply(self, grads: Params, factor: float, loss: float) -> jax.Array:
        """Start an update with `factor` times the gradients; return an array that is ready when it has run."""
        numbers = (replicated(np.float32(number), NamedSharding(self.mesh, P())) for number in (factor, loss))
        self.state, done = self._apply(self.state, grads, *numbers)
        return done

    def _made(self, model: Any, shared: Collection[str]) -> Params:
        shardings = {name: NamedSharding(self.mesh, spec) for name, spec in self.specs.items()}
        if isinstance(model, nnx.Module):
            params = split_module(model).params
            return jax.device_put({name: params[name] for name in shardings}, shardings)

        def make(layouts: dict[str, NamedSharding]) -> Params:
            def chosen() -> Params:
                made = split_module(model()).params
                return {name: made[name] for name in layouts}  # XLA drops unused results

            return jax.jit(chosen, out_shardings=layouts)()  # type: ignore[no-any-return]

        made = make({name: layout for name, layout in shardings.items() if name not in shared})
        made |= make({name: shardings[name] for name in sorted(shared)}) if shared else {}
        return {name: made[name] for name in shardings}
