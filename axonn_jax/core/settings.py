"""Settings of a trainer: optimization, pipeline, memory, layers that are split; without jax."""

from dataclasses import dataclass

from axonn_jax.core.options import (
    Accumulate,
    Activations,
    ChannelName,
    Count,
    CountOrZero,
    Decay,
    NotNegative,
    Offload,
    Optimizer,
    Order,
    PathText,
    PipelinePolicy,
    Positive,
    Precision,
    ReshardAfter,
    ResidualComm,
    ScanLayers,
    Schedule,
    Seed,
    Settings,
    Share,
    Zero,
    amount_of_bytes,
)


@dataclass(frozen=True)
class TrainConfig(Settings):
    """Optimization: steps, batch, optimizer and learning rate."""

    table = "train"

    steps: Count = 1000
    """Optimizer steps of the whole run."""
    epochs: NotNegative = 0.0
    """Passes over the training rows, which give the number of steps; 0: train.steps does."""
    global_batch: Count = 32
    """Sequences a step, over all devices; a multiple of grid.data * grid.z * microbatches."""
    microbatches: Count = 1
    """Parts of a step's batch, processed one after the other with accumulated gradients."""
    optimizer: Optimizer = "adamw"
    """Optimizer of the weights. muon: of blocks' kernels, queries, keys and values each by itself, beside AdamW for the
    others; adamw_bf16: with first moments in bf16."""
    lr: Positive = 3e-4
    """Peak learning rate."""
    warmup: CountOrZero = 0
    """Steps of linear warm-up from 0 to the peak learning rate; all steps of a shorter run, which a line says."""
    schedule: Schedule = "cosine"
    """Learning rate after the warm-up: down to `min_lr_ratio` of the peak at the last step (cosine, linear), constant,
    constant and down in the last steps (wsd), or over the root of the step's number (inverse_sqrt)."""
    min_lr_ratio: Share = 0.1
    """Learning rate at the last step as a share of the peak (cosine, linear, wsd)."""
    decay_share: Share = 0.2
    """Share of the steps, the last ones, in which the rate falls linearly (wsd)."""
    weight_decay: NotNegative = 0.1
    """Decoupled weight decay, times the learning rate (adam and sgd have none)."""
    decay_norms: bool = False
    """Weight decay of norms and biases too, not of matrices and tables alone."""
    beta1: Decay = 0.9
    """Decay of the first moment; for sgd, the momentum."""
    beta2: Decay = 0.95
    """Decay of the second moment (adamw, adam) or of the slow average (lion)."""
    eps: Positive = 1e-8
    """Summand of the root of the second moment (adamw, adam)."""
    clip: NotNegative = 1.0
    """Largest global norm of gradients; larger ones are scaled down; 0: no clipping."""
    ema: Decay = 0.0
    """Decay of a moving average of the weights, such as 0.999, which evaluations, samples, `generate` and `convert`
    take; 0: none."""
    eval_every: CountOrZero = 0
    """Steps between evaluations on the held-out split; 0: only at the end."""
    patience: CountOrZero = 0
    """Evaluations in a row without a lower held-out loss behind which the run ends; 0: it trains all steps."""
    eval_batches: Count = 8
    """Most global batches of an evaluation; each held-out sample counts once."""
    sample_every: CountOrZero = 0
    """Steps between samples, greedy continuations of the prompts of `sample_prompts`; 0: no samples.
    Needs grid.pipe = 1."""
    sample_prompts: PathText = ""
    """File of prompts: in .jsonl, each line a JSON object with the key "prompt"; else, each line a prompt."""
    seed: Seed = 0
    """Seed of the initial weights and of dropout."""

    @property
    def stateful(self) -> Optimizer | None:
        """The optimizer; None where it keeps no state, as SGD without momentum."""
        return None if self.optimizer == "sgd" and not self.beta1 else self.optimizer

    def passes(self, rows: int) -> float:
        """Return the epochs of all steps over so many rows."""
        return self.steps * self.global_batch / rows


