"""Settings of a training step, drawn by a seed: sizes, grids, precisions, ways to keep, cut, pack, drop and prune."""

import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import numpy as np

from axonn_jax.core.engines.rules import RunSettings, check_rules
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.segments import transformer_segments
from axonn_jax.core.options import DerivedSize
from axonn_jax.core.pruned.config import PruneConfig
from axonn_jax.core.settings import MemoryConfig, PipelineConfig, TensorConfig
from axonn_jax.pipe.stages.cut import check_pipeline

DEVICES, RATE = 8, 0.125
"""Most devices of a grid; what a router's bias moves by, which shows the sign of an expert's excess."""
STARTS, COUNTS = -(1 << 31), 1 << 30  # bits of a packed word: a document begins with it, it is trained on
IMPLIED = ("balance_rate", "sequence_parallel")
"""What is not in a setting's words: it is always the same, or follows from the rest."""


@dataclass(frozen=True)
class Setting:
    """A step of training, and what it is of."""

    number: int
    shape: ModelShape
    grid: GridShape
    rows: int
    microbatches: int
    packed: bool = False
    comm: BlockComm = field(default_factory=BlockComm)
    moe: MoeConfig = field(default_factory=MoeConfig)
    memory: MemoryConfig = field(default_factory=lambda: MemoryConfig("fp32"))
    tensor: TensorConfig = field(default_factory=TensorConfig)
    pipeline: PipelineConfig = field(default_factory=PipelineConfig)
    prune: PruneConfig = field(default_factory=PruneConfig)
    clip: float = 0.0

    def __str__(self) -> str:
        axes = ((f.name, getattr(self.grid, f.name)) for f in fields(self.grid))
        words = [f"{name} {size}" for name, size in axes if size > 1] or ["a device"]
        words.append(f"rows {self.rows} in {self.microbatches}")
        for table in (self.shape, self.comm, self.moe, self.memory, self.tensor, self.pipeline, self.prune):
            for name, value in ((f.name, getattr(table, f.name)) for f in fields(table) if f.name not in IMPLIED):
                if value != getattr(type(table), name, None) and not isinstance(value, DerivedSize):
                    words.append(f"{name} {value:.3g}" if isinstance(value, float) else f"{name} {value}")
        return ", ".join(words + ["packed"] * self.packed + [f"clip {self.clip}"] * (self.clip > 0))

    def check(self) -> None:
        """Raises ``UserError`` where the package refuses it."""
        self.shape.check_grid(self.grid, sequence_split=self.comm.sequence_split)
        self.comm.check(self.shape, self.grid)
        self.grid.check_batch(self.rows, self.microbatches)
        check_rules(RunSettings(self.grid, self.memory, self.tensor, self.prune))
        if self.grid.pipe > 1:
            check_pipeline(self.grid.pipe, self.microbatches, self.pipeline, transformer_segments(self.shape))

    def sent(self) -> Iterator[Any]:
        """Groups of tokens, numbered through the batch, that one device sends to experts at once."""
        grid, seq = self.grid, self.shape.seq_len
        parts = self.microbatches * grid.batch_shards * (max(self.tensor.sub_batches, 1) if grid.pipe == 1 else 1)
        for tokens in np.arange(self.rows * seq).reshape(parts, -1, seq):
            if self.comm.sequence_split:
                yield from (part.reshape(-1) for part in np.split(tokens, grid.y, axis=1))
            else:
                yield from np.split(tokens.reshape(-1), grid.y if grid.expert > 1 else 1)


class Kind(NamedTuple):
    """What is drawn once, so that what the package refuses does not make it rarer."""

    routed: bool
    drops: bool
    packed: bool
    pruned: bool
    piped: bool
    precision: Any


def drawn(seed: int, number: int) -> Setting:
    """Draws a setting that the package accepts; of the same seed and number the same one."""
    draw = random.Random(f"{seed} {number}")
    shares = (0.6, 0.35, 0.35, 0.25, 0.4)
    kind = Kind(*(draw.random() < share for share in shares), draw.choice(["fp32", "fp32", "fp32", "bf16", "fp16"]))
    while True:
        try:
            setting = _drawn(draw, number, kind)
            setting.check()
            return setting
        except UserError:
            continue


