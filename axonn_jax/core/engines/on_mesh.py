"""Base class of a step's gradient programs on one 4D mesh, with their layouts and results."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Generic, NamedTuple, TypeVar

import jax
from jax.extend.core import Jaxpr
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.grid import BATCH_AXES, Grid
from axonn_jax.core.memory.precision import FULL, Precisions
from axonn_jax.core.memory.zero import split_over_replicas
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.tensor.params import Params, Specs, SplitModule
from axonn_jax.core.tensor.weight_gather import Weights

BATCH_SPEC = P(None, BATCH_AXES)
"""Layout of a step's tokens [microbatches, sequences, seq + 1]."""


Placed = TypeVar("Placed")
"""Global batch on the mesh, as `Batches.shard` returns it: token ids, or the arrays of a user's batch."""


class StepResults(NamedTuple):
    """Results of a global batch, before the update."""

    grads: Params
    loss: jax.Array
    norm: jax.Array
    """Global norm of the gradients, without the loss scale."""
    metrics: dict[str, object]
    """Further metrics by name, such as those of a model's `Loads`."""
    carried: Mapping[str, jax.Array] = MappingProxyType({})
    """Model state that the step has changed, such as BatchNorm statistics."""


@dataclass(frozen=True)
class OnMesh(ABC, Generic[Placed]):
    """Program of a step's gradients for a model on one 4D mesh, and the layouts it implies."""

    parts: SplitModule
    grid: Grid
    precisions: Precisions = FULL
    memory: MemoryConfig = MemoryConfig()  # noqa: RUF009 (frozen)
    zero: bool = field(default=False, kw_only=True)
    """True if gradients are scattered over `data` where a dim divides (ZeRO-1)."""
    ordered: bool = field(default=False, kw_only=True)
    """True if the package orders a microbatch's computation (`tensor.overlap.reorder`) instead of XLA."""
    stacked: Collection[str] = field(default=(), kw_only=True)
    """Names of the parameters that stack all layers along a leading dim."""
    forms: PrunedLayout | None = field(default=None, kw_only=True)
    """Layout of the pruned parameters, whose gradients are those of the remaining values."""
    carried: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict, kw_only=True)
    """Abstract model state that is no parameter and that steps change, such as BatchNorm statistics."""

    @property
    @abstractmethod
    def sub_batches(self) -> int:
        """Number of parts of a microbatch whose computation and communication overlap."""

    @property
    @abstractmethod
    def token_axes(self) -> tuple[str, ...]:
        """Mesh axes that split a batch's tokens, over which gradients are summed."""

    @abstractmethod
    def results(
        self, params: Weights, carried: Params, batch: Placed, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the results of a batch from `Batches.shard`, with gradients multiplied by `scale`."""

    @abstractmethod
    def evaluate(self, params: Weights, carried: Params, batch: Placed) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch in Flax's evaluation mode, and the weight of that mean."""

    def shardings(self) -> dict[str, NamedSharding]:
        """Return the sharding of every parameter."""
        return {name: NamedSharding(self.grid.mesh, spec) for name, spec in self.parts.specs.items()}

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """Global shapes of gradients, masters and optimizer state."""
        dense = {name: p.shape for name, p in self.parts.trained.items()}
        return dense if self.forms is None else dense | dict(self.forms.value_shapes)

    @property
    def grad_specs(self) -> Specs:
        """Layouts of gradients, masters and optimizer state: the parameters', or with ZeRO also split over `data`."""
        # Split by the shapes of the state: of a pruned parameter, the values are split and not the dense array.
        if self.zero:
            return split_over_replicas(self.state_shapes, self.parts.specs, self.grid.mesh, self.stacked)
        return {name: self.parts.specs[name] for name in self.parts.trained}

    def check_traced(self, jaxpr: Jaxpr) -> None:
        """Raise ``UserError`` for a step that XLA would miscompile; the package's collectives are not affected."""

    def batch_sharding(self) -> NamedSharding:
        """Return the sharding of a step's tokens."""
        return NamedSharding(self.grid.mesh, BATCH_SPEC)
