"""What the places of a pipeline need on a device by their compiled programs: the pipelines of `plan_memory`."""

from collections.abc import Sequence
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.settings import PipelineConfig
from axonn_jax.core.tensor.params import split_module
from axonn_jax.pipe.schedule.policies import FIXED, ByArrival, FixedOrder, Policy, may_split
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape
from axonn_jax.pipe.stages.build import plan
from axonn_jax.pipe.stages.cut import check_pipeline
from axonn_jax.pipe.stages.stage import Stage
from axonn_jax.pipe.stages.trace import DY, StepShape, X
from axonn_jax.pipe.stages.worker import StageWorker


def measure_pipeline(
    shape: ModelShape, sizes: GridShape, microbatches: int, rows: int, activations: str, bucket: int = 16_000_000
) -> tuple[int, int]:
    """Bytes of weights and moments, and of all else at its most, at the place of the pipe that needs the most.

    All else are sums of gradients and, while tasks run, what the place holds between them and the largest program's
    temporaries and results; behind the last task, the reduction's.
    """
    grid, dtypes = build_grid(sizes, jax.devices()[: sizes.devices]), precisions("fp32")
    policy = ByArrival(sizes.pipe, may_split(True, activations))
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    pipe_shape, ranges = check_pipeline(sizes.pipe, microbatches, PipelineConfig(), list(model.segments))
    size = (rows * sizes.batch_shards, shape.seq_len + 1, microbatches)
    work = StepShape(*size, dtypes.compute, activations, dtypes.grad_dtype)
    stages = plan(split_module(model), grid, pipe_shape, ranges, work, keyed=False)
    found = []
    for place in sorted({0, 1, sizes.pipe - 1}):
        stage = Stage(stages[place], backwards=policy.backwards(pipe_shape), joins=policy.joins(pipe_shape))
        sums = sum(_bytes(one) for one in stage.sums.values())
        rank = StageWorker(place, {place: stage}, stage.parts.specs, bucket=bucket, borrowed=frozenset())
        held = most_between_tasks(rank, pipe_shape, policy)
        pair, members = held_pair(stage), stage._members
        # What a program hands over takes the place of what is counted of its microbatch already.
        tasks = 0
        for chain in (member.programs.chain for member in members):
            own = chain.residual_bytes() // sizes.stage_devices
            counted = {"F": own, "FI": own, "I": max(0, pair.waiting - pair.forward) // len(members)}
            tasks = max(tasks, *(_beside(p.compiled) - counted.get(name, 0) for name, p in chain._programs.items()))
        found.append((2 * sums + sums, sums + max(held + int(tasks), _beside(rank.reduce))))
    return max(found, key=sum)


def _beside(program: Any) -> int:
    """Bytes that a program needs beside its arguments."""
    found = program.memory_analysis()
    return int(found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)


class Pair(NamedTuple):
    """Bytes that one stage keeps of one microbatch."""

    forward: float
    """From its forward to its backward, or to its input gradient."""
    waiting: float
    """From its input gradient to its weight gradient."""


def most_held(policy: Policy, shape: PipelineShape, rank: int, pairs: Sequence[Pair]) -> float:
    """Returns the most bytes that a rank's pairs keep when a task starts, `pairs` by chunk from the shallowest.

    In a fixed order that is what it comes to. By arrival it is the worst that messages' timing can bring about:
    any `live` activations that can be alive together, all of them waiting for their weight gradient if that is
    more. Of a microbatch those are always its first chunks, since deeper ones start later and are done earlier.
    """
    if isinstance(policy, FixedOrder):
        return _most_in_order(policy, shape, rank, pairs)
    live, late = policy.live(shape, rank), policy.waiting(shape, rank) > 0
    prefixes = [0.0, *accumulate(max(pair) if late else pair.forward for pair in pairs)]
    most = [0.0] * (live + 1)  # by room for activations, of the microbatches so far
    for _ in range(min(shape.microbatches, live)):
        most = [max(most[room - n] + prefixes[n] for n in range(min(room, len(pairs)) + 1)) for room in range(live + 1)]
    return most[live]


def most_arrived(policy: Policy, shape: PipelineShape, rank: int) -> int:
    """Returns how many messages may have come for forwards that have not started, while the rank holds its most.

    What has come here is in flight on the rank before, as is all that is in flight here. Rank 0 has messages of one
    chunk and one group of `pipe` microbatches at a time. By arrival every microbatch in flight may have one.
    """
    live, several = policy.live(shape, rank), shape.virtual_stages > 1
    if rank == 0 and not several:
        return 0
    started = live - policy.waiting(shape, rank)
    if isinstance(policy, ByArrival):
        before = min(shape.microbatches, policy.limit(shape, max(0, rank - 1)))
        return before if several or rank == shape.pipe - 1 else max(0, before - started)
    if rank == 0:
        return shape.microbatches if policy is FIXED["gpipe"] else min(shape.microbatches, shape.pipe)
    joined = rank == shape.pipe - 1 and policy.joins(shape)
    before = (policy if policy is FIXED["gpipe"] else FIXED["interleaved"]).live(shape, rank - 1)
    return max(0, before - (0 if joined else started))


def _most_in_order(policy: FixedOrder, shape: PipelineShape, rank: int, pairs: Sequence[Pair]) -> float:
    held = most = 0.0
    for task in policy.order(shape, rank):
        pair = pairs[task.stage // shape.pipe]
        if task.kind is Kind.FORWARD:
            held += pair.forward
        elif task.kind is Kind.BACKWARD:
            held -= pair.forward
        elif task.kind is Kind.BACKWARD_INPUT:
            held += pair.waiting - pair.forward
        else:
            held -= pair.waiting
        most = max(most, held)
    return most


def held_pair(stage: Stage) -> Pair:
    """Returns the bytes that a microbatch keeps on each device of a stage between its tasks.

    Before the backward a gradient that has come for it counts too.
    """
    dy = 0 if stage.y is None else _bytes(stage.y)
    split = next((name for name in ("I", "FI") if name in stage._members[-1].programs.chain._programs), None)
    return Pair(0 if stage.joins else _held(stage, "F") + dy, _held(stage, split) if split else 0)


def most_between_tasks(rank: StageWorker, pipe_shape: PipelineShape, policy: Policy) -> int:
    """Returns the most bytes on each device when a task starts, beside weights, their sums and optimizer.

    Those are what microbatches in flight keep (`most_held`), messages that have come, one that goes, and the step's
    tokens.
    """
    stages = [rank.stages[number] for number in sorted(rank.stages)]
    pairs = [held_pair(stage) for stage in stages]
    arriving = max(0 if stage.x is None else _bytes(stage.x) for stage in stages)
    going = max(max(0 if form is None else _bytes(form) for form in (stage.y, stage.x)) for stage in stages)
    tokens = max(0 if s.tokens is None else s.work.microbatches * _bytes(s.tokens) for s in stages)
    held = most_held(policy, pipe_shape, rank.pp_rank, pairs)
    return int(held) + most_arrived(policy, pipe_shape, rank.pp_rank) * arriving + going + tokens


def _held(stage: Stage, name: str) -> int:
    """Bytes of a device that a microbatch keeps once a task has run: what was handed over and what has arrived."""
    return sum(_held_by(stage._members[number], program) for number, program in dict(stage._order(name)).items())


def _held_by(member: Any, name: str) -> int:
    chain, stretch = member.programs.chain, member.programs.stretch
    arrived = {X: stretch.x, DY: None if name == "F" else stretch.y}
    if name == "F" and stretch.work.activations == "offload":
        del arrived[X]  # on the host
    waits = [chain._residuals[source][position] for source, position in chain._programs[name].live]
    waits += [form for slot, form in arrived.items() if form and slot in chain.reads(name)]
    return sum(map(_bytes, waits))


def _bytes(struct: Any) -> int:
    """Of a device's part of an array; none of a random key, which is a number or two."""
    if jnp.issubdtype(struct.dtype, jax.dtypes.prng_key):
        return 0
    return prod(struct.sharding.shard_shape(struct.shape)) * int(struct.dtype.itemsize)
