"""What a process of a pipeline is doing, for error lines: written by its main thread, read by its watch."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from axonn_jax.schedule.tasks import Layout, Message

Phase = Literal["compiling", "between steps", "in a step", "saving"]

PHASES: tuple[Phase, ...] = get_args(Phase)
PATIENT: frozenset[Phase] = frozenset({"compiling", "saving"})
"""Phases that may take longer than the stall timeout, though not for ever (`watch.PATIENCE`)."""


@dataclass
class Status:
    """The last thing that happened here, and what should happen next."""

    phase: Phase = "compiling"
    step: int = 0
    finished: str = "nothing yet"
    """The last task that ran to its end."""
    running: str = ""
    """The task on the device, or what else is being waited for."""
    waiting: tuple[Message, ...] = ()
    """Messages without which nothing can be started."""
    since: float = field(default_factory=time.monotonic)
    """When this last changed, on the monotonic clock."""

    def now(self, phase: Phase | None = None, *, running: str = "", waiting: Sequence[Message] = ()) -> None:
        """Something happened."""
        self.running, self.waiting = running, tuple(waiting)
        if phase is not None:
            self.phase = phase
        self.since = time.monotonic()

    def describe(self, layout: Layout) -> str:
        """What it does or waits for, from whom: for people."""
        if self.phase != "in a step":
            return f"is {self.phase}"
        if self.running:
            return f"is at {self.running}"
        if self.waiting:
            return f"waits for {wanted(self.waiting[0], layout)}"
        return "is between two tasks"


def sender(message: Message, layout: Layout) -> int:
    """The place along the pipe that a message comes from."""
    return layout.rank_of(message.stage + (-1 if message.direction == "forward" else 1))


def wanted(message: Message, layout: Layout) -> str:
    """A message as what a receiver waits for, and from whom."""
    what = "the activations" if message.direction == "forward" else "the gradient"
    stage = message.stage + (-1 if message.direction == "forward" else 1)
    return f"{what} of microbatch {message.microbatch} from stage {stage}"
