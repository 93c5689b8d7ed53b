"""Worker of a pipe rank: its stages, the values held between their tasks, and the reduction that ends a step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.core.grid import BATCH_AXES
from axonn_jax.core.memory.host_arrays import replicated
from axonn_jax.core.memory.zero import reduce_gradients
from axonn_jax.core.models.packed import counted_targets
from axonn_jax.core.models.protocol import Model
from axonn_jax.core.tensor.collectives import all_reduce
from axonn_jax.core.tensor.params import Params, Specs, SplitModule, key_of, square_sum
from axonn_jax.core.tensor.specs import shard_mapped
from axonn_jax.core.tensor.weight_gather import Weights
from axonn_jax.pipe.schedule.tasks import Kind, Message, Task
from axonn_jax.pipe.stages.stage import GroupState, Stage
from axonn_jax.pipe.stages.stage_programs import Result
from axonn_jax.pipe.stages.trace import KEY, MICROBATCH, SCALE, TOKENS


class StageWorker:
    """Worker that starts the programs of a pipe rank's virtual stages and holds activations and gradients between them.

    After the last task it reduces the gradients, in buckets, to the layout of `grad_specs`, and measures their norm.
    `borrowed` parameters are left out of the norm: another rank holds them too and counts them. All programs take and
    return global arrays.
    """

    def __init__(
        self, pp_rank: int, stages: Mapping[int, Stage], grad_specs: Specs, *, bucket: int, borrowed: frozenset[str]
    ):
        self.pp_rank, self.stages = pp_rank, dict(stages)
        stage = next(iter(self.stages.values()))
        self.mesh, self._work, self._model = stage.mesh, stage.work, stage.model
        self._replicated = NamedSharding(self.mesh, P())
        self._tokens_sharding = NamedSharding(self.mesh, P(BATCH_AXES))
        self._numbers: list[jax.Array] = []
        self._fold = jax.jit(lambda seed, step: jax.random.fold_in(key_of(seed), step), out_shardings=self._replicated)
        if stage.keyed:
            # Put the numbers on the device once, rather than in every task of every step.
            numbers = range(stage.work.microbatches)
            self._numbers = [replicated(np.uint32(m), self._replicated) for m in numbers]
        self._count = None
        if self._model.balanced or any(stage.last for stage in self.stages.values()):
            self._count = _counting(self._model, self.mesh, self._work.microbatches)
        self.counted: jax.Array | None = None
        """Number of the step's targets that count; None on ranks without a loss."""
        self.losses: list[jax.Array] = []
        self.sums: Params = {}
        forms = {name: form for stage in self.stages.values() for name, form in stage.sums.items()}
        local_specs = {name: grad_specs[name] for name in forms}
        self._zero = _zero(forms)
        self.reduce = self._reduce(stage.parts, forms, local_specs, bucket)
        """Program: accumulated gradients, which are donated -> reduced gradients."""
        self._mean = self._averaging()
        self.measure = self._measuring(stage.parts, forms, local_specs, borrowed)
        """Program: gradients -> their sum of squares, and the metric (or None) and counts by name of `Counts`."""
        self._inbox: dict[Message, jax.Array] = {}
        # By (stage, microbatch), from the start of its first program to that of its last.
        self._states: dict[tuple[int, int], list[GroupState]] = {}

    @property
    def targets(self) -> float:
        """Number of the batch's targets that count, as a host number; 0 on ranks without losses."""
        return float(self.counted) if self.losses and self.counted is not None else 0.0

    @property
    def loss(self) -> jax.Array | float:
        """Mean loss of the latest step; 0 on ranks without the last stage."""
        return 0.0 if self._mean is None else self._mean(self.losses, self.counted)  # type: ignore[no-any-return]

    def begin(
        self,
        params: Weights,
        rows: Sequence[np.ndarray],
        key: jax.Array | None,
        *,
        train: bool,
        scale: float | None = None,
    ) -> None:
        """Prepare a step.

        Args:
            params: Weights of this rank's stages, by name.
            rows: This process's rows of each microbatch, [rows, seq + 1].
            key: The step's dropout key; None without dropout.
            train: False for an evaluation, which accumulates no gradients.
            scale: Factor of the loss before the backward pass; None for 1.
        """
        self._params = params
        self.losses, self._inbox, self._states = [], {}, {}
        self._inputs: list[dict[str, jax.Array]] = [{} for _ in range(self._work.microbatches)]
        reads = any(stage.tokens is not None for stage in self.stages.values())
        for number, inputs in enumerate(self._inputs):
            if reads:
                shape = (self._work.rows, self._work.width)
                inputs[TOKENS] = jax.make_array_from_process_local_data(
                    self._tokens_sharding, rows[number].astype(np.int32, copy=False), shape
                )
            if self._numbers and key is not None:
                inputs[KEY], inputs[MICROBATCH] = key, self._numbers[number]
        if self._count is not None:
            factor = replicated(np.float32(1.0 if scale is None else scale), self._replicated)
            # The count stays on the device: it scales the gradients without a synchronization with the host.
            self.counted, seed = self._count([inputs[TOKENS] for inputs in self._inputs], factor)
            for inputs in self._inputs:
                inputs[SCALE] = seed
        self.sums = self._zero() if train else {}

    def key(self, seed: int, step: int) -> jax.Array:
        """Return the step's dropout key on this rank's mesh."""
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
        inputs = {**self._params, **self._inputs[microbatch]}
        if train:
            states = self._states.setdefault(pair, stage.new_states())
            ran = stage.run("".join(kinds), inputs, arrived, states, self.sums)
            if kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                del self._states[pair]
        else:
            ran = stage.evaluate(inputs, arrived)
        if ran.loss is not None:
            self.losses.append(ran.loss)
        return ran

    def _reduce(
        self, parts: SplitModule, forms: Mapping[str, jax.ShapeDtypeStruct], grad_specs: Specs, bucket: int
    ) -> Any:
        """Compile `reduce`. Its collectives are those of `reduce_gradients`, as in `StageProgram.gradients`."""
        token_axes, specs = self._model.token_axes, {name: parts.specs[name] for name in forms}

        def local(sums: Params) -> Params:
            partial_sums = {name: value[0] for name, value in sums.items()}
            axes = partial(parts.sum_axes, token_axes=token_axes)
            return reduce_gradients(partial_sums, specs, grad_specs, bucket, self.mesh, axes)

        sum_specs = {name: form.sharding.spec for name, form in forms.items()}
        run = shard_mapped(local, self.mesh, (sum_specs,), grad_specs)
        # Gradients reuse the memory of their donated sums, except where they are scattered over `data` and so smaller.
        return jax.jit(run, donate_argnums=0).lower(dict(forms)).compile()

    def _averaging(self) -> Callable[..., Any] | None:
        """Return a program: last stage's losses, target count -> mean loss; all-reduces 4 bytes over `data` and `z`."""
        last = next((stage for stage in self.stages.values() if stage.last), None)
        if last is None or last.losses is None:
            return None
        losses = [last.losses] * self._work.microbatches
        targets = jax.ShapeDtypeStruct((), jnp.float32, sharding=self._replicated)

        def local(losses: list[jax.Array], targets: jax.Array) -> jax.Array:
            return all_reduce(sum((value[0] for value in losses[1:]), losses[0][0]), BATCH_AXES) / targets

        specs = [last.losses.sharding.spec] * len(losses)
        return jax.jit(shard_mapped(local, self.mesh, (specs, P()), P())).lower(losses, targets).compile()

    def _measuring(
        self,
        parts: SplitModule,
        forms: Mapping[str, jax.ShapeDtypeStruct],
        grad_specs: Specs,
        borrowed: frozenset[str],
    ) -> Callable[..., Any]:
        # Gradients of `loads` parameters are counts of experts' tokens, so they are excluded from the norm.
        counts = self._model.counts(parts.loads & forms.keys())
        names = () if counts is None else counts.names
        counted = {name: spec for name, spec in grad_specs.items() if name not in borrowed.union(names)}

        def local(grads: Params) -> jax.Array:
            return square_sum({name: grads[name] for name in counted}, counted)

        squares = shard_mapped(local, self.mesh, (grad_specs,), P())

        def measure(grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:
            if counts is None:
                return squares(grads), None, {}
            loads = {name: grads[name] for name in counts.names}
            return squares(grads), counts.measure(loads), counts.centred(loads)

        grads = {
            name: jax.ShapeDtypeStruct(form.shape[1:], form.dtype, sharding=NamedSharding(self.mesh, grad_specs[name]))
            for name, form in forms.items()
        }
        number = self._replicated
        shardings = (number, None if counts is None else number, {name: grads[name].sharding for name in names})
        return jax.jit(measure, out_shardings=shardings).lower(grads).compile()


def _counting(model: Model, mesh: Mesh, microbatches: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a program: tokens of all microbatches, loss scale -> number of targets that count, scale over that number.

    Collective: an all-reduce of 4 bytes over `data` and `z`.
    """

    def local(tokens: list[jax.Array], scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        local_count = sum(jnp.sum(counted_targets(words, packed=model.packed), dtype=jnp.float32) for words in tokens)
        total = all_reduce(jnp.asarray(local_count), BATCH_AXES)
        return total, scale / total

    return jax.jit(shard_mapped(local, mesh, ([P(BATCH_AXES)] * microbatches, P()), (P(), P())))


def _zero(forms: Mapping[str, jax.ShapeDtypeStruct]) -> Callable[[], Params]:
    """Return a compiled program that creates the zero-valued gradient sums a step starts with."""
    shardings = {name: form.sharding for name, form in forms.items()}

    def zeros() -> Params:
        return {name: jnp.zeros(form.shape, form.dtype) for name, form in forms.items()}

    return jax.jit(zeros, out_shardings=shardings).lower().compile()
