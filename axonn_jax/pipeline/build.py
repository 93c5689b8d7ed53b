"""Puts a pipeline together for one batch shape: stages compiled, ranks, channel, executor."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding

from axonn_jax.channels.base import Ports
from axonn_jax.channels.choose import open_channel
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid
from axonn_jax.memory.account import unused
from axonn_jax.memory.policies import read_policies
from axonn_jax.models.pieces import Piece
from axonn_jax.pipeline.connect import Links
from axonn_jax.pipeline.executor import Executor
from axonn_jax.pipeline.groups import Group, like
from axonn_jax.pipeline.rank import Rank
from axonn_jax.pipeline.reduction import Reduction
from axonn_jax.pipeline.stage import Programs, Stage
from axonn_jax.pipeline.trace import Stretch, Work, survey
from axonn_jax.schedule.groups import group_ranges
from axonn_jax.schedule.policies import Backwards
from axonn_jax.schedule.tasks import Layout
from axonn_jax.tensor.params import Parts, Specs

_SHAPES = 4
"""Batch shapes whose programs, threads and communicators are kept."""

Plan = list[list[Group]]
"""The groups of every virtual stage of the model: their stretches, and what these need and hand on."""


def plan(parts: Parts, grid: Grid, layout: Layout, ranges: Sequence[range], work: Work, *, keyed: bool) -> Plan:
    """Traces the model stage by stage, abstractly, groups that are alike once.

    A stage of another process is traced on this one's mesh.
    """
    pieces: Sequence[Piece] = parts.rebuild(parts.params).pieces  # type: ignore[attr-defined]
    kinds = [piece.alike for piece in pieces]
    uniform = read_policies(work.activations).uniform is not None
    seen: dict[Any, Group] = {}
    stages: Plan = []
    x: jax.ShapeDtypeStruct | None = None
    for stage, whole in enumerate(ranges):
        mesh = grid.meshes.get(layout.rank_of(stage), grid.mesh)
        stages.append([])
        for own in group_ranges(kinds, whole) if uniform else [whole]:
            if x is not None:
                x = jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, x.sharding.spec))
            form = (*kinds[own.start : own.stop], mesh, x and (x.shape, x.dtype, x.sharding.spec))
            if uniform and all(form[: len(own)]) and form in seen:
                group = like(seen[form], pieces, own)
            else:
                stretch = Stretch(parts, mesh, own, ranges[-1].stop, work, keyed, x)
                needs = survey(stretch)
                group = seen[form] = Group(stretch, needs, needs.names)
            stages[-1].append(group)
            x = group.needs.y
    return stages


def names_by_place(stages: Plan, layout: Layout) -> list[tuple[str, ...]]:
    """The parameters of every place along the pipe, in the model's order of stages."""
    return [
        tuple(dict.fromkeys(n for stage in layout.stages_of(place) for group in stages[stage] for n in group.names))
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
            compiled: dict[int, Programs] = {}
            own = {}
            for stage in layout.stages_of(place):
                links.status.now()  # each may take minutes to compile
                own[stage] = Stage(stages[stage], backwards=backwards, joins=joins, compiled=compiled)
            self.ranks[place] = Rank(place, own)
            self.reductions[place] = Reduction(
                list(own.values()), grad_specs[place], bucket=bucket, borrowed=borrowed[place]
            )
        arriving = {}
        for stage, groups in enumerate(stages):
            form = groups[0].stretch.x or groups[-1].needs.y
            if layout.rank_of(stage) in grid.meshes and form is not None:
                arriving[stage] = form
        self._ports, self._layout, self._links, self._channel = Ports(arriving, layout.stages), layout, links, channel
        self.room: dict[int, int] = {}
        """By place, microbatches for which there is memory beside those of 1F1B; known once a step has run."""
        self.open()

    def open(self) -> None:
        """Connects it, anew after `close`: what was under way then is forgotten. Collective over the pipe's places."""
        links = self._links
        self._carrier = open_channel(self._channel, self._ports, links.pipe, self._layout.rank_of)
        self.executor = Executor(self.ranks, self._layout, self._carrier, links.status, links.recorder, links.orders)

    def losses(self) -> dict[int, jax.Array]:
        """The mean loss of the step that has run, at the last place if it is here."""
        return {place: mean(rank.losses) for place, rank in self.ranks.items() if (mean := self.reductions[place].mean)}

    def find_room(self, processes: int) -> None:
        """Fills `room`, the first time: half of what a device of each place has never used is for more microbatches."""
        for place, rank in self.ranks.items() if not self.room else ():
            kept = sum(stage.bytes_kept() for stage in rank.stages.values())
            inputs = [stage.x for stage in rank.stages.values()]
            kept += sum(x.size * x.dtype.itemsize for x in inputs if x is not None)
            self.room[place] = unused(rank.mesh, processes) * rank.mesh.size // (2 * max(1, kept))

    def bytes_kept(self) -> int:
        """Bytes of activations that one microbatch keeps between forward and backward, of the stages here."""
        return sum(stage.bytes_kept() for rank in self.ranks.values() for stage in rank.stages.values())

    def close(self) -> None:
        """Ends its threads and its channel."""
        self.executor.close()

    def free(self) -> None:
        """Closes it and gives back its communicators; collective over the pipe's places."""
        self.close()
        self._carrier.free()


class Pipes:
    """A trainer's pipes by batch shape; those of the shapes used last are kept."""

    def __init__(self) -> None:
        self._pipes: dict[tuple[int, int], Pipe] = {}  # the one used last at the end

    def __len__(self) -> int:
        return len(self._pipes)

    def values(self) -> list[Pipe]:
        """All that are kept."""
        return list(self._pipes.values())

    def get(self, shape: tuple[int, int], make: Callable[[], Pipe]) -> Pipe:
        """The pipe for batches of a shape, made if there is none.

        Collective over the pipe's places where one is made: it may take the place of the one that was not used longest.
        """
        pipe = self._pipes.pop(shape, None)
        if pipe is None:
            while len(self._pipes) >= _SHAPES:
                self._pipes.pop(next(iter(self._pipes))).free()
            pipe = make()
        self._pipes[shape] = pipe
        return pipe

    def reopen(self) -> None:
        """Makes all of them forget what was under way."""
        for pipe in self.values():
            pipe.close()
            pipe.open()

    def close(self) -> None:
        """Ends them all."""
        for pipe in self.values():
            pipe.close()
        self._pipes.clear()
