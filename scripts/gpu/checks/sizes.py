"""What each section runs at: full sizes for an 80 GB card, or tiny ones for a rehearsal. No jax."""

from dataclasses import dataclass
from typing import Any

from axonn_jax.models import ModelShape, preset

GPT: dict[str, Any] = {"positions": "learned", "norm": "layernorm", "mlp": "gelu", "bias": "all", "tied": True}
LLAMA: dict[str, Any] = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none", "tied": False}


@dataclass(frozen=True)
class TrainConfig:
    """One training row."""

    activations: str
    microbatch: int
    """Sequences a microbatch."""
    accumulate: int = 1
    """Microbatches a step."""

    @property
    def name(self) -> str:
        """The row's name."""
        times = f" x {self.accumulate}" if self.accumulate > 1 else ""
        return f"{self.activations}, microbatch {self.microbatch}{times}"


def parity_shape(kind: str, quick: bool) -> ModelShape:
    """A small model; its weights are larger than a fresh model's, so that attention is far from uniform."""
    layers, hidden, seq_len = (1, 64, 64) if quick else (2, 256, 256)
    changes = GPT if kind == "gpt" else LLAMA
    return ModelShape(
        layers=layers, hidden=hidden, heads=4, kv_heads=4 if kind == "gpt" else 2, ffn=4 * hidden, vocab=8 * hidden,
        seq_len=seq_len, init_std=0.08, **changes,
    )  # fmt: skip


def attention_shapes(quick: bool) -> list[tuple[int, int, int, int, int]]:
    """(batch, seq, heads, kv_heads, head_dim): one with a head a group, one with grouped heads."""
    return [(1, 64, 2, 2, 32), (1, 64, 4, 2, 16)] if quick else [(2, 512, 8, 8, 128), (2, 512, 8, 2, 64)]


def matmul_sizes(quick: bool) -> list[tuple[int, int]]:
    """(rows, width) of products [rows, width] x [width, width]."""
    return [(256, 256), (512, 256)] if quick else [(4096, 4096), (8192, 8192), (16384, 8192)]


def train_shape(name: str, quick: bool) -> ModelShape:
    """The model of the throughput rows."""
    if not quick:
        return preset(name)
    return preset(name, layers=1, hidden=128, heads=2, kv_heads=2, ffn=512, vocab=512, seq_len=64)


def train_plan(microbatches: list[int], policies: list[str]) -> list[TrainConfig]:
    """Rows in order of interest, so that a run short of time has done the important ones.

    First a row for each policy (`none` with the smallest microbatch, which is the likeliest to fit), then one that
    accumulates, then the other microbatch sizes.
    """
    first = {policy: min(microbatches) if policy == "none" else microbatches[0] for policy in policies}
    plan = [TrainConfig(policy, first[policy]) for policy in policies]
    plan.append(TrainConfig(policies[0], first[policies[0]], accumulate=4))
    for size in microbatches:
        plan += [TrainConfig(policy, size) for policy in policies if size != first[policy]]
    return plan


def offload_plan(rows: int) -> list[dict[str, Any]]:
    """State on the device, on the host, there but for what has room on the device, and with bf16 sums or activations on
    the host."""
    host = {"offload": "optimizer", "resident": "0"}
    ways = {
        "state on the device": {},
        "state on the host": host,
        "state with room on the device": host | {"resident": "auto"},
        "state on the host, bf16 sums": host | {"accumulate": "compute"},
        "activations on the host too": host | {"activations": "offload"},
    }
    both = {"activations": "full"}
    return [
        {"name": name, "options": both | options, "microbatches": 8, "rows": rows} for name, options in ways.items()
    ]


def offload_shape(quick: bool) -> ModelShape:
    """A model whose state takes half of an 80 GB card with 16 bytes a parameter."""
    if quick:
        return train_shape("gpt-1.3b", True)
    return preset("gpt-2.7b")
