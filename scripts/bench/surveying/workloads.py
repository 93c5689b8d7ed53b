"""Workloads of the survey: sizes, first weights, batches by number, and learning rates."""

import math
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from axonn_jax.core.models.config import ModelShape

WARM_UP, LAST, LEAST = 10, 200, 0.1
BETAS, EPS, DECAY, CLIP = (0.9, 0.95), 1e-8, 0.1, 1.0
HELD_OUT_ROWS = 32
_LLAMA = {"positions": "rope", "norm": "rmsnorm", "mlp": "swiglu", "bias": "none", "tied": False}


@dataclass(frozen=True)
class Workload:
    """A model and its batch."""

    name: str
    title: str
    rows: int
    """Sequences or images of a global batch."""
    microbatches: int
    """Parts of the batch in one process; processes that share the batch share them."""
    sizes: Mapping[str, Any] = field(default_factory=dict)
    """Fields of `ModelShape`; none of the image task."""
    highest: float = 3e-4
    """Highest learning rate."""
    plain: bool = False
    """True of random tokens at a constant rate without clipping: the benchmarks beside the survey."""

    @property
    def is_language(self) -> bool:
        """True if rows are token ids."""
        return bool(self.sizes)

    @property
    def is_gpt(self) -> bool:
        """True if the model is a GPT; other language models are Llamas, some with experts."""
        return self.is_language and "positions" not in self.sizes

    @property
    def seq_len(self) -> int:
        """Tokens of a row; 1 of an image."""
        return int(self.sizes["seq_len"]) if self.is_language else 1

    @property
    def unit(self) -> str:
        """Word for the things that are counted."""
        return "tokens" if self.is_language else "images"

    @property
    def clip(self) -> float:
        """Norm to which gradients are scaled down; 0: no clipping."""
        return 0.0 if self.plain else CLIP

    def rate(self, step: Any, xp: Any = np) -> Any:
        """Learning rate of step 0, 1, ...: a linear warm-up, then a cosine down to a tenth."""
        if self.plain:
            return self.highest
        cosine = LEAST + (1 - LEAST) / 2 * (1 + xp.cos(math.pi * xp.minimum(step / LAST, 1.0)))
        return self.highest * xp.minimum((step + 1) / WARM_UP, cosine)

    def shape(self) -> "ModelShape":
        """Sizes of the transformer."""
        from axonn_jax.core.models.config import ModelShape

        return ModelShape(**self.sizes)


def _sizes(layers: int, hidden: int, kv_heads: int, ffn: int, **more: Any) -> dict[str, Any]:
    made = {"layers": layers, "hidden": hidden, "heads": 8, "kv_heads": kv_heads, "ffn": ffn}
    return {**made, "vocab": 4096, "seq_len": 256, **more}


WORKLOADS = {
    one.name: one
    for one in (
        Workload("L1", "GPT, 8 layers of width 256", 8, 4, _sizes(8, 256, 8, 1024)),
        Workload("L2", "Llama, 6 layers of width 512, grouped queries", 4, 2, _sizes(6, 512, 4, 1408, **_LLAMA)),
        # At 1e-3 rounding alone parts losses by 1e-2 within 20 steps.
        Workload("V1", "VGG of 8 convolutions on scikit-learn's digits", 64, 1, highest=1e-4),
        Workload("M1", "L1 with 8 experts, 2 a token", 4, 2, _sizes(8, 256, 8, 512, **_LLAMA, experts=8)),
    )
}


BENCHES = {
    name: Workload(name, title, 64, 16, sizes, plain=True)
    for name, title, sizes in (
        ("T1", "GPT of about 7.4 million parameters, 16,384 tokens a step", _sizes(8, 256, 8, 1024)),
        ("E0", "T1's FLOPs of two experts in a dense layer", _sizes(8, 256, 8, 1024, **_LLAMA)),
        *(
            (f"E{count}", f"T1 with {count} experts, 2 a token", _sizes(8, 256, 8, 512, **_LLAMA, experts=count))
            for count in (4, 8, 32)
        ),
    )
}
"""Workloads of the benchmarks beside the survey."""


@dataclass(frozen=True)
class Data:
    """Batches by number, from a folder that `prepare` filled."""

    folder: Path
    workload: Workload
    seed: int = 0

    def batch(self, number: int, rows: int = 0) -> Any:
        """Global batch of a step: token ids [rows, seq + 1], or {"image", "label"}."""
        return self._draw("train", np.random.default_rng((self.seed, number)), rows or self.workload.rows)

    def held_out(self) -> Any:
        """The rows on which held-out losses are taken, alike for all."""
        return self._draw("held", np.random.default_rng(0), HELD_OUT_ROWS)

    def weights(self) -> Path:
        """File of the first weights."""
        return self.folder / f"{self.workload.name}-{self.seed}.npz"

    def _draw(self, split: str, draw: np.random.Generator, rows: int) -> Any:
        if not self.workload.is_language:
            digits = np.load(self.folder / "digits.npz")
            chosen = draw.integers(0, len(digits[f"{split}_label"]), rows)
            return {"image": digits[f"{split}_image"][chosen], "label": digits[f"{split}_label"][chosen]}
        if self.workload.plain:
            return draw.integers(0, self.workload.sizes["vocab"], (rows, self.workload.seq_len + 1))
        tokens, length = np.load(self.folder / f"{split}.npy", mmap_mode="r"), self.workload.seq_len + 1
        starts = draw.integers(0, len(tokens) - length, rows)
        return np.stack([tokens[start : start + length] for start in starts]).astype(np.int64)


def prepare_text(folder: Path) -> None:
    """Write the tokens of the standard library's sources, as the demo takes them."""
    if (folder / "held.npy").exists():
        return
    from axonn_jax.files.data.loader import TokenSamples

    stdlib, data = sysconfig.get_paths()["stdlib"], folder / "data"
    words = ["prepare", stdlib, str(data), "--vocab", "4096", "--include", "*.py"]
    done = subprocess.run([sys.executable, "-P", "-m", "axonn_jax.cli.main", *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"error: axonn-jax prepare ended with status {done.returncode}: {done.stderr[-500:]}")
    for split, name in (("train", "train"), ("valid", "held")):
        samples = TokenSamples(data, split, 256)
        count = min(len(samples), 8192)
        np.save(folder / f"{name}.npy", np.concatenate([samples[i][:-1] for i in range(count)]).astype(np.uint16))


def enlarged(images: np.ndarray) -> np.ndarray:
    """[n, 8, 8] -> [n, 32, 32], linear between pixels: copies would be ties, of which max-pooling picks by rounding."""
    old, new = np.arange(8), np.linspace(0, 7, 32)
    matrix = np.stack([np.interp(new, old, row) for row in np.eye(8)], 1)
    made: np.ndarray = matrix @ images @ matrix.T
    return made


def prepare_digits(folder: Path) -> None:
    """Write scikit-learn's digits, enlarged to 32 x 32."""
    if (folder / "digits.npz").exists():
        return
    from sklearn.datasets import load_digits

    digits = load_digits()
    image = enlarged(digits.images / 16)[..., None].astype(np.float32)
    label, order = digits.target.astype(np.int32), np.random.default_rng(0).permutation(len(image))
    parts = {"train": order[:1500], "held": order[1500:]}
    arrays = {f"{name}_{kind}": a[at] for name, at in parts.items() for kind, a in (("image", image), ("label", label))}
    np.savez(folder / "digits.npz", **arrays)
