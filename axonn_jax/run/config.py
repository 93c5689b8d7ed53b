"""Configuration of a training run: one dataclass per table of the TOML file, without importing jax."""

from dataclasses import dataclass, field

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import ModelConfig
from axonn_jax.core.options import Count, CountOrZero, PathText, Settings
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig, TensorConfig, TrainConfig
from axonn_jax.files.data.corpora import DataConfig
from axonn_jax.files.data.goldfish import GoldfishConfig


@dataclass(frozen=True)
class CheckpointConfig(Settings):
    """Checkpoints of a run; see docs/checkpoints.md."""

    table = "checkpoint"

    every: CountOrZero = 0
    """Steps between checkpoints, written while training goes on; 0: only at the end and on a signal to stop."""
    keep: Count = 2
    """Number of newest checkpoints to keep; a damaged one is replaced by the one before."""
    keep_every: CountOrZero = 0
    """Multiple of steps whose checkpoints are kept for good; 0: none."""
    best: bool = False
    """Save behind each evaluation whose held-out loss is the lowest so far, and keep that checkpoint."""
    resume: PathText = "auto"
    """Checkpoint to resume from: auto (the newest valid one of log.dir, if any), never (contents of log.dir are moved
    aside), or the path of a step_N or of a run directory."""
    weights: PathText = ""
    """Initial parameters of a run that resumes nothing: the path of a checkpoint (a step_N, or a run directory) or of a
    pretrained directory (Hugging Face's, or one from `axonn-jax convert`), or org/name or org/name@revision of a model
    on the Hub; optimizer state and step are new. {folder} stands for the config file's folder."""
    adapter: PathText = ""
    """Adapter that a run of adapters begins with, trained further beside `checkpoint.weights`: the directory of PEFT's
    files, of a run or of a checkpoint. Its rank, alpha and targets hold where [lora] leaves them out."""


@dataclass(frozen=True)
class LogConfig(Settings):
    """Files of a run."""

    table = "log"

    dir: PathText = "runs/{name}"
    """Run directory; {name} stands for the config file's name without .toml."""
    every: Count = 1
    """Steps between lines of metrics.jsonl."""
    tensorboard: bool = False
    """Also write TensorBoard event files (needs the `tensorboard` extra)."""
    wandb: str = ""
    """Project of Weights & Biases that gets the run too (needs the `wandb` extra); WANDB_MODE=offline: without a
    network. Empty: none."""
    mlflow: str = ""
    """Experiment of MLflow that gets the run too, at MLFLOW_TRACKING_URI (needs the `mlflow` extra). Empty: none."""
    tracker: str = ""
    """Class of your own that gets the run too, as package.module:Class (docs/train.md). Empty: none."""
    profile: str = ""
    """Steps of which a trace of jax.profiler is written, the first and the last with a colon, such as "10:13"; at most
    100. Empty: none."""

    @property
    def profiled(self) -> range:
        """Return the steps of `profile`; raise ``UserError`` for another text."""
        first, colon, last = self.profile.partition(":")
        if not self.profile:
            return range(0)
        if not (colon and first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last) < int(first) + 100):
            raise UserError("log.profile", self.profile, 'first and last of at most 100 steps, such as "10:13"')
        return range(int(first), int(last) + 1)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Definition of a training run; each field is a table of the TOML file."""

    model: ModelConfig = field(default_factory=ModelConfig)
    """The model: a preset, a preset with some sizes changed, or all sizes."""
    data: DataConfig
    """Source of the tokens."""
    grid: GridShape = field(default_factory=GridShape)
    """Arrangement of the devices; the product of the axes is the number of devices."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimization: steps, batch, optimizer and learning rate."""
    goldfish: GoldfishConfig = field(default_factory=GoldfishConfig)
    """Targets left out of the training loss, so that documents which are often repeated are not memorised."""
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    """Schedule of microbatches through the stages; used where grid.pipe is above 1."""
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    """Memory of the device: state and activations kept there, and their precision."""
    tensor: TensorConfig = field(default_factory=TensorConfig)
    """Computation and communication of layers that are split over grid.x, grid.y and grid.z."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Training of experts; used where model.experts is set."""
    prune: PruneConfig = field(default_factory=PruneConfig)
    """Pruning of the blocks' kernels: entries outside the mask are zero and stay zero (SAMO)."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Low-rank adapters (LoRA): they alone are trained, beside the frozen weights of `checkpoint.weights`."""
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    """Checkpoints of a run; see docs/checkpoints.md."""
    log: LogConfig = field(default_factory=LogConfig)
    """Files of a run."""

    @property
    def rows(self) -> int:
        """Sequences of a microbatch on a device."""
        return self.train.global_batch // self.train.microbatches // self.grid.batch_shards
