"""Requests to the planner, the candidates it may choose, and predictions for one."""

from dataclasses import dataclass, field
from functools import cached_property

from axonn_jax.core.adapters.config import LoraConfig, step_flops
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GRID_AXES, GridShape
from axonn_jax.core.hardware import AttentionDevice
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.core.ops.language import Param
from axonn_jax.core.options import Activations, AttentionKernel, Optimizer, PipelinePolicy, ReshardAfter, ResidualComm
from axonn_jax.core.tensor.kernel_choice import EVERY_TOKEN, AttentionForm, AttentionRule, choose_form
from axonn_jax.pipe.schedule.policies import Policy, may_split, policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.planning.communication import StepSpec
from axonn_jax.planning.declared.residual_comm import choose_residual_comm
from axonn_jax.planning.machines.machine import Device, Machine
from axonn_jax.planning.memory import AVERAGE, Precision, itemsize, state_item

SHORT = 0.17
"""Greatest shortfall of predicted memory found, as a share of a program's memory (docs/results.md)."""


@dataclass(frozen=True)
class OverlapFlags:
    """Collectives that run beside matmuls; SC 24's names in brackets."""

    gathers: bool = True
    """The next layer's weights, beside this layer's compute (OAG)."""
    scatters: bool = True
    """Gradients of weights, beside the rest of the backward pass (ORS)."""
    gradients: bool = True
    """Gradients of inputs, beside those of weights (OAR)."""
    forward: bool = True
    """Forward outputs: those of one sub-batch beside the other's matmuls."""


NO_OVERLAP = OverlapFlags(gathers=False, scatters=False, gradients=False, forward=False)


_DTYPES: dict[Precision, str] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
_CUDNN = 91100
"""Version of cuDNN that supports every GPU, as machine files have none."""


def select_attention_form(
    device: Device, precision: Precision, head_dim: int, seq: int, rule: AttentionRule = EVERY_TOKEN, *,
    packed: bool = False,
) -> AttentionForm:  # fmt: skip
    """Return the attention form that a program with a free choice uses on the device.

    On TPUs the fused kernel needs another package and a stage of one device, so plans do not count on it.
    """
    if not device.platform:
        return AttentionForm("blocked", "the machine file does not say device.platform")
    traits = AttentionDevice(device.platform, single_device=False)
    if device.platform == "cuda":
        major, minor = str(float(device.capability)).split(".")
        traits = AttentionDevice("cuda", (int(major), int(minor)), _CUDNN)
    return choose_form("auto", traits, _DTYPES[precision], head_dim, seq, rule, packed=packed)


@dataclass(frozen=True)
class PlanRequest:
    """A training step on a machine, without the candidates of the planner."""

    shape: ModelShape
    machine: Machine
    batch: int
    """Sequences a step over all devices."""
    precision: Precision
    gradient_item: int = 4
    """Bytes of an element of an accumulated gradient."""
    density: float = 1.0
    """Share of the entries of the blocks' kernels that is trained (prune.density)."""
    bucket: int = 16_000_000
    """Elements reduced, or updated on the host, together."""
    switches: OverlapFlags = field(default_factory=OverlapFlags)
    policy: PipelinePolicy = "message"
    split: bool = True
    """True if gradients of weights may be tasks of their own (policy message; see `schedule`)."""
    sequence_split: bool = False
    """True if the sequence of the residual stream is split over `y`."""
    residual_comm: ResidualComm = "all_reduce"
    """Communication of blocks with the residual stream."""
    attention: AttentionKernel = "auto"
    """Kernel of attention; auto: the program's choice there. Another value is taken unchecked."""

    moe: MoeConfig = field(default_factory=MoeConfig)
    """Training of experts, with their dispatch."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters, which alone are trained if there are any."""
    optimizer: Optimizer | None = "adamw"
    """Optimizer (train.optimizer); None: SGD without momentum."""
    average: bool = False
    """True if the optimizer's state has an average of the weights (train.ema)."""
    packed: bool = False
    """True if rows hold several documents, which do not see each other."""
    sub_batches: int = 0
    """Parts of a microbatch's sequences on a device (tensor.sub_batches)."""

    def divides(self, share: int, size: int, pipe: int) -> bool:
        """Return True if microbatches of `size` sequences are worth trying, where a device has `share` of the batch.

        A pipeline with fewer microbatches than stages is more bubble than work.
        """
        return share // size >= pipe if pipe > 1 else size % max(self.sub_batches, 1) == 0

    @property
    def attention_form(self) -> AttentionForm:
        """Kernel of attention that the step uses."""
        if self.attention != "auto":
            return AttentionForm(self.attention)
        shape, device = self.shape, self.machine.device
        rule = shape.attention_rule(0)
        return select_attention_form(device, self.precision, shape.head_dim, shape.seq_len, rule, packed=self.packed)

    def state_item(self, param: Param) -> float:
        """Return the bytes of optimizer state for an element of a parameter."""
        return state_item(self.optimizer, param) + AVERAGE * self.average

    def comm(self, grid: GridShape, activations: Activations) -> BlockComm:
        """Return the communication of blocks on a grid; raise ``UserError`` where it is impossible."""
        split = self.sequence_split
        return choose_residual_comm(self.residual_comm, self.shape, grid, activations, sequence_split=split)

    def step(self, candidate: "Candidate", sequences: int, comm: BlockComm) -> StepSpec:
        """Return the step of a candidate without a pipeline, with `sequences` over all devices."""
        policy = StepPolicy(
            candidate.microbatches, candidate.activations, candidate.reshard_after,
            gradient_item=self.gradient_item, density=self.density,
        )  # fmt: skip
        item = itemsize(self.precision)
        return StepSpec(self.shape, candidate.grid, sequences, policy, item, comm, self.moe, self.lora)

    def schedule(self, candidate: "Candidate") -> Policy:
        """Return the policy of a candidate's pipeline."""
        return policy_of(self.policy, candidate.in_flight, may_split(self.split, candidate.activations))

    def memory_limit(self) -> float:
        """Return the limit of predicted bytes per device; training still fits if it uses more by the share `SHORT`."""
        return self.machine.device.program_bytes * (1.0 - SHORT)