@dataclass(frozen=True)
class PipelineConfig(Settings):
    """Schedule of microbatches through the stages; used where grid.pipe is above 1."""

    table = "pipeline"

    policy: PipelinePolicy = "message"
    """Order of a stage's tasks: by arrival of their inputs (message), or a fixed order."""
    channel: ChannelName = "auto"
    """Transport of activations between stages: local (one process), mpi4py, mpi4jax; auto: local or mpi4py."""
    virtual_stages: Count = 1
    """Stages on each rank of the pipe; more stages shorten idle times and send more messages."""
    in_flight: CountOrZero = 0
    """Microbatches between first forward and last backward at a time (policy message). 0: with one stage a rank 1.5
    times 1F1B's, once a step has shown that memory has room; with more stages 2 * grid.pipe."""
    split_backward: bool = True
    """Allow separate tasks for gradients of weights, which fill idle time (policy message). Used where
    memory.activations is none, since waiting tasks would keep recomputed activations."""
    split: str = ""
    """Segments of each stage, such as "9,8" (embedding, two a block, head). Empty: balanced by FLOPs."""
    stall_timeout: Positive = 120.0
    """Seconds without progress after which a run ends with a report of the waiting processes."""


@dataclass(frozen=True)
class MemoryConfig(Settings):
    """Memory of the device: state and activations kept there, and their precision."""

    table = "memory"

    precision: Precision = "auto"
    """Precision of computation and messages; master weights and moments stay fp32, and under fp16 the loss is scaled.
    auto: bf16 on accelerators, fp32 on CPU."""
    accumulate: Accumulate = "fp32"
    """Dtype of gradients in sums over microbatches and in collectives over grid.z and grid.data. fp32; compute: the
    compute precision, which under bf16 and fp16 saves 2 bytes a parameter and half of the communication, and rounds
    every sum."""
    offload: Offload = "none"
    """State in host memory, streamed through the device. none; optimizer: optimizer state and fp32 weights, so that the
    device holds 4 bytes a parameter (6 where gradients add up in fp32). The optimizer must treat every parameter by
    itself, as all of train.optimizer do."""
    resident: str = "auto"
    """Bytes of offloaded state that stay on each device, such as 28GB; the rest travels. auto: half of those that the
    first update leaves unused; 0 on CPUs."""
    zero: Zero = 0
    """1: fp32 weights and optimizer state are split over grid.data (ZeRO-1). 0: every replica has them."""
    activations: Activations = "none"
    """Recomputation in the backward pass: none; full, all of a block; dots, all but outputs of matmuls;
    save_collectives, all but results of all-reduces; offload, as full, with the block's input in host memory meanwhile.
    """
    reshard_after: ReshardAfter = "forward"
    """Time at which weights gathered over grid.z are freed. forward: as early as activations allow; recomputation
    gathers again. backward: after a microbatch's backward. step: after all microbatches; whole gradients add up and are
    reduce-scattered once. From forward to step a run sends less and needs more memory. Other than forward needs
    grid.pipe = 1."""
    sequence_parallel: bool = False
    """Split the sequence of the residual stream over grid.y: norms, dropout and the kept stream take 1/y of the memory.
    The backward pass gathers the stream again for matmuls."""
    bucket: Count = 16_000_000
    """Elements per device in a collective: gradients and weights over grid.data; with offload also host transfers."""

    @property
    def resident_bytes(self) -> int | None:
        """Bytes of `resident`, None for auto; raises ``UserError`` for another text."""
        accepted = "auto, or an amount such as 28GB or 26GiB"
        return None if self.resident == "auto" else amount_of_bytes("memory.resident", self.resident, accepted)


@dataclass(frozen=True)
class TensorConfig(Settings):
    """Computation and communication of layers that are split over grid.x, grid.y and grid.z."""

    table = "tensor"

    sub_batches: CountOrZero = 0
    """Equal parts of a microbatch's sequences on a device; matmuls of one part run beside all-reduces of another. 0:
    auto, 2 on accelerators where grid.x or grid.y is above 1 and the sequences are even, else 1. Above 1, needs
    grid.pipe = 1."""
    order: Order = "auto"
    """Order of a step's computation: package (found in virtual time), xla, or auto: package on accelerators where
    grid.z, grid.y or grid.x is above 1, or grid.data with fewer than 32 layers. package needs grid.pipe = 1."""
    residual_comm: ResidualComm = "all_reduce"
    """Communication of blocks over grid.x. all_reduce: heads and MLP features are split over grid.y, and the wide
    features are all-reduced. gather: heads and MLP features are split over grid.y and grid.x, and the narrow residual
    is gathered and scattered. auto: for attention and MLP separately, the form that divides and sends less (gather
    where y is small)."""
    scan_layers: ScanLayers = "auto"
    """Compile one layer as the body of a loop over all layers, so that compile time does not grow with depth; no:
    unrolled layers. auto: yes from 32 layers on, or on CPU with memory.activations other than none, unless the package
    orders the computation (tensor.order) or state is offloaded. Needs grid.pipe = 1."""
