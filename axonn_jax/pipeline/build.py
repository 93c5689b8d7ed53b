"""Puts a pipeline together for one batch shape: stages compiled, ranks, channel, executor."""

from collections.abc import Mapping, Sequence

import jax

from axonn_jax.channels.base import Ports
from axonn_jax.channels.choose import open_channel
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.account import unused
from axonn_jax.pipeline.connect import Links
from axonn_jax.pipeline.executor import Executor
from axonn_jax.pipeline.rank import Rank
from axonn_jax.pipeline.reduction import Reduction
from axonn_jax.pipeline.stage import Stage
from axonn_jax.pipeline.trace import Needs, Stretch, Work, survey
from axonn_jax.schedule.policies import Backwards
from axonn_jax.schedule.tasks import Layout
from axonn_jax.tensor.params import Parts, Specs

Plan = list[tuple[Stretch, Needs]]
"""Every virtual stage of the model: its stretch, and what it needs and hands on."""


def plan(parts: Parts, grid: Grid, layout: Layout, ranges: Sequence[range], work: Work, *, keyed: bool) -> Plan:
    """Traces the whole model stage by stage, abstractly; a stage of another process is traced on this one's mesh."""
    stages: Plan = []
    x: jax.ShapeDtypeStruct | None = None
    for stage, pieces in enumerate(ranges):
        mesh = grid.meshes.get(layout.rank_of(stage), grid.mesh)
        if x is not None:
            x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, x.sharding.spec))
        stretch = Stretch(parts, mesh, pieces, ranges[-1].stop, work, keyed, x)
        needs = survey(stretch)
        stages.append((stretch, needs))
        x = needs.y
    return stages


def names_by_place(stages: Plan, layout: Layout) -> list[tuple[str, ...]]:
    """The parameters of every place along the pipe, in the model's order of stages."""
    return [
        tuple(dict.fromkeys(name for stage in layout.stages_of(place) for name in stages[stage][1].names))
        for place in range(layout.pipe)
    ]


def shared(names: Sequence[Sequence[str]]) -> dict[str, tuple[int, int]]:
    """The parameters that two places hold (a tied table), with the first and the second of them.

    Raises ``UserError`` where more than two hold one.
    """
    holders: dict[str, list[int]] = {}
    for place, held in enumerate(names):
        for name in held:
            holders.setdefault(name, []).append(place)
    for name, places in holders.items():
        if len(places) > 2:
            raise UserError(f"parameter {name}", f"used by places {places} of the pipe", "use by at most two")
    return {name: (places[0], places[1]) for name, places in holders.items() if len(places) == 2}


class Pipe:
    """All that is compiled and connected for batches of one shape."""

    def __init__(
        self,
        stages: Plan,
        grid: Grid,
        layout: Layout,
        links: Links,
        grad_specs: Mapping[int, Specs],
        *,
        channel: str,
        backwards: Backwards,
        joins: bool,
        bucket: int,
    ):
        borrowed = {
            place: frozenset(
                name for name, (_, second) in shared(names_by_place(stages, layout)).items() if second == place
            )
            for place in grid.meshes
        }
        self.ranks: dict[int, Rank] = {}
        self.reductions: dict[int, Reduction] = {}
        for place in grid.meshes:
            own = {s: Stage(*stages[s], backwards=backwards, joins=joins) for s in layout.stages_of(place)}
            self.ranks[place] = Rank(place, own)
            self.reductions[place] = Reduction(
                list(own.values()), grad_specs[place], bucket=bucket, borrowed=borrowed[place]
            )
        arriving = {}
        for stage, (stretch, needs) in enumerate(stages):
            form = stretch.x or needs.y
            if layout.rank_of(stage) in grid.meshes and form is not None:
                arriving[stage] = form
        carrier = open_channel(channel, Ports(arriving, layout.stages), links.pipe, layout.rank_of)
        self.executor = Executor(self.ranks, layout, carrier, links.status, links.recorder, links.orders)
        self.room: dict[int, int] = {}
        """By place, microbatches for which there is memory beside those of 1F1B; known once a step has run."""

    def losses(self) -> dict[int, jax.Array]:
        """The mean loss of the step that has run, at the last place if it is here."""
        return {place: mean(rank.losses) for place, rank in self.ranks.items() if (mean := self.reductions[place].mean)}

    def find_room(self, processes: int) -> None:
        """Fills `room`, the first time: half of what a device of each place has never used is for more microbatches."""
        for place, rank in self.ranks.items() if not self.room else ():
            kept = sum(stage.bytes_kept() for stage in rank.stages.values())
            inputs = [stage.stretch.x for stage in rank.stages.values()]
            kept += sum(x.size * x.dtype.itemsize for x in inputs if x is not None)
            self.room[place] = unused(rank.mesh, processes) * rank.mesh.size // (2 * max(1, kept))

    def bytes_kept(self) -> int:
        """Bytes of activations that one microbatch keeps between forward and backward, of the stages here."""
        return sum(stage.bytes_kept() for rank in self.ranks.values() for stage in rank.stages.values())

    def close(self) -> None:
        """Ends its threads and its channel."""
        self.executor.close()
