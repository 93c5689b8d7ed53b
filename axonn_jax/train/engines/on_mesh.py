"""Programs of a step's gradients on one 4D mesh: their layouts and their results."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.memory.precision import FULL, Precisions
from axonn_jax.memory.zero import split_over_replicas
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.settings import MemoryConfig
from axonn_jax.tensor.params import Params, Specs, SplitModule

BATCH_SPEC = P(None, BATCH_AXES)
"""Layout of a step's tokens [microbatches, sequences, seq + 1]."""


class StepResults(NamedTuple):
    """Results of a global batch, before an update."""

    grads: Params
    loss: jax.Array
    norm: jax.Array
    """Global norm of the gradients, not times the loss scale."""
    metrics: dict[str, Any]
    """Further numbers by name, such as a model's `Loads` gives."""
    carried: Mapping[str, jax.Array] = MappingProxyType({})
    """State of the model that the step has changed, and that is no parameter."""


@dataclass(frozen=True)
class OnMesh(ABC):
    """Program of a step's gradients for a model on one 4D mesh, with the layouts that follow."""

    parts: SplitModule
    grid: Grid
    precisions: Precisions = FULL
    memory: MemoryConfig = MemoryConfig()  # noqa: RUF009 (frozen)
    zero: bool = field(default=False, kw_only=True)
    """True if gradients are scattered over `data` (ZeRO-1), each device then having a part of most."""
    ordered: bool = field(default=False, kw_only=True)
    """True if the order of a microbatch's computation is found here (`tensor.overlap.reorder`) and not left to XLA."""
    stacked: Collection[str] = field(default=(), kw_only=True)
    """Names of the parameters that stack all layers, with the layers' dim in front."""
    forms: PrunedLayout | None = field(default=None, kw_only=True)
    """Layout of the pruned parameters, whose gradients are those of their kept values."""
    carried: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict, kw_only=True)
    """Shapes of the model's state that is no parameter and that steps change, such as statistics of a BatchNorm."""

    @abstractmethod
    def results(
        self, params: Any, carried: Any, batch: Any, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the results of a batch as `Batches.shard` makes it, with gradients times `scale`."""

    @abstractmethod
    def evaluate(self, params: Any, carried: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch, as Flax's evaluation mode has it, and the weight of that mean."""

    def shardings(self) -> dict[str, NamedSharding]:
        """The layout of every parameter on the mesh."""
        return {name: NamedSharding(self.grid.mesh, spec) for name, spec in self.parts.specs.items()}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of gradients, masters and optimizer state."""
        dense = {name: p.shape for name, p in self.parts.trained.items()}
        return dense if self.forms is None else dense | dict(self.forms.value_shapes)

    @property
    def grad_specs(self) -> Specs:
        """Layout of every gradient, its parameter's, or with ZeRO split over `data` too; of masters and optimizer state
        with it."""
        if self.zero:
            return split_over_replicas(self.state_shapes, self.parts.specs, self.grid.mesh, self.stacked)
        return {name: self.parts.specs[name] for name in self.parts.trained}

    def check_traced(self, jaxpr: Any) -> None:  # noqa: B027 (not abstract: nothing to check)
        """Raise ``UserError`` for a step that XLA would compile into wrong results; none where all collectives are the
        package's own."""

    def batch_sharding(self) -> NamedSharding:
        """The layout of a step's tokens on the mesh."""
        return NamedSharding(self.grid.mesh, BATCH_SPEC)
