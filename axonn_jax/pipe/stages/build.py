"""Construction of a pipeline: plans and compiles its stages for a batch shape and connects its processes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import jax
from jax.sharding import NamedSharding

from axonn_jax.core.distributed.gossip import RankStatus
from axonn_jax.core.distributed.heartbeat import Heartbeat
from axonn_jax.core.distributed.host_sync import LocalSync, MpiSync
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.report import unused
from axonn_jax.core.models.declared.segments import Segment
from axonn_jax.core.options import PipelinePolicy
from axonn_jax.core.pruned.layout import PrunedLayout
from axonn_jax.core.tensor.params import Specs, SplitModule
from axonn_jax.pipe.channels.base import Ports
from axonn_jax.pipe.channels.choice import open_channel
from axonn_jax.pipe.schedule.partition import group_ranges
from axonn_jax.pipe.schedule.policies import ByArrival, Policy
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.pipe.stages.executor import Executor
from axonn_jax.pipe.stages.leader import LeaderBroadcast
from axonn_jax.pipe.stages.rank_worker import CompiledRanks, RankWorker
from axonn_jax.pipe.stages.stage import SegmentPrograms, Stage
from axonn_jax.pipe.stages.trace import Group, StepShape, Stretch, shifted_group, survey
from axonn_jax.pipe.stages.worker import StageWorker
from axonn_jax.pipe.timeline.spans import Recorder

if TYPE_CHECKING:
    from mpi4py import MPI

Plan = list[list[Group]]
"""Groups of every virtual stage of the model."""


def plan(
    parts: SplitModule,
    grid: Grid,
    pipe_shape: PipelineShape,
    ranges: Sequence[range],
    work: StepShape,
    keyed: bool,
    forms: Mapping[int, PrunedLayout | None] = MappingProxyType({}),
) -> Plan:
    """Trace the model abstractly, stage by stage; identical groups are traced once.

    Args:
        parts: The model, with abstract parameters.
        grid: Grid of the run. A stage of another process is traced on this process's mesh.
        pipe_shape: Sizes of the pipeline.
        ranges: Segments of every virtual stage.
        work: Sizes of a step.
        keyed: True for dropout.
        forms: Layouts of pruned parameters, by pipe rank, for the ranks of this process.
    """
    model: Any = parts.merge(parts.params)
    segments: Sequence[Segment] = model.segments
    kinds = [segment.alike for segment in segments]
    seen: dict[Any, Group] = {}
    stages: Plan = []
    x: jax.ShapeDtypeStruct | None = None
    for stage, stage_segments in enumerate(ranges):
        mesh = grid.meshes.get(pipe_shape.rank_of(stage), grid.mesh)
        stages.append([])
        for group_segments in group_ranges(kinds, stage_segments):
            if x is not None:
                # A neighbouring stage may be on other devices: activations keep their layout but change meshes.
                x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))
            form = (*kinds[group_segments.start : group_segments.stop], mesh, x and (x.shape, x.dtype, x.sharding.spec))
            # An empty kind marks a segment without an identical twin, such as the embedding or the head.
            if all(form[: len(group_segments)]) and form in seen:
                group = shifted_group(seen[form], segments, group_segments)
            else:
                pruned_layout = forms.get(pipe_shape.rank_of(stage))
                total = ranges[-1].stop
                stretch = survey(Stretch(parts, mesh, group_segments, total, work, keyed, x, forms=pruned_layout))
                group = seen[form] = Group(stretch, stretch.names)
            stages[-1].append(group)
            x = group.stretch.y
    return stages


def names_by_pp_rank(stages: Plan, pipe_shape: PipelineShape) -> list[tuple[str, ...]]:
    """Return the parameter names of every pipe rank, in the order of its stages."""
    groups = ([g for stage in pipe_shape.stages_of(rank) for g in stages[stage]] for rank in range(pipe_shape.pipe))
    return [tuple(dict.fromkeys(name for group in row for name in group.names)) for row in groups]


def shared(names: Sequence[Sequence[str]]) -> dict[str, tuple[int, ...]]:
    """Return the parameters that several pipe ranks hold, such as a tied table, each with its ranks in order."""
    holders: dict[str, list[int]] = {}
    for pp_rank, rank_names in enumerate(names):
        for name in rank_names:
            holders.setdefault(name, []).append(pp_rank)
    return {name: tuple(pp_ranks) for name, pp_ranks in holders.items() if len(pp_ranks) > 1}


def describe(
    segments: Sequence[Segment],
    ranges: Sequence[range],
    pipe_shape: PipelineShape,
    policy: PipelinePolicy,
    channel: str,
) -> list[str]:
    """Return lines of text: the segments and parameters of every stage, then the schedule."""
    lines = [
        f"stage {stage} (place {pipe_shape.rank_of(stage)}): {segments[r[0]].name} to {segments[r[-1]].name}, "
        f"{sum(segment.params for segment in segments[r.start : r.stop]):,} parameters"
        for stage, r in enumerate(ranges)
    ]
    return [*lines, *schedule_lines(pipe_shape, policy, channel)]


def schedule_lines(pipe_shape: PipelineShape, policy: PipelinePolicy, channel: str) -> list[str]:
    """Return lines of text about the schedule."""
    lines = [f"{pipe_shape.microbatches} microbatches a step, policy {policy}, channel {channel}"]
    if pipe_shape.microbatches < pipe_shape.pipe:
        idle = 1 - pipe_shape.microbatches / pipe_shape.pipe
        lines.append(
            f"train.microbatches = {pipe_shape.microbatches} is fewer than grid.pipe = {pipe_shape.pipe}: at least "
            f"{idle:.0%} of the places are idle at any time; {4 * pipe_shape.pipe} or more would keep them busy"
        )
    return lines


@dataclass
class Peers:
    """Connections of a process to its pipeline's other processes; local stand-ins in a run of one process."""

    sync: LocalSync | MpiSync
    heartbeat: Heartbeat
    status: RankStatus
    pipe: "MPI.Comm | None" = None
    """Communicator over the pipe axis: the processes with the same index within their stages."""
    leader: LeaderBroadcast | None = None
    """Broadcast of the order of tasks, for stages of several processes under a policy without a fixed order."""
    recorder: Recorder = field(default_factory=Recorder)

    def close(self) -> None:
        """Stop the threads."""
        if self.leader is not None:
            self.leader.close()
        self.heartbeat.close()


