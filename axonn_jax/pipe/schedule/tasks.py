"""Tasks of a pipelined training step, the messages between them, and the ranks that virtual stages live on."""

import enum
from dataclasses import dataclass
from typing import Literal, NamedTuple

from axonn_jax.core.errors import UserError

Direction = Literal["forward", "backward"]
"""Direction of a message: activations go forward, their gradients backward."""


class Kind(enum.StrEnum):
    """Kind of a task, by the values it computes."""

    FORWARD = "F"
    """Outputs of the stage from its inputs."""
    BACKWARD = "B"
    """Gradients of the inputs and of the weights in one task."""
    BACKWARD_INPUT = "I"
    """Gradients of the inputs only; the previous stage waits for them."""
    BACKWARD_WEIGHT = "W"
    """Gradients of the weights only; nobody waits for them before the optimizer."""

    __hash__ = str.__hash__  # Enum.__hash__ is Python code, and tasks are looked up by the million


class Task(NamedTuple):
    """One kind of work of one virtual stage for one microbatch."""

    kind: Kind
    """Kind of work."""
    stage: int
    """Virtual stage, 0 to `pipe * virtual_stages - 1`, in forward order."""
    microbatch: int
    """Microbatch of the step, from 0."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.stage}.{self.microbatch}"


class Message(NamedTuple):
    """Message between neighbouring stages; it makes exactly one task runnable at its destination."""

    direction: Direction
    """`forward`: activations; `backward`: gradients of activations."""
    stage: int
    """Virtual stage that receives the message."""
    microbatch: int
    """Microbatch of the step, from 0."""

    @property
    def sender(self) -> int:
        """Virtual stage that sends the message."""
        return self.stage + (-1 if self.direction == "forward" else 1)

    def __str__(self) -> str:
        return f"{self.direction} message for stage {self.stage}, microbatch {self.microbatch}"


@dataclass(frozen=True)
class PipelineShape:
    """Sizes of a pipelined step, and the rank of each virtual stage.

    A "rank" is an index along the pipe axis. Virtual stages are assigned round-robin (stage `s` lives on rank
    `s % pipe`), so a microbatch passes every rank `virtual_stages` times.

    Raises:
        UserError: A size is below 1.
    """

    pipe: int
    """Ranks of the pipeline."""
    microbatches: int
    """Microbatches per step."""
    virtual_stages: int = 1
    """Stages on each rank."""

    def __post_init__(self) -> None:
        for field, size in (
            ("grid.pipe", self.pipe),
            ("train.microbatches", self.microbatches),
            ("pipeline.virtual_stages", self.virtual_stages),
        ):
            if size < 1:
                raise UserError(field, size, "an integer of at least 1")

    @property
    def stages(self) -> int:
        """Number of virtual stages of the pipeline."""
        return self.pipe * self.virtual_stages

    @property
    def pairs(self) -> int:
        """Number of (stage, microbatch) pairs of a rank."""
        return self.microbatches * self.virtual_stages

    @property
    def group(self) -> int:
        """Number of microbatches that pass a rank's stages together; with one stage, grouping makes no difference."""
        return self.pipe if self.virtual_stages > 1 else 1

    @property
    def first(self) -> int:
        """Virtual stage that reads the tokens."""
        return 0

    @property
    def last(self) -> int:
        """Virtual stage that computes the loss."""
        return self.pipe * self.virtual_stages - 1

    def rank_of(self, stage: int) -> int:
        """Return the rank that a virtual stage lives on."""
        return stage % self.pipe

    def stages_of(self, rank: int) -> range:
        """Return the virtual stages of a rank, shallowest first."""
        return range(rank, self.stages, self.pipe)


def sends(task: Task, shape: PipelineShape) -> Message | None:
    """Return the message that a finished task sends, or None.

    A forward sends its activations to the next stage; a backward (fused, or of the inputs) sends its gradients to the
    previous one.
    """
    kind, stage, microbatch = task
    if kind is Kind.FORWARD:
        return Message("forward", stage + 1, microbatch) if stage < shape.last else None
    if kind is Kind.BACKWARD_WEIGHT or stage == 0:
        return None
    return Message("backward", stage - 1, microbatch)


def needs(task: Task, shape: PipelineShape) -> Message | None:
    """Return the message that a task needs from another rank, or None."""
    if task.kind is Kind.FORWARD:
        return Message("forward", task.stage, task.microbatch) if task.stage > 0 else None
    if task.kind is Kind.BACKWARD_WEIGHT or task.stage == shape.last:
        return None
    return Message("backward", task.stage, task.microbatch)


def predecessor(task: Task) -> Kind | None:
    """Return the kind of task that must start first on the same stage and microbatch, if any."""
    if task.kind is Kind.FORWARD:
        return None
    return Kind.BACKWARD_INPUT if task.kind is Kind.BACKWARD_WEIGHT else Kind.FORWARD
