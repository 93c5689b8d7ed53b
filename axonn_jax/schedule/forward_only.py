"""The order of an evaluation: forwards, and nothing else."""

from axonn_jax.schedule.dispatcher import Follower
from axonn_jax.schedule.tasks import Kind, Layout, Task


class ForwardOnly(Follower):
    """Runs every forward of a rank: microbatches in groups of `pipe`, a group through one virtual stage at a time."""

    def __init__(self, layout: Layout, rank: int):
        super().__init__(layout, rank)
        for start in range(0, layout.microbatches, layout.pipe):
            for stage in layout.stages_of(rank):
                for microbatch in range(start, min(start + layout.pipe, layout.microbatches)):
                    self.tell(Task(Kind.FORWARD, stage, microbatch))

    @property
    def done(self) -> bool:
        """Whether every forward has finished."""
        return not self._told and not self._running
