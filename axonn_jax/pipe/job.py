"""Job of a `PipelineEngine`: a model, how it is cut into stages, and how batches reach them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import optax
from jax.sharding import Mesh

from axonn_jax.core.engines.engine import Batches
from axonn_jax.core.experts.load import Loads
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.precision import Precisions
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig
from axonn_jax.core.state.param_store import ParamStore
from axonn_jax.core.tensor.params import Params, Specs, SplitModule
from axonn_jax.pipe.schedule.policies import Policy
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.pipe.stages.rank_worker import CompiledRanks

Place = Callable[[Specs, Mesh, Collection[str]], Params]
"""Function from layouts by name, a mesh, and the names among them that other ranks hold too, to parameters there."""


@dataclass
class PipelineJob(ABC):
    """A model with everything that a `PipelineEngine` needs to train it in stages."""

    grid: Grid
    optimizer: optax.GradientTransformation
    batches: Batches[Any, Any]
    parts: SplitModule
    """The full model, with abstract parameters."""
    place: Place
    owned: bool
    """True if placed parameters may be freed, one array after another."""
    precisions: Precisions
    policy: Policy
    shape: PipelineShape
    memory: MemoryConfig
    pipeline: PipelineConfig
    prune: PruneConfig
    draws: bool
    """True if a step takes a random key, for example for dropout."""
    padding: Mapping[str, Any] = field(default_factory=dict)
    """Padding of the vocabulary (`models.vocabulary.padding_of`)."""
    counts: Loads | None = None
    """Counts of experts' tokens among the gradients, if the model has them."""

    state: Mapping[str, Any] = field(default_factory=dict)
    """Abstract arrays of model state that is no parameter and that steps change, by name."""

    @property
    @abstractmethod
    def names(self) -> Sequence[tuple[str, ...]] | None:
        """Parameters of every rank of the pipe; None until a batch has shown them."""

    @abstractmethod
    def settle(self, batch: Any, *, train: bool) -> None:
        """Cut the model into stages for a batch, if that takes one.

        Args:
            batch: The batch.
            train: True ahead of a step, False ahead of an evaluation.

        Raises:
            UserError: The model cannot be cut so.
        """

    @abstractmethod
    def form_of(self, batch: Any) -> Hashable:
        """Return what the programs depend on of a batch."""

    @abstractmethod
    def microbatches(self, batch: Any) -> list[Any]:
        """Return this process's rows of each microbatch."""

    @abstractmethod
    def compile(self, batch: Any, state: "RankStates", alive: Callable[[], None]) -> CompiledRanks:
        """Compile the programs of this process's stages.

        Args:
            batch: A batch, of whose form the programs are.
            state: State of this process's ranks.
            alive: Called before each stage, which may take minutes.
        """

    def forget_source(self) -> None:
        """Let go of what parameters were placed from, as a module of the user's holds a second copy of all of them."""
        self.place = _placed

    @abstractmethod
    def model(self, params: Params, carried: Params) -> Any:
        """Return the user's model with these parameters and this state."""

    @abstractmethod
    def lines(self, channel: str) -> list[str]:
        """Return lines of text about the stages and the schedule."""

    def state_names(self, pp_rank: int) -> Sequence[str]:
        """Return the names in `state` of a rank of the pipe."""
        return ()

    def place_state(self, pp_rank: int) -> Params:
        """Return the state of a rank on its mesh, [replicas, ...]."""
        return {}

    def metrics(self, numbers: Sequence[float]) -> dict[str, Any]:
        """Return the metrics that the workers' numbers stand for, summed over all ranks of the pipe."""
        return {}

    def aux(self, numbers: Sequence[float]) -> Any:
        """Return the loss's auxiliary numbers, in its own tree, that the workers' numbers stand for."""
        return {}


def _placed(specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    raise RuntimeError("the parameters of a job are placed once")


class RankStates(Protocol):
    """State of this process's ranks of the pipe, as the programs of a step need it."""

    @property
    def stores(self) -> Mapping[int, ParamStore[Any]]:
        """Parameters and optimizer state by rank."""

    @property
    def carried_by_rank(self) -> Mapping[int, Params]:
        """Model state that is no parameter, by rank and name; workers replace its arrays."""

    @property
    def shared(self) -> Mapping[str, tuple[int, ...]]:
        """Ranks of each trained parameter that several ranks hold."""
