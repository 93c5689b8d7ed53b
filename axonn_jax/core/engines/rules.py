"""Rules between settings: the values that one setting allows for another."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import NamedTuple

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, TensorConfig, TrainConfig


@dataclass(frozen=True)
class RunSettings:
    """Settings of a run, or of a `Trainer`, that the rules inspect."""

    grid: GridShape
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: bool = False
    """True for a `Trainer` with a user's loss, for any Flax model."""
    experts: bool = True
    """True if the model may have experts."""


class Condition(NamedTuple):
    """A choice that restricts other settings, with the words that describe it in an error."""

    words: str
    holds: Callable[[RunSettings], bool]


class Rule(NamedTuple):
    """Values that a setting may have under a condition."""

    key: str
    """The setting's table and name."""
    accepted: tuple[object, ...]
    condition: Condition
    why: str = ""
    """Reason or alternative, starting with its punctuation mark; empty without one."""

    def __str__(self) -> str:
        return f"{' or '.join(map(str, self.accepted))} {self.condition.words}{self.why}"

    def check(self, settings: RunSettings) -> None:
        """Raise ``UserError`` if the settings break this rule."""
        value = attrgetter(self.key)(settings)
        if self.condition.holds(settings) and value not in self.accepted:
            raise UserError(self.key, value, str(self))


PIPE = Condition("where grid.pipe is above 1", lambda settings: settings.grid.pipe > 1)
OFFLOAD = Condition("where memory.offload is optimizer", lambda settings: settings.memory.offload != "none")
NO_OFFLOAD = Condition("where memory.offload is none", lambda settings: settings.memory.offload == "none")
PRUNED = Condition("where weights are pruned", lambda settings: settings.prune.prunes)
LOSS = Condition("with loss=", lambda settings: settings.loss)
LOSS_AT_ONCE = Condition("with loss= and no pipeline", lambda settings: settings.loss and settings.grid.pipe == 1)
LOSS_IN_STAGES = Condition("with loss= in a pipeline", lambda settings: settings.loss and settings.grid.pipe > 1)
DENSE = Condition("in a model without model.experts", lambda settings: not settings.experts)
ADAPTED = Condition("with adapters", lambda settings: settings.lora.adapts)
ONCE = Condition("where train.eval_every is 0", lambda settings: not settings.train.eval_every)
_HONOURED = {"precision", "accumulate", "activations", "offload", "resident", "zero", "bucket"}
"""Fields of [memory] and [tensor] that apply to any Flax model, or have a rule of their own; the others only affect the
package's own layers."""


def _defaults(table: str, table_type: type, condition: Condition, why: dict[str, str] = {}) -> Iterator[Rule]:  # noqa: B006
    """Yield the rules that pin a table's fields to their defaults under a condition."""
    for option in fields(table_type):
        if option.name not in _HONOURED:
            yield Rule(f"{table}.{option.name}", (option.default,), condition, why.get(option.name, ""))


RULES = (
    # A pipeline's programs are cut from one traced function at equation boundaries; a scan over layers is a single
    # equation and cannot be cut.
    Rule("tensor.scan_layers", ("auto", "no"), PIPE),
    # Buckets of offloaded optimizer state hold the parameters of individual layers, not of stacked ones.
    Rule("tensor.scan_layers", ("auto", "no"), OFFLOAD),
    # A stage's programs run one at a time between messages, in XLA's order.
    Rule("tensor.order", ("auto", "xla"), PIPE),
    Rule("tensor.sub_batches", (0, 1), PIPE, ": microbatches overlap by themselves"),
    # Forward and backward passes are separate programs, and each gathers the weights itself.
    Rule("memory.reshard_after", ("forward",), PIPE),
    Rule("memory.resident", ("auto",), NO_OFFLOAD),
    Rule("prune.at_step", (0,), PIPE, ": pruning from the first step on"),
    Rule("prune.method", ("magnitude", "random", "file"), PIPE, ": pruning from the first step on"),
    Rule("prune.scope", ("layer",), PIPE, ": no stage has all weights"),
    Rule("train.sample_every", (0,), PIPE, ": no process has all weights"),
    Rule("lora.rank", (0,), PRUNED),
    Rule("train.ema", (0,), PIPE),
    Rule("train.ema", (0,), PRUNED),
    # Adafactor and Muon need full matrices, but pruned parameters only store their surviving entries.
    Rule("train.optimizer", ("adamw", "adam", "sgd", "lion", "adamw_bf16"), PRUNED),
    Rule(
        "train.optimizer", ("adamw", "adam", "sgd", "lion", "adafactor", "adamw_bf16"), ADAPTED,
        ": Muon's part is kernels, which are frozen",
    ),
    Rule("train.patience", (0,), ONCE, ": an evaluation at the end ends nothing early"),
    Rule("grid.expert", (1,), LOSS),
    Rule(
        "memory.activations", ("none",), LOSS_AT_ONCE,
        "; nnx.remat, or nn.remat of Linen, around a model's blocks recomputes them",
    ),
    Rule("memory.activations", ("none", "full", "dots", "save_collectives"), LOSS_IN_STAGES),
    *_defaults("memory", MemoryConfig, LOSS),
    *_defaults("tensor", TensorConfig, LOSS),
    *_defaults("moe", MoeConfig, DENSE),
)  # fmt: skip


def check_rules(settings: RunSettings) -> None:
    """Check every rule.

    Args:
        settings: Settings of the run; tables left at their defaults restrict nothing.

    Raises:
        UserError: A setting has a value that another setting rules out.
    """
    settings.prune.check()
    settings.memory.resident_bytes  # noqa: B018  raises for a text that is not an amount
    for rule in RULES:
        rule.check(settings)
