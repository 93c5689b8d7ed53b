"""The configuration of a training run: typed tables of documented fields, without jax."""

from dataclasses import dataclass, field

from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.models.presets import ModelConfig
from axonn_jax.options import (
    Accumulate,
    Activations,
    ChannelName,
    Count,
    CountOrZero,
    Decay,
    MatmulChoice,
    NotNegative,
    Offload,
    Optimizer,
    Order,
    PipelinePolicy,
    Positive,
    Precision,
    ReshardAfter,
    ResidualComm,
    ScanLayers,
    Schedule,
    Seed,
    Share,
    Zero,
)
from axonn_jax.pruned.config import PruneConfig

LOCK = "run.lock"
"""The file in `log.dir` that the run which trains there holds."""


@dataclass(frozen=True)
class DataConfig:
    """Where the tokens come from."""

    path: str
    """A directory written by `axonn-jax prepare`; a relative path starts at the current directory."""
    seed: Seed = 0
    """Seed of the order in which training sequences are drawn."""
    verify: bool = True
    """Compare the checksums of shards and tokenizer at the start, which reads all of the data once, in shares."""


@dataclass(frozen=True)
class TrainConfig:
    """The optimisation."""

    steps: Count = 1000
    """Optimizer steps of the whole run."""
    global_batch: Count = 32
    """Sequences a step, over all devices; a multiple of grid.data * grid.z * microbatches."""
    microbatches: Count = 1
    """Parts a step's batch is processed in, one after the other, gradients accumulated."""
    optimizer: Optimizer = "adamw"
    """Which optimizer."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    warmup: CountOrZero = 0
    """Steps of linear warm-up from 0 to the peak learning rate."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: down to `min_lr_ratio` of the peak at the last step, or constant."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the last step as a share of the peak (cosine and linear)."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay of weight matrices (adamw and lion; adam and sgd have none)."""
    beta1: Decay = 0.9
    """Decay of the first moment; for sgd, the momentum."""
    beta2: Decay = 0.95
    """Decay of the second moment (adamw, adam) or of the slow average (lion)."""
    eps: Positive = 1e-8
    """Added to the root of the second moment (adamw, adam)."""
    clip: NotNegative = 1.0
    """Gradients are scaled down to this global norm; 0: not clipped."""
    eval_every: CountOrZero = 0
    """Steps between evaluations on the held-out split; 0: only at the end."""
    eval_batches: Count = 8
    """Global batches that an evaluation reads at most; each held-out sample counts once."""
    sample_every: CountOrZero = 0
    """Steps between samples, the likeliest texts behind the prompts of `sample_prompts`; 0: none.
    Needs grid.pipe = 1."""
    sample_prompts: str = ""
    """A file of prompts: .jsonl, a JSON object with the key "prompt" a line; of any other name, a prompt a line."""
    seed: Seed = 0
    """Seed of the initial weights and of dropout."""


@dataclass(frozen=True)
class PipelineConfig:
    """How microbatches flow through the stages; used where grid.pipe is above 1."""

    policy: PipelinePolicy = "message"
    """Who decides which task a stage runs next: what has arrived (message), or a fixed order."""
    channel: ChannelName = "auto"
    """What carries activations between stages: local (one process), mpi4py, mpi4jax, or auto: local or mpi4py."""
    virtual_stages: Count = 1
    """Stages each rank of the pipe holds; more make the bubble smaller and the messages more."""
    in_flight: CountOrZero = 0
    """Microbatches between their first forward and their last backward (policy message). 0: with one stage a rank half
    as many again as 1F1B's, once a step has shown that memory has room for them; with more, 2 * grid.pipe."""
    split_backward: bool = True
    """Policy message: gradients of weights may be tasks of their own, which fill idle time. Only where
    memory.activations is none: else those that wait would keep all that is computed again."""
    split: str = ""
    """Pieces of each stage, such as "9,8" (embedding, two a block, head). Left out: balanced by FLOPs."""
    stall_timeout: Positive = 120.0
    """Seconds without any progress after which a run ends and says who waits for whom."""