StatePlacement = tuple[bool, int]
"""Placement of the optimizer's state: True on the host, and the stage of ZeRO that shares it among replicas."""


@dataclass(frozen=True)
class Candidate:
    """Choices of the planner."""

    grid: GridShape
    microbatches: int = 1
    """Microbatches of a step, per pipeline."""
    activations: Activations = "none"
    virtual_stages: int = 1
    offload: bool = False
    zero: int = 0
    reshard_after: ReshardAfter = "forward"
    """Lifetime of gathered weights."""
    in_flight: int = 0
    """Microbatches in a pipeline at once (policy message), 0 for the default."""

    @property
    def once(self) -> bool:
        """True if weights are gathered, and gradients reduce-scattered over `z`, once a step."""
        return self.reshard_after == "step" and self.microbatches > 1

    @property
    def placement(self) -> StatePlacement:
        """Placement of the optimizer's state."""
        return self.offload, self.zero

    @property
    def lifetime(self) -> ReshardAfter:
        """Lifetime of gathered weights: a program of all layers keeps them if it does not recompute.

        A pipeline stage gathers again, because its programs do not keep weights for one another.
        """
        saved = (self.activations == "none" and self.grid.pipe == 1) or self.keeps_weights
        return "step" if self.once else "backward" if saved else "forward"

    @property
    def loops(self) -> bool:
        """True if one program runs several microbatches."""
        return self.grid.pipe == 1 and self.microbatches > 1

    @property
    def keeps_weights(self) -> bool:
        """True if gathered weights stay for the backward pass."""
        return self.reshard_after != "forward"

    @cached_property
    def pipeline(self) -> PipelineShape:
        """Sizes of the pipeline: ranks, microbatches and virtual stages."""
        return PipelineShape(self.grid.pipe, self.microbatches, self.virtual_stages)

    @property
    def shallow(self) -> bool:
        """True if no more microbatches are in flight than under 1F1B."""
        return 0 < self.in_flight <= self.grid.pipe

    def sequences(self, batch: int) -> int:
        """Sequences of a microbatch on a device."""
        return batch // (self.grid.batch_shards * self.microbatches)


@dataclass(frozen=True)
class MemoryUse:
    """Bytes on the fullest device, by kind."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    gathered: float
    buffers: float
    host: float = 0.0
    """On the host, for each device; not part of the total."""
    staying: float = 0.0
    """Bytes of optimizer state among those on the host that a run keeps on the device, in memory left over; not part of
    the total."""

    @property
    def total(self) -> float:
        """On the device."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.gathered + self.buffers


@dataclass(frozen=True)
class Estimate:
    """Prediction for a candidate."""

    candidate: Candidate
    step_s: float
    compute_s: float
    """Seconds of computation of the busiest stage, with recomputation."""
    update_s: float
    """The optimizer's."""
    bubble: float
    """Share of the step in which a stage waits for others."""
    memory: MemoryUse
    exposed: dict[str, float] = field(default_factory=dict)
    """Seconds of communication that nothing runs beside, by axis, of the busiest stage."""
    hidden: dict[str, float] = field(default_factory=dict)
    """Seconds of communication beside compute, by axis."""
    simulated: bool = False
    """True if the pipeline was simulated with its dispatchers, False for the closed form."""

    def peak_share(self, request: PlanRequest, recompute: bool = False) -> float:
        """FLOPs a second as a share of the devices' peak; with `recompute` the blocks' second forward counts too."""
        flops = step_flops(request.shape, request.lora, request.batch, recompute=recompute)
        return flops / (self.step_s * self.candidate.grid.devices * request.machine.peak(request.precision))

    @property
    def comm_s(self) -> dict[str, float]:
        """Seconds of communication by axis, exposed and hidden."""
        return {axis: self.exposed.get(axis, 0.0) + self.hidden.get(axis, 0.0) for axis in reversed(GRID_AXES)}

    @property
    def exposed_s(self) -> float:
        """Seconds of exposed communication, all axes together."""
        return sum(self.exposed.values())
