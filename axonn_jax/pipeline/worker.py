"""Worker of a pipe rank, which holds its stages and the values kept between their tasks, and ends a step."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from axonn_jax.grid import BATCH_AXES
from axonn_jax.memory.host_arrays import replicated
from axonn_jax.memory.zero import reduce_gradients
from axonn_jax.models.packed import counted_targets
from axonn_jax.models.protocol import Model
from axonn_jax.pipeline.stage import Kept, Stage
from axonn_jax.pipeline.stage_programs import Result
from axonn_jax.pipeline.trace import KEY, MICROBATCH, SCALE, TOKENS
from axonn_jax.schedule.tasks import Kind, Message, Task
from axonn_jax.tensor.collectives import all_reduce
from axonn_jax.tensor.params import Params, Specs, SplitModule, key_of, square_sum
from axonn_jax.tensor.specs import shard_mapped
from axonn_jax.tensor.weight_gather import Weights


class StageWorker:
    """Worker that starts the programs of a pipe rank's virtual stages, and keeps activations and gradients between
    them.

    Behind the last task it reduces the gradients, in buckets, to the layout of `grad_specs`, and measures them but for
    the `borrowed` ones, which another rank holds too and measures. All programs take and give global arrays.
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
            numbers = range(stage.work.microbatches)
            self._numbers = [replicated(np.uint32(m), self._replicated) for m in numbers]
        self._count = None
        if self._model.balanced or any(stage.last for stage in self.stages.values()):
            self._count = _counting(self._model, self.mesh, self._work.microbatches)
        self.counted: jax.Array | None = None
        """Targets of the step that count, where a loss is here."""
        self.losses: list[jax.Array] = []
        self.sums: Params = {}
        forms = {name: form for stage in self.stages.values() for name, form in stage.sums.items()}
        own_specs = {name: grad_specs[name] for name in forms}
        self._zero = _zero(forms)
        self.reduce = self._reduce(stage.parts, forms, own_specs, bucket)
        """Program: sums of gradients, which are used up -> gradients."""
        self._mean = self._averaging()
        self.measure = self._measuring(stage.parts, forms, own_specs, borrowed)
        """Program: gradients -> their sum of squares, and of `Counts` the metric (or None) and the counts by name."""
        self._inbox: dict[Message, jax.Array] = {}
        # By (stage, microbatch): values of its programs, until the last has started.
        self._kept: dict[tuple[int, int], list[Kept]] = {}

    @property
    def targets(self) -> float:
        """Number of the batch's targets that count, on the host; 0 on ranks without losses."""
        return float(self.counted) if self.losses and self.counted is not None else 0.0

    @property
    def loss(self) -> jax.Array | float:
        """The mean loss of the step that has run; 0 on ranks without the last stage."""
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
        """Prepare a step on this process's rows of each microbatch, [rows, seq + 1]; `key` is the step's.

        `scale` multiplies the loss before the backward pass; None for 1.
        """
        self._params = params
        self.losses, self._inbox, self._kept = [], {}, {}
        self._given: list[dict[str, jax.Array]] = [{} for _ in range(self._work.microbatches)]
        reads = any(stage.tokens is not None for stage in self.stages.values())
        for number, given in enumerate(self._given):
            if reads:
                shape = (self._work.rows, self._work.width)
                given[TOKENS] = jax.make_array_from_process_local_data(
                    self._tokens_sharding, rows[number].astype(np.int32, copy=False), shape
                )
            if self._numbers and key is not None:
                given[KEY], given[MICROBATCH] = key, self._numbers[number]
        if self._count is not None:
            factor = replicated(np.float32(1.0 if scale is None else scale), self._replicated)
            self.counted, seed = self._count([given[TOKENS] for given in self._given], factor)
            for given in self._given:
                given[SCALE] = seed
        self.sums = self._zero() if train else {}

    def key(self, seed: int, step: int) -> jax.Array:
        """Return the step's dropout key on this rank's mesh."""
        return self._fold(np.uint32(seed), np.uint32(step))  # type: ignore[no-any-return]

    def gradients(self) -> Params:
        """Return the step's gradients, reduced; their sums are used up."""
        sums, self.sums = self.sums, {}
        return self.reduce(sums)  # type: ignore[no-any-return]

    def arrived(self, message: Message, value: jax.Array) -> None:
        """Keep a message's array until its task is started."""
        self._inbox[message] = value

    def joins(self, task: Task) -> bool:
        """True if a task is started together with the next one: a forward with its backward, on a last stage."""
        return task.kind is Kind.FORWARD and self.stages[task.stage].joins

    def start(self, *tasks: Task, train: bool = True) -> Result:
        """Start the program of a task, or of one that `joins` and the next; return at once.

        Unless `train`, the task is a forward of an evaluation.
        """
        kinds = [task.kind for task in tasks]
        number, microbatch = own = tasks[0].stage, tasks[0].microbatch
        stage, arrived = self.stages[number], None
        if Kind.FORWARD in kinds and not stage.first:
            arrived = self._inbox.pop(Message("forward", *own))
        elif kinds[0] in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and not stage.last:
            arrived = self._inbox.pop(Message("backward", *own))
        given = {**self._params, **self._given[microbatch]}
        if train:
            ran = stage.run("".join(kinds), given, arrived, self._kept.setdefault(own, stage.kept()), self.sums)
            if kinds[-1] in (Kind.BACKWARD, Kind.BACKWARD_WEIGHT):
                del self._kept[own]
        else:
            ran = stage.evaluate(given, arrived)
        if ran.loss is not None:
            self.losses.append(ran.loss)
        return ran

    def _reduce(
        self, parts: SplitModule, forms: Mapping[str, jax.ShapeDtypeStruct], grad_specs: Specs, bucket: int
    ) -> Any:
        """Return `reduce`; memory of the sums is reused unless gradients are scattered over `data`.

        Collectives: `reduce_gradients`, as in `StageProgram.gradients`.
        """
        token_axes, specs = self._model.token_axes, {name: parts.specs[name] for name in forms}

        def local(sums: Params) -> Params:
            own = {name: value[0] for name, value in sums.items()}
            axes = partial(parts.sum_axes, token_axes=token_axes)
            return reduce_gradients(own, specs, grad_specs, bucket, self.mesh, axes)

        given = {name: form.sharding.spec for name, form in forms.items()}
        run = shard_mapped(local, self.mesh, (given,), grad_specs)
        return jax.jit(run, donate_argnums=0).lower(dict(forms)).compile()

    def _averaging(self) -> Callable[..., Any] | None:
        """Results of the last stage's forwards, targets that count -> mean loss; 4 bytes over `data` and `z`."""
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
        counts = self._model.counts(parts.loads & forms.keys())
        names = () if counts is None else counts.names
        counted = {name: spec for name, spec in grad_specs.items() if name not in borrowed.union(names)}

        def local(grads: Params) -> jax.Array:
            return square_sum({name: grads[name] for name in counted}, counted)

        squares = shard_mapped(local, self.mesh, (grad_specs,), P())

        def measure(grads: Params) -> tuple[jax.Array, jax.Array | None, Params]:
            if counts is None:
                return squares(grads), None, {}
            own = {name: grads[name] for name in counts.names}
            return squares(grads), counts.measure(own), counts.centred(own)

        grads = {
            name: jax.ShapeDtypeStruct(form.shape[1:], form.dtype, sharding=NamedSharding(self.mesh, grad_specs[name]))
            for name, form in forms.items()
        }
        number = self._replicated
        shardings = (number, None if counts is None else number, {name: grads[name].sharding for name in names})
        return jax.jit(measure, out_shardings=shardings).lower(grads).compile()


def _counting(model: Model, mesh: Mesh, microbatches: int) -> Callable[..., tuple[jax.Array, jax.Array]]:
    """Return a program: tokens of all microbatches and the loss scale -> targets that count, scale over them.

    Collective: an all-reduce of one number over `data` and `z`.
    """

    def local(tokens: list[jax.Array], scale: jax.Array) -> tuple[jax.Array, jax.Array]:
        own = sum(jnp.sum(counted_targets(words, packed=model.packed), dtype=jnp.float32) for words in tokens)
        total = all_reduce(jnp.asarray(own), BATCH_AXES)
        return total, scale / total

    return jax.jit(shard_mapped(local, mesh, ([P(BATCH_AXES)] * microbatches, P()), (P(), P())))


def _zero(forms: Mapping[str, jax.ShapeDtypeStruct]) -> Callable[[], Params]:
    """Return a compiled program that makes the sums a step starts with."""
    shardings = {name: form.sharding for name, form in forms.items()}

    def zeros() -> Params:
        return {name: jnp.zeros(form.shape, form.dtype) for name, form in forms.items()}

    return jax.jit(zeros, out_shardings=shardings).lower().compile()