def _drawn(draw: random.Random, number: int, kind: Kind) -> Setting:
    pick, piped = draw.choice, kind.piped
    grid = GridShape(
        pipe=pick([2, 2, 3]) if piped else 1, data=pick([1, 1, 1, 2, 3]), z=pick([1, 1, 2, 3]),
        expert=pick([1, 2, 2, 3]) if kind.routed else 1, y=pick([1, 1, 2, 3, 4]), x=pick([1, 1, 2, 3]),
    )  # fmt: skip
    if grid.devices > DEVICES or (grid.devices == 1 and draw.random() < 0.9):
        raise UserError("grid", grid, f"2 to {DEVICES} devices")
    split = grid.y > 1 and draw.random() < 0.3
    gathers = grid.x > 1 and not split and draw.random() < 0.3
    shape, moe = _shape(draw, grid, split=split, gathers=gathers), MoeConfig()
    if kind.routed:
        shape, moe = _with_experts(draw, shape, grid, kind)
    elif draw.random() < 0.4:
        shape = _with_caps(draw, shape)
    several, sub_batches = shape.layers > 1 and not piped, 0 if piped else draw.randint(1, 2)
    microbatches = grid.pipe * draw.randint(1, 2) if piped else draw.randint(1, 3)
    memory = MemoryConfig(
        kind.precision, accumulate="fp32" if kind.precision == "fp32" else pick(["fp32", "compute"]),
        offload=pick(["none", "none", "optimizer"]), zero=pick([0, 1]) if grid.replicas > 1 else 0,
        activations=pick(["none", "none", "full", "dots", "save_collectives"]), sequence_parallel=split,
        reshard_after="forward" if piped or grid.z == 1 else pick(["forward", "backward", "step"]),
        bucket=pick([300, 3000, 16_000_000]),
    )  # fmt: skip
    order = "auto" if piped else pick(["xla", "package"])
    repeats = shape.layers % shape.layer_period == 0
    policy = pick(["message", "gpipe", "1f1b", "interleaved", "zero-bubble"])
    prune = PruneConfig(
        round(draw.uniform(0.1, 0.9), 2), pick(["magnitude", "random"]), pick(["layer", "layer", "global"])
    )
    return Setting(
        number, shape, grid, grid.batch_shards * microbatches * max(sub_batches, 1) * draw.randint(1, 2), microbatches,
        kind.packed, BlockComm(gathers, gathers, split), moe, memory,
        TensorConfig(sub_batches, order, scan_layers=pick(["no", "yes"][: 1 + repeats]) if several else "no"),
        PipelineConfig(policy=policy, virtual_stages=pick([1, 1, 2])) if piped else PipelineConfig(),
        prune if kind.pruned else PruneConfig(),
        pick([0.0, 0.0, 0.1]),
    )  # fmt: skip


