"""Worker of a pipe rank: its stages, the values held between their tasks, and the reduction that ends a step."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.memory.zero import reduce_gradients
from axonn_jax.core.tensor.params import Params, Specs, key_of, square_sum
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import Weights
from axonn_jax.pipe.schedule.tasks import Kind, Message, Task
from axonn_jax.pipe.stages.stage_programs import Result


class RankStage(Protocol):
    """Virtual stage, as a worker runs it."""

    @property
    def first(self) -> bool:
        """True if no messages arrive from an earlier stage."""

    @property
    def last(self) -> bool:
        """True if the stage ends with the loss."""

    @property
    def joins(self) -> bool:
        """True if a forward and its backward are one program."""

    @property
    def x(self) -> jax.ShapeDtypeStruct | None:
        """Form of the messages that arrive; None for the first stage."""

    @property
    def sums(self) -> Mapping[str, jax.ShapeDtypeStruct]:
        """Form of the accumulated gradients, [devices or replicas, ...], by name."""

    def new_states(self) -> Any:
        """Return what a microbatch holds between its tasks, before the first of them."""

    def run(self, name: str, inputs: Mapping[str, Any], arrived: jax.Array | None, states: Any, sums: Params) -> Result:
        """Start a program; `states` and `sums` are updated in place."""

    def evaluate(self, inputs: Mapping[str, Any], arrived: jax.Array | None) -> Result:
        """Start a forward pass of an evaluation."""

    def residual_bytes(self) -> int:
        """Return the bytes that a microbatch holds from forward to backward, on all devices of the stage."""


class RankWorker(ABC):
    """Worker that starts the programs of a pipe rank's virtual stages and holds activations and gradients between them.

    After the last task it reduces the gradients, in buckets, to the layout of `grad_specs`, and measures their norm.
    All programs take and return global arrays.

    Args:
        pp_rank: Rank of the pipe.
        stages: Its virtual stages, by number.
        mesh: Mesh of the rank.
        specs: Layouts of the parameters, by name.
        grad_specs: Layouts of the reduced gradients, by name.
        bucket: Elements of a bucket of the reduction.
        sum_axes: Function from a parameter's name to the axes over which its gradients are partial sums.
    """

    def __init__(
        self,
        pp_rank: int,
        stages: Mapping[int, RankStage],
        mesh: Mesh,
        specs: Specs,
        grad_specs: Specs,
        *,
        bucket: int,
        sum_axes: Callable[[str], Sequence[str]],
    ):
        self.pp_rank, self.mesh = pp_rank, mesh
        self.stages: dict[int, Any] = dict(stages)
        self._replicated = NamedSharding(mesh, P())
        self._fold = jax.jit(lambda seed, step: jax.random.fold_in(key_of(seed), step), out_shardings=self._replicated)
        self.losses: list[jax.Array] = []
        self.sums: Params = {}
        forms = {name: form for stage in self.stages.values() for name, form in stage.sums.items()}
        self._zero = _zero(forms)
        self._forms, self._grad_specs = forms, {name: grad_specs[name] for name in forms}
        self.reduce = self._reduce(specs, bucket, sum_axes)
        """Program: accumulated gradients, which are donated -> reduced gradients."""
        self._inputs: list[dict[str, Any]] = []
        self._inbox: dict[Message, jax.Array] = {}
        # By (stage, microbatch), from the start of its first program to that of its last.
        self._states: dict[tuple[int, int], Any] = {}

    @property
    @abstractmethod
    def loss(self) -> jax.Array | float:
        """Mean loss of the latest step; 0 on ranks without the last stage."""

    @property
    @abstractmethod
    def targets(self) -> float:
        """Number of items that the latest mean loss averages over, as a host number; 0 on ranks without losses."""

    @abstractmethod
    def begin(
        self, params: Weights, rows: Sequence[Any], key: jax.Array | None, *, train: bool, scale: float | None = None
    ) -> None:
        """Prepare a step.

        Args:
            params: Weights of this rank's stages, by name.
            rows: This process's rows of each microbatch.
            key: The step's random key; None if it takes none.
            train: False for an evaluation, which accumulates no gradients.
            scale: Factor of the loss before the backward pass; None for 1.
        """

    @abstractmethod
    def measure(self, grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:
        """Return the sum of squares of reduced gradients, and the metric (or None) and the counts of `Counts`."""

    def numbers(self) -> list[float]:
        """Return numbers of the latest step that are summed over the ranks of the pipe."""
        return []

    def commit(self) -> None:  # noqa: B027  most models have nothing to commit
        """Keep what the latest step has written besides gradients, as its results are finite."""

    def key(self, seed: int, step: int) -> jax.Array:
        """Return the step's random key on this rank's mesh."""
        return self._fold(np.uint32(seed), np.uint32(step))  # type: ignore[no-any-return]

    def gradients(self) -> Params:
        """Reduce the accumulated gradients, which are donated, and return them."""
        sums, self.sums = self.sums, {}
        return self.reduce(sums)  # type: ignore[no-any-return]

    def arrived(self, message: Message, value: jax.Array) -> None:
        """Store a message's array until its task starts."""
        self._inbox[message] = value

    def joins(self, task: Task) -> bool:
        """Return True if a task starts together with the next one: a forward with its backward, on a last stage."""
        return task.kind is Kind.FORWARD and self.stages[task.stage].joins

    def start(self, *tasks: Task, train: bool = True) -> Result:
        """Start the program of a task, without waiting for it.

        Args:
            tasks: A task, or one that `joins` followed by the next one.
            train: False for a forward of an evaluation.
        """
        kinds = [task.kind for task in tasks]
        number, microbatch = pair = tasks[0].stage, tasks[0].microbatch
        stage, arrived = self.stages[number], None
        if Kind.FORWARD in kinds and not stage.first:
            arrived = self._inbox.pop(Message("forward", *pair))
        elif kinds[0] in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and not stage.last:
            arrived = self._inbox.pop(Message("backward", *pair))
        inputs = self._inputs_of(number, microbatch)
        if train:
            states = self._states.setdefault(pair, stage.new_states())
            ran = stage.run("".join(kinds), inputs, arrived, states, self.sums)
            if kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                del self._states[pair]
        else:
            ran = stage.evaluate(inputs, arrived)
        if ran.loss is not None:
            self.losses.append(ran.loss)
        self._started(number, microbatch, ran)
        return ran

    def _begin(self, params: Weights, microbatches: int, *, train: bool) -> None:
        """Forget the previous step, and start the sums of a new one."""
        self._params = params
        self.losses, self._inbox, self._states = [], {}, {}
        self._inputs = [{} for _ in range(microbatches)]
        self.sums = self._zero() if train else {}

    def _inputs_of(self, stage: int, microbatch: int) -> dict[str, Any]:
        """Return the inputs of a stage's programs by name."""
        return {**self._params, **self._inputs[microbatch]}

    def _started(self, stage: int, microbatch: int, ran: Result) -> None:  # noqa: B027  most have none
        """Take the further results of a program that has been started."""

    def _square_sum(self, leave_out: Collection[str]) -> Callable[[Params], jax.Array]:
        """Return a function: reduced gradients -> the sum of their squares, some parameters left out."""
        counted = {name: spec for name, spec in self._grad_specs.items() if name not in leave_out}

        def local(grads: Params) -> jax.Array:
            return square_sum({name: grads[name] for name in counted}, counted)

        return shard_mapped(local, self.mesh, (self._grad_specs,), P())

    def _reduced(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the form of the reduced gradients."""
        return {
            name: jax.ShapeDtypeStruct(
                form.shape[1:], form.dtype, sharding=NamedSharding(self.mesh, self._grad_specs[name])
            )
            for name, form in self._forms.items()
        }

    def _reduce(self, specs: Specs, bucket: int, sum_axes: Callable[[str], Sequence[str]]) -> Any:
        """Compile `reduce`. Its collectives are those of `reduce_gradients`, as in `StageProgram.gradients`."""
        specs = {name: specs[name] for name in self._forms}

        def local(sums: Params) -> Params:
            partial_sums = {name: value[0] for name, value in sums.items()}
            return reduce_gradients(partial_sums, specs, self._grad_specs, bucket, self.mesh, sum_axes)

        sum_specs = {name: form.sharding.spec for name, form in self._forms.items()}
        run = shard_mapped(local, self.mesh, (sum_specs,), self._grad_specs)
        # Gradients reuse the memory of their donated sums, except where they are scattered over `data` and so smaller.
        return jax.jit(run, donate_argnums=0).lower(dict(self._forms)).compile()


@dataclass(frozen=True)
class CompiledRanks:
    """Workers of this process's ranks of the pipe, for batches of one form."""

    workers: Mapping[int, RankWorker]
    """By rank."""
    arriving: Mapping[int, jax.ShapeDtypeStruct]
    """Form of the activations that arrive at a stage of these ranks, by the stage's number."""
    returning: Mapping[int, jax.ShapeDtypeStruct] = field(default_factory=dict)
    """Form of the gradients that arrive, where it is another."""


def _zero(forms: Mapping[str, jax.ShapeDtypeStruct]) -> Callable[[], Params]:
    """Return a compiled program that creates the zero-valued gradient sums a step starts with."""
    shardings = {name: form.sharding for name, form in forms.items()}

    def zeros() -> Params:
        return {name: jnp.zeros(form.shape, form.dtype) for name, form in forms.items()}

    return jax.jit(zeros, out_shardings=shardings).lower().compile()
