"""Rules between settings: what each of them may be beside another one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields
from operator import attrgetter
from typing import Any, NamedTuple

from axonn_jax.adapters.config import LoraConfig
from axonn_jax.errors import UserError
from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.settings import MemoryConfig, TensorConfig, TrainConfig


@dataclass(frozen=True)
class Chosen:
    """Settings of a run, or of a `Trainer`, that rules look at."""

    grid: GridShape
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    tensor: TensorConfig = field(default_factory=TensorConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    moe: MoeConfig = field(default_factory=MoeConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    loss: bool = False
    """True for a `Trainer` with a loss of its own, of any Flax model."""
    experts: bool = True
    """True if the model may have experts."""


class Condition(NamedTuple):
    """A choice that others must go with."""

    words: str
    holds: Callable[[Chosen], bool]


class Rule(NamedTuple):
    """Values that a setting may have beside a choice."""

    key: str
    """The setting's table and name."""
    accepted: tuple[Any, ...]
    beside: Condition
    why: str = ""
    """Reason, or the way to have it, with the mark before it."""

    def __str__(self) -> str:
        return f"{' or '.join(map(str, self.accepted))} {self.beside.words}{self.why}"

    def check(self, settings: Chosen) -> None:
        """Raise ``UserError`` if the settings break this rule."""
        value = attrgetter(self.key)(settings)
        if self.beside.holds(settings) and value not in self.accepted:
            raise UserError(self.key, value, str(self))


PIPE = Condition("where grid.pipe is above 1", lambda settings: settings.grid.pipe > 1)
OFFLOAD = Condition("where memory.offload is optimizer", lambda settings: settings.memory.offload != "none")
NO_OFFLOAD = Condition("where memory.offload is none", lambda settings: settings.memory.offload == "none")
PRUNED = Condition("where weights are pruned", lambda settings: settings.prune.prunes)
LOSS = Condition("with loss=", lambda settings: settings.loss)
DENSE = Condition("in a model without model.experts", lambda settings: not settings.experts)
ADAPTED = Condition("with adapters", lambda settings: settings.lora.adapts)
ONCE = Condition("where train.eval_every is 0", lambda settings: not settings.train.eval_every)
_HONOURED = {"precision", "accumulate", "offload", "resident", "zero", "bucket"}
"""Settings of memory and tensor that count for any Flax model; the others are of the package's own layers."""


def _defaults(table: str, table_type: type, beside: Condition, why: dict[str, str] = {}) -> Iterator[Rule]:  # noqa: B006
    """Yield the rules by which settings keep their defaults beside a choice."""
    for option in fields(table_type):
        if option.name not in _HONOURED:
            yield Rule(f"{table}.{option.name}", (option.default,), beside, why.get(option.name, ""))


RULES = (
    # A pipeline's programs are cut out of one traced function equation by equation; a loop over layers is one equation.
    Rule("tensor.scan_layers", ("auto", "no"), PIPE),
    # Buckets of offloaded optimizer state consist of single layers' parameters.
    Rule("tensor.scan_layers", ("auto", "no"), OFFLOAD),
    # Forward and backward passes are separate programs, which both gather weights.
    Rule("memory.reshard_after", ("forward",), PIPE),
    Rule("memory.resident", ("auto",), NO_OFFLOAD),
    Rule("prune.at_step", (0,), PIPE, ": pruning from the first step on"),
    Rule("prune.method", ("magnitude", "random", "file"), PIPE, ": pruning from the first step on"),
    Rule("prune.scope", ("layer",), PIPE, ": no stage has all weights"),
    Rule("train.sample_every", (0,), PIPE, ": no process has all weights"),
    Rule("lora.rank", (0,), PRUNED),
    Rule("train.ema", (0,), PIPE),
    Rule("train.ema", (0,), PRUNED),
    # Adafactor and Muon look at whole matrices, of which pruning leaves some entries.
    Rule("train.optimizer", ("adamw", "adam", "sgd", "lion", "adamw_bf16"), PRUNED),
    Rule(
        "train.optimizer", ("adamw", "adam", "sgd", "lion", "adafactor", "adamw_bf16"), ADAPTED,
        ": Muon's part is kernels, which are frozen",
    ),
    Rule("train.patience", (0,), ONCE, ": an evaluation at the end ends nothing early"),
    Rule("grid.pipe", (1,), LOSS, "; a list of layers in ax.models.SequenceModel runs in a pipeline"),
    Rule("grid.expert", (1,), LOSS),
    *_defaults(
        "memory", MemoryConfig, LOSS,
        {"activations": "; nnx.remat, or nn.remat of Linen, around a model's blocks recomputes them"},
    ),
    *_defaults("tensor", TensorConfig, LOSS),
    *_defaults("moe", MoeConfig, DENSE),
)  # fmt: skip


def check_rules(settings: Chosen) -> None:
    """Raise ``UserError`` where a setting is refused beside another one."""
    settings.prune.check()
    settings.memory.resident_bytes  # noqa: B018  raises for a text that is no amount
    for rule in RULES:
        rule.check(settings)