def _shape(draw: random.Random, grid: GridShape, *, split: bool, gathers: bool) -> ModelShape:
    """Sizes that the grid divides, odd ones too."""
    pick, x, y, z = draw.choice, grid.x, grid.y, grid.z
    positions = pick(["rope", "rope", "learned"])
    across, rotates = y * x if gathers else y, positions == "rope"
    heads = across * draw.randint(1, 2)
    parts = math.lcm(y if split or grid.expert > 1 else 1, 1 if rotates else z)
    return ModelShape(
        layers=draw.randint(max(1, grid.pipe - 1), 3), hidden=x * z * draw.randint(-(-9 // (x * z)), 30 // (x * z)),
        heads=heads * draw.randint(1, 2), kv_heads=heads, head_dim=z * (1 + rotates) * draw.randint(1, 3),
        ffn=across * z * draw.randint(2, 9), vocab=draw.randint(11, 70),
        seq_len=parts * draw.randint(-(-4 // parts), 12 // parts), positions=positions,
        norm=pick(["layernorm", "rmsnorm", "rmsnorm_1p"]), mlp=pick(["gelu", "swiglu", "geglu"]),
        bias=pick(["all", "qkv", "none"]), tied=draw.random() < 0.4, qk_norm=draw.random() < 0.25,
        embedding_scale=draw.random() < 0.2, window=pick([0, 0, 0, draw.randint(1, 5)]),
    )  # fmt: skip


def _with_experts(draw: random.Random, shape: ModelShape, grid: GridShape, kind: Kind) -> tuple[ModelShape, MoeConfig]:
    """The shape with experts. Rounded choices change what finds a slot: in half precision there is room for all."""
    pick, router, every = draw.choice, draw.choice(["softmax", "sigmoid"]), draw.choice([1, 1, 2])
    groups = pick([1, 2, 3]) if router == "sigmoid" else 1
    count = math.lcm(grid.expert, groups) * draw.randint(1, 4)
    shape = replace(
        shape, experts=count, experts_per_token=draw.randint(1, min(count, 4)), router=router, router_groups=groups,
        router_groups_kept=draw.randint(1, groups), router_norm=draw.random() < 0.7, router_scale=pick([1.0, 1.0, 2.5]),
        expert_ffn=grid.y * grid.x * grid.z * draw.randint(1, 5), shared_experts=pick([0, 0, 1, 2]), moe_every=every,
        moe_first=draw.randrange(every),
    )  # fmt: skip
    weight, capacity = pick([0.0, 0.1, 0.1, 1.0]), pick([float(count), 1.25, 0.75, 0.5])
    if not kind.drops:
        return shape, MoeConfig(weight, RATE)
    return shape, MoeConfig(weight, RATE, "capacity", capacity if kind.precision == "fp32" else float(count))


def _with_caps(draw: random.Random, shape: ModelShape) -> ModelShape:
    """The shape with options of Gemma 2: caps near the numbers that they bound, windows by layer, further norms."""
    pick = draw.choice
    return replace(
        shape, window=draw.randint(1, 5), window_period=pick([0, 2, 3]), attention_cap=pick([0.0, 0.3, 1.0]),
        logits_cap=pick([0.0, 0.3, 1.0]), post_norms=draw.random() < 0.7,
        score_dim=draw.randint(1, 9) if shape.positions == "rope" else shape.score_dim,
    )  # fmt: skip


def batch_of(setting: Setting) -> Any:
    """Token ids [rows, seq + 1]; packed ones with documents without targets, and padding."""
    draw = np.random.default_rng([setting.number, 1])
    width = setting.shape.seq_len + 1
    batch = draw.integers(0, setting.shape.vocab, (setting.rows, width), dtype=np.int32)
    if not setting.packed:
        return batch
    for row in batch:
        end, at = width - draw.integers(0, width // 2 + 1), 0
        while at < end:
            size = min(draw.integers(1, width), end - at)
            trained = draw.random(size) < draw.choice([0.0, 0.4, 1.0])
            trained[0] &= trained[1:].any()  # it is no target: with it alone a document would have none
            row[at : at + size] |= np.where(trained, COUNTS, 0).astype(np.int32)
            row[at] |= STARTS
            at += size
        if at < width:
            row[at] |= STARTS
    batch[0, :2] = batch[0, :2] & ~np.int32(STARTS) | np.asarray([STARTS, COUNTS], np.int32)  # a target that counts
    return batch


def weights_of(setting: Setting, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Any]:
    """Parameters by name: kernels that keep the size of what passes them, and all others off their 0 or 1."""
    draw, weights = np.random.default_rng([setting.number, 2]), {}
    for name, size in sorted(shapes.items()):
        values = draw.standard_normal(size)
        if name.endswith("kernel"):
            values /= math.sqrt(size[-2])
        elif name.endswith("table"):
            values *= 0.3
        else:
            values *= 0.1
            values += name.endswith("scale")
        weights[name] = values.astype(np.float32)
    return weights
