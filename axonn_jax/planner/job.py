"""What the planner is asked about, what it may choose, and what it finds for a choice."""

from dataclasses import dataclass, field

from axonn_jax.grid import GridShape
from axonn_jax.models.inner import Inner, InnerFeatures, choose_inner
from axonn_jax.models.shape import ModelShape
from axonn_jax.planner.attention import form_taken
from axonn_jax.planner.communication import Gather
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.memory import Policy as Activations
from axonn_jax.planner.memory import Precision
from axonn_jax.planner.tasks import Switches
from axonn_jax.schedule.policies import Policy, may_split
from axonn_jax.tensor.attention_forms import AttentionForm, AttentionKernel

SHORT = 0.17
"""How far below what a program takes its predicted memory was at worst, as a share of what it takes
(docs/results/planner_memory.md)."""


@dataclass(frozen=True)
class Job:
    """A training step on a machine, without the choices of the planner."""

    shape: ModelShape
    machine: Machine
    batch: int
    """Sequences a step over all devices."""
    precision: Precision
    accumulate: int = 4
    """Bytes of an accumulated gradient."""
    bucket: int = 16_000_000
    """Elements reduced, or updated on the host, together."""
    switches: Switches = field(default_factory=Switches)
    policy: Policy = "message"
    split: bool = True
    """Whether gradients of weights may be tasks of their own (policy message; see `splits`)."""
    sequence_parallel: bool = False
    """Whether the sequence of the residual stream is split over `y`."""
    inner_features: InnerFeatures = "y"
    """What splits the features inside blocks."""
    attention: AttentionKernel = "auto"
    """The form of attention; auto: what the program takes there. One that is said is not checked: another program's."""

    @property
    def attention_form(self) -> AttentionForm:
        """The form that is computed."""
        if self.attention != "auto":
            return AttentionForm(self.attention)
        return form_taken(self.machine.device, self.precision, self.shape.head_dim, self.shape.seq_len)

    def inner(self, grid: GridShape, activations: Activations) -> Inner:
        """How they are split on a grid; raises ``UserError`` where they cannot be as they must."""
        return choose_inner(
            self.inner_features, self.shape, grid, activations, sequence_parallel=self.sequence_parallel
        )

    def splits(self, activations: Activations) -> bool:
        """Whether a pipeline's gradients of weights are tasks of their own."""
        return self.policy == "zero-bubble" or (self.policy == "message" and may_split(self.split, activations))

    @property
    def flops(self) -> int:
        """FLOPs of a step without recomputation, as published counts have them."""
        return self.shape.step_flops(self.batch)

    def memory_limit(self) -> float:
        """Bytes that training may be predicted to take of a device, so that it fits where it takes more by `SHORT`."""
        return self.machine.device.program_bytes * (1.0 - SHORT)


Place = tuple[bool, int]
"""Where the optimizer's state is: whether on the host, and the stage of ZeRO that shares it among replicas."""


@dataclass(frozen=True)
class Choice:
    """What the planner decides."""

    grid: GridShape
    microbatches: int = 1
    """Of a step, per pipeline."""
    activations: Activations = "none"
    virtual_stages: int = 1
    offload: bool = False
    zero: int = 0
    gather: Gather = "layer"
    """How long gathered weights live."""
    in_flight: int = 0
    """Microbatches in a pipeline at once (policy message), 0 for the default."""

    @property
    def once(self) -> bool:
        """Whether weights are gathered, and gradients reduce-scattered over `z`, once a step."""
        return self.gather == "step" and self.microbatches > 1

    @property
    def place(self) -> Place:
        """Where the optimizer's state is."""
        return self.offload, self.zero

    @property
    def loops(self) -> bool:
        """Whether one program runs several microbatches."""
        return self.grid.pipe == 1 and self.microbatches > 1

    @property
    def again(self) -> bool:
        """Whether recomputation gathers weights again."""
        return self.gather == "layer" and self.activations != "none"

    def sequences(self, batch: int) -> int:
        """Sequences of a microbatch on a device."""
        return batch // (self.grid.batch_shards * self.microbatches)


@dataclass(frozen=True)
class Memory:
    """Bytes on the fullest device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buffers: float
    host: float = 0.0
    """On the host, for each device; not part of the total."""

    @property
    def total(self) -> float:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered + self.buffers


@dataclass(frozen=True)
class Estimate:
    """What a choice is predicted to take."""

    choice: Choice
    step_s: float
    compute_s: float
    """Of the busiest stage, with recomputation."""
    update_s: float
    """The optimizer's."""
    bubble: float
    """Share of the step in which a stage waits for others."""
    memory: Memory
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds of communication that nothing runs beside, by axis, of the busiest stage."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Seconds of communication beside compute, by axis."""
    simulated: bool = False
    """Whether the pipeline was run by its dispatchers, rather than estimated in closed form."""

    def peak_share(self, job: Job, recompute: bool = False) -> float:
        """FLOPs a second as a share of the devices' peak; with `recompute` the blocks' second forward counts too."""
        flops = job.shape.step_flops(job.batch, recompute=recompute)
        return flops / (self.step_s * self.choice.grid.devices * job.machine.peak(job.precision))

    @property
    def comm_s(self) -> dict[str, float]:
        """Seconds of communication by axis, exposed and hidden."""
        return {
            axis: self.exposed.get(axis, 0.0) + self.hidden.get(axis, 0.0) for axis in ("x", "y", "z", "data", "pipe")
        }

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed communication, all axes together."""
        return sum(self.exposed.values())
