"""Programs of a step's gradients on one 4D mesh: their layouts, their results, and the protocol that a step needs."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES, Grid
from axonn_jax.pruned.layout import PrunedLayout
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
    """Further numbers by name, such as a model's `Counts` gives."""
    carried: Mapping[str, jax.Array] = MappingProxyType({})
    """State of the model that the step has changed, and that is no parameter."""


@dataclass(frozen=True)
class OnMesh:
    """Model on one 4D mesh, with the layouts that follow."""

    parts: SplitModule
    grid: Grid
    dtype: jnp.dtype
    forms: PrunedLayout | None = field(default=None, kw_only=True)
    """Layout of the pruned parameters, whose gradients are those of their kept values."""
    carried: Mapping[str, jax.ShapeDtypeStruct] = field(default_factory=dict, kw_only=True)
    """Shapes of the model's state that is no parameter and that steps change, such as statistics of a BatchNorm."""

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
        """Layout of every gradient, the same as its parameter's."""
        return {name: self.parts.specs[name] for name in self.parts.trained}

    def check_traced(self, jaxpr: Any) -> None:
        """Accept every step: all collectives are the package's own."""

    def batch_sharding(self) -> NamedSharding:
        """The layout of a step's tokens on the mesh."""
        return NamedSharding(self.grid.mesh, BATCH_SPEC)


class GradientProgram(Protocol):
    """Program that a step takes its gradients from; the package's is `StageProgram`."""

    @property
    def parts(self) -> SplitModule:
        """The model taken apart."""

    @property
    def grid(self) -> Grid:
        """Grid of the program."""

    @property
    def ordered(self) -> bool:
        """True if the package orders the computation, for which XLA needs options."""

    def shardings(self) -> dict[str, NamedSharding]:
        """The layout of every parameter."""

    def batch_sharding(self) -> NamedSharding:
        """The layout of a step's tokens."""

    @property
    def forms(self) -> PrunedLayout | None:
        """Layout of the pruned parameters."""

    @property
    def state_shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Global shapes of gradients, masters and optimizer state."""

    @property
    def grad_specs(self) -> Specs:
        """The layout of every gradient, and of the masters and optimizer state with it."""

    @property
    def carried(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Shapes of the model's state that is no parameter."""

    def results(
        self, params: Any, carried: Any, batch: Any, key: jax.Array | None, scale: jax.Array | None = None
    ) -> StepResults:
        """Return the results of a batch as `Batches.shard` makes it, with gradients times `scale`."""

    def check_traced(self, jaxpr: Any) -> None:
        """Raise ``UserError`` for a step that XLA would compile into wrong results."""

    def evaluate(self, params: Any, carried: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
        """Return the mean loss of a batch, as Flax's evaluation mode has it, and the weight of that mean."""