def connect(grid: Grid, policy: Policy, stall_timeout: float) -> Peers:
    """Connect the processes of a pipeline; collective over all processes of the run. Nothing is sent yet.

    Args:
        grid: Grid of the run.
        policy: Policy of the schedule.
        stall_timeout: Seconds without progress after which the heartbeat ends the run.
    """
    status = RankStatus()
    if grid.size == 1:
        return Peers(LocalSync(), Heartbeat(status, grid, stall_timeout), status)
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    pp_rank, within = divmod(grid.rank, grid.stage_processes)
    pipe = world.Split(within, pp_rank)
    leader = None
    # With a fixed order, every process of a stage knows the next task by itself.
    if grid.stage_processes > 1 and isinstance(policy, ByArrival):
        leader = LeaderBroadcast(world.Split(pp_rank, within))
    # A communicator of its own: the heartbeat's thread must not receive messages of the other ones.
    heartbeat = Heartbeat(status, grid, stall_timeout, world.Dup())
    return Peers(MpiSync(pipe), heartbeat, status, pipe, leader)


def compile_ranks(
    stages: Plan,
    grid: Grid,
    pipe_shape: PipelineShape,
    grad_specs: Mapping[int, Specs],
    shared: Mapping[str, tuple[int, ...]],
    policy: Policy,
    bucket: int,
    alive: Callable[[], None],
) -> CompiledRanks:
    """Compile the programs of this process's stages of a planned model.

    Args:
        stages: The plan.
        grid: Grid of the run.
        pipe_shape: Sizes of the pipeline.
        grad_specs: Layouts of the reduced gradients, by rank of the pipe and name.
        shared: Ranks of each parameter that several ranks hold.
        policy: Policy of the schedule.
        bucket: Elements of a bucket of the reduction.
        alive: Called before each stage, which may take minutes.
    """
    backwards, joins = policy.backwards(pipe_shape), policy.joins(pipe_shape)
    workers: dict[int, RankWorker] = {}
    for pp_rank in grid.meshes:
        compiled: dict[int, SegmentPrograms] = {}
        stage_of: dict[int, Stage] = {}
        for stage in pipe_shape.stages_of(pp_rank):
            alive()
            stage_of[stage] = Stage(stages[stage], backwards=backwards, joins=joins, compiled=compiled)
        specs = grad_specs[pp_rank]
        workers[pp_rank] = StageWorker(pp_rank, stage_of, specs, bucket=bucket, borrowed=borrowed(shared, pp_rank))
    arriving = {}
    for stage, groups in enumerate(stages):
        form = groups[0].stretch.x or groups[-1].stretch.y
        if pipe_shape.rank_of(stage) in grid.meshes and form is not None:
            arriving[stage] = form
    return CompiledRanks(workers, arriving)


def borrowed(shared: Mapping[str, tuple[int, ...]], pp_rank: int) -> frozenset[str]:
    """Return the parameters of a rank that an earlier rank holds too, and counts in the gradients' norm."""
    return frozenset(name for name, pp_ranks in shared.items() if pp_rank in pp_ranks[1:])


class CompiledPipeline:
    """Compiled programs and connections for batches of one form."""

    def __init__(self, ranks: CompiledRanks, pipe_shape: PipelineShape, peers: Peers, channel: str):
        self.ranks = ranks.workers
        self._ports = Ports(ranks.arriving, pipe_shape.stages, ranks.returning)
        self._pipe_shape, self._peers, self._channel = pipe_shape, peers, channel
        self.room: dict[int, int] = {}
        """By pipe rank, how many microbatches beyond those of 1F1B fit into memory; filled in once a step has run."""
        self.open()

    def open(self) -> None:
        """Open a channel and an executor; collective over the pipe.

        May be called again after `close`: unfinished tasks are dropped.
        """
        peers = self._peers
        self._carrier = open_channel(self._channel, self._ports, peers.pipe)
        self.executor = Executor(
            self.ranks, self._pipe_shape, self._carrier, peers.status, peers.recorder, peers.leader
        )

    def find_room(self, processes: int) -> None:
        """Compute `room` on the first call: the microbatches that fit in half of each device's unused memory."""
        for pp_rank, rank in self.ranks.items() if not self.room else ():
            microbatch_bytes = sum(stage.residual_bytes() for stage in rank.stages.values())
            inputs = [stage.x for stage in rank.stages.values()]
            microbatch_bytes += sum(x.size * x.dtype.itemsize for x in inputs if x is not None)
            self.room[pp_rank] = unused(rank.mesh, processes) * rank.mesh.size // (2 * max(1, microbatch_bytes))

    def close(self) -> None:
        """Stop the executor's threads and close the channel."""
        self.executor.close()

    def free(self) -> None:
        """Close the pipeline and free its communicators; collective over the pipe ranks."""
        self.close()
        self._carrier.free()
