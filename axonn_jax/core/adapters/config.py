"""Settings of low-rank adapters; no jax."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import CountOrZero, Positive, Probability, Settings, typed

Target = Literal["q", "k", "v", "o", "gate", "up", "down"]
"""Projections of a block: queries, keys, values, attention output, and those of the MLP."""
LORA = "lora"
"""Key of the adapters' metadata in a checkpoint's manifest."""
TARGETS: tuple[Target, ...] = get_args(Target)
IDENTITY = ("rank", "alpha", "targets", "rslora")
"""Settings that identify adapters: with another value they are different ones. Dropout affects training only."""


@dataclass(frozen=True)
class LoraConfig(Settings):
    """Low-rank adapters (LoRA): they alone are trained, beside the frozen weights of `checkpoint.weights`."""

    table = "lora"

    rank: CountOrZero = 0
    """Rank of every adapter. 0: no adapters, all weights are trained."""
    alpha: Positive = 32.0
    """Factor on what the adapters add, over the rank."""
    targets: tuple[str, ...] = TARGETS
    """Projections of the blocks that get adapters: q, k, v, o, gate, up, down; gate where the model has one."""
    rslora: bool = False
    """Divide alpha by the root of the rank instead of the rank (rsLoRA)."""
    dropout: Probability = 0.0
    """Probability with which training drops an input feature of an adapter."""

    @property
    def adapts(self) -> bool:
        """True if the model has adapters."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """Factor on the product of A and B: alpha over the rank, or over its root for rsLoRA."""
        return float(self.alpha / (self.rank**0.5 if self.rslora else self.rank))

    def check(self) -> None:
        """Raise ``UserError`` if settings contradict each other or a target is unknown."""
        if not self.adapts:
            if self != LoraConfig():
                raise UserError("lora.rank", self.rank, "at least 1 where other settings of [lora] are given")
            return
        if not self.targets:
            raise UserError("lora.targets", list(self.targets), f"at least one of {', '.join(TARGETS)}")
        for at, target in enumerate(self.targets):
            if target not in TARGETS:
                accepted = f"one of {', '.join(TARGETS)}, or left out for all of them{nearest(target, TARGETS)}"
                raise UserError("lora.targets", target, accepted)
            if target in self.targets[:at]:
                raise UserError("lora.targets", list(self.targets), f"each target once; {target} is there twice")


class Columns(NamedTuple):
    """Columns of a kernel that one adapter adds to: `start` to `stop` within every `period` columns."""

    start: int
    stop: int
    period: int


PLACES: Mapping[str, tuple[Target, ...]] = {
    "attention.qkv": ("q", "k", "v"), "attention.out": ("o",),
    "mlp.gate": ("gate",), "mlp.up": ("up",), "mlp.down": ("down",),
}  # fmt: skip
"""Targets in each layer of a block, by attribute path."""


class AdaptedLayer(NamedTuple):
    """Layer with adapters: its targets with their columns (None: all), and the global shapes of A and B."""

    block: int
    path: str
    """Attribute path of the layer in its block, such as `attention.qkv`."""
    targets: Mapping[Target, Columns | None]
    a: tuple[int, int]
    b: tuple[int, int]

    @property
    def name(self) -> str:
        """Prefix of the layer's parameter names, such as `blocks.0.attention.qkv`."""
        return f"blocks.{self.block}.{self.path}"

    @property
    def arrays(self) -> dict[str, tuple[int, int]]:
        """Names and shapes of A and B."""
        return {f"{self.name}.adapter.a": self.a, f"{self.name}.adapter.b": self.b}

    @property
    def trained(self) -> int:
        """Number of trained parameters."""
        # Entries of B in the columns of other targets are always zero, and not counted.
        rank, width = self.b
        widths = (width if at is None else width // at.period * (at.stop - at.start) for at in self.targets.values())
        return self.a[0] * self.a[1] + rank * sum(widths)


def layers_of(shape: ModelShape, config: LoraConfig) -> Iterator[AdaptedLayer]:
    """Yield the layers with adapters of a model of these sizes, in order; expert kernels get none."""
    queries, size = shape.heads // shape.kv_heads * shape.head_dim, shape.head_dim
    # The fused kernel groups columns by KV head: its queries, its key, its value.
    period = queries + 2 * size
    columns: dict[Target, Columns | None] = {
        "q": Columns(0, queries, period), "k": Columns(queries, period - size, period),
        "v": Columns(period - size, period, period),
    }  # fmt: skip
    hidden, ffn = shape.hidden, shape.ffn
    attention = {"attention.qkv": (hidden, shape.qkv_width), "attention.out": (shape.heads * size, hidden)}
    mlp = {"mlp.gate": (hidden, ffn), "mlp.up": (hidden, ffn), "mlp.down": (ffn, hidden)}
    if shape.mlp_inputs == 1:
        del mlp["mlp.gate"]
    for block in range(shape.layers):
        for path, (rows, width) in (attention if shape.experts_of(block) else attention | mlp).items():
            targets = {target: columns.get(target) for target in PLACES[path] if target in config.targets}
            if targets:
                yield AdaptedLayer(block, path, targets, (rows, len(targets) * config.rank), (config.rank, width))


def targets_of(shape: ModelShape) -> list[Target]:
    """Return the targets that at least one block of a model has."""
    return [*dict.fromkeys(target for layer in layers_of(shape, LoraConfig()) for target in layer.targets)]


def trained_params(shape: ModelShape, config: LoraConfig) -> int:
    """Return the number of trained parameters over all layers."""
    return sum(layer.trained for layer in layers_of(shape, config))


def step_flops(shape: ModelShape, config: LoraConfig, batch: int, *, recompute: bool = False) -> int:
    """Return the FLOPs of a training step over `batch` sequences, of adapters or, without any, of all weights."""
    # Per parameter and token: 2 forward, 2 for input gradients, 2 for weight gradients, and 2 for recomputation.
    added = (8 if recompute else 6) * batch * shape.seq_len * trained_params(shape, config) if config.adapts else 0
    return shape.step_flops(batch, recompute=recompute, frozen=config.adapts) + added


@dataclass(frozen=True)
class StoredLora:
    """Metadata of adapters in a checkpoint's manifest."""

    rank: int
    alpha: float
    targets: tuple[str, ...]
    rslora: bool
    base: str
    """Path of the base; empty if the base was passed from Python."""
    checksum: str
    """Checksum of the base (`checksum.checksum`)."""

    @property
    def config(self) -> LoraConfig:
        """Settings of the adapters, without dropout."""
        return LoraConfig(self.rank, self.alpha, self.targets, self.rslora)


def stored_in(run: Mapping[str, object]) -> StoredLora | None:
    """Return the adapters' metadata of a checkpoint's run; None if the checkpoint holds a full model.

    Raises:
        ValueError: The metadata is damaged.
    """
    if LORA not in run:
        return None
    stored = typed(StoredLora, run[LORA], LORA)
    stored.config.check()
    if not stored.config.adapts:
        raise ValueError(f"{LORA}.rank = {stored.rank}")
    return stored


def check_shape(shape: ModelShape, config: LoraConfig) -> None:
    """Raise ``UserError`` if a model of these sizes has none of the targets."""
    if not config.adapts:
        return
    if not {*config.targets} & {*(supported := targets_of(shape))}:
        accepted = f"at least one of {', '.join(supported)}, which the model has"
        raise UserError("lora.targets", list(config.targets), accepted)