@dataclass(frozen=True)
class MemoryConfig:
    """What is kept on the device, and in which precision."""

    precision: Precision = "auto"
    """Of compute and messages; master weights and moments stay fp32, and under fp16 the loss is scaled.
    auto: bf16 on accelerators, fp32 on CPU."""
    accumulate: Accumulate = "fp32"
    """What gradients add up in over microbatches, and travel in over grid.z and grid.data: fp32, or the compute
    precision, which under bf16 and fp16 saves 2 bytes a parameter and half of what is sent, and rounds every sum."""
    offload: Offload = "none"
    """What lives in host memory and is streamed through the device: nothing, or the optimizer's state with the fp32
    weights, which leaves 4 bytes a parameter on the device (6 where gradients add up in fp32). The optimizer must
    treat every parameter by itself, as all that train.optimizer names do."""
    zero: Zero = 0
    """1: fp32 weights and optimizer state are split over grid.data (ZeRO-1)."""
    activations: Activations = "none"
    """Recomputed in the backward pass: none, all of a block (full), or all but matmul outputs (dots)
    or what was all-reduced (save_collectives); offload is full with the block's input in host memory meanwhile."""
    reshard_after: ReshardAfter = "forward"
    """When weights gathered over grid.z are let go. forward: as early as activations allow, so that recomputation
    gathers again; backward: they stay from a microbatch's forward to its backward; step: gathered once for all
    microbatches, whose gradients add up whole and are reduce-scattered once. Each sends less and needs more memory.
    Needs grid.pipe = 1."""
    sequence_parallel: bool = False
    """Whether the residual stream is split over grid.y too, along the sequence: norms, dropout and what is kept of the
    stream then take 1/y of the memory. What matmuls read of it is gathered again in the backward pass."""
    bucket: Count = 16_000_000
    """Elements a device that travel together: gradients and weights over grid.data, with offload also to and from the
    host."""


@dataclass(frozen=True)
class TensorConfig:
    """How layers split over grid.x, grid.y and grid.z compute and communicate."""

    sub_batches: CountOrZero = 0
    """Equal parts of a device's sequences of a microbatch that run side by side, one's matmuls beside another's
    all-reduces. 0: auto, 2 on accelerators where grid.x or grid.y is above 1 and the sequences are even, else 1. Used
    where grid.pipe is 1."""
    order: Order = "auto"
    """Who orders a step's computation: package (found in virtual time), xla, or auto: package on accelerators
    where grid.z, grid.y or grid.x is above 1, or grid.data with fewer than 32 layers. Used where grid.pipe is 1."""
    residual_comm: ResidualComm = "all_reduce"
    """How blocks communicate over grid.x. all_reduce: heads and MLP features are split over grid.y, and what is wide is
    all-reduced; gather: they are split over grid.y and grid.x, and the narrow residual is gathered and scattered;
    auto: for attention and MLP apart, what sends less and divides (gather where y is small)."""
    scan_layers: ScanLayers = "auto"
    """Layers as one compiled body in a loop, so that compile time does not grow with their number, or unrolled. auto:
    scanned from 32 layers on, or on CPU with memory.activations other than none, unless the package orders the
    computation (tensor.order) or state is offloaded. Needs grid.pipe = 1."""
    matmul_layouts: MatmulChoice = "off"
    """Whether matmuls with weights are computed with operands or product in another orientation where that was found to
    be faster: off, auto (if a run with measure found it on this kind of device),
    measure (also what nothing is known of, at the start, in up to 20 s). It changes how sums are rounded."""


@dataclass(frozen=True)
class CheckpointConfig:
    """What is kept of a run so that it can go on; docs/checkpoints.md tells more."""

    every: CountOrZero = 0
    """Steps between checkpoints, written while training goes on; 0: only at the end, and when told to stop."""
    keep: Count = 2
    """The newest checkpoints that stay; where one is found damaged, the one before it is used."""
    keep_every: CountOrZero = 0
    """Checkpoints of steps that this divides stay for good; 0: none do."""
    resume: str = "auto"
    """Where to go on: auto (the newest valid checkpoint of log.dir, if any), never (what log.dir holds is set aside),
    or the path of a step_N or of a run directory."""
    weights: str = ""
    """Where nothing is resumed: start from the parameters of this checkpoint (a step_N, or a run directory) or of this
    pretrained directory (Hugging Face's, or one from `axonn-jax convert`), with new optimizer state, at step 0;
    {folder} stands for that of the config file."""


@dataclass(frozen=True)
class LogConfig:
    """What a run leaves behind."""

    dir: str = "runs/{name}"
    """The run directory; {name} stands for the config file's name without .toml."""
    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the `tensorboard` extra)."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything that defines a training run; each field is a table of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model: a preset, a preset with some sizes changed, or all sizes."""
    data: DataConfig
    """Where the tokens come from."""
    grid: GridShape = field(default_factory=GridShape)
    """How the devices are arranged; the product of the axes is the number of devices."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """The optimisation."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """How microbatches flow through the stages; used where grid.pipe is above 1."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """What is kept on the device, and in which precision."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """How layers split over grid.x, grid.y and grid.z compute and communicate."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """How experts are trained; used where model.experts is set."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """Which entries of the blocks' kernels are trained; the others are zero and stay zero (SAMO)."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """What is kept of a run so that it can go on; docs/checkpoints.md tells more."""
    log: LogConfig = field(default_factory=LogConfig)
    """What a run leaves behind."""
