"""Memorisation with and without the Goldfish loss: `python examples/goldfish.py [STEPS] [PICTURE]`.

A small model of bytes is trained on Python's standard library, in which four passages are repeated in every
batch. At intervals it continues the beginning of each passage greedily: a passage is memorised if the continuation is
the passage itself, byte for byte.
"""

import sys
import sysconfig
from pathlib import Path

import matplotlib
import numpy as np
import optax
from flax import nnx

import axonn_jax as ax

SEQ, PROMPT, ROWS, PASSAGES = 128, 48, 8, 4
SETTINGS = (("every target counts", 0, "o-"), ("k = 4", 4, "s-"), ("k = 2", 2, "x--"))


def text() -> np.ndarray:
    """Sources of the standard library, one behind another, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("[a-t]*.py"))
    return np.frombuffer(b"".join(path.read_bytes() for path in files), np.uint8).astype(np.int32)


def train(data: np.ndarray, passages: np.ndarray, k: int, grid: ax.Grid, steps: int) -> list[tuple[int, float, float]]:
    """Train with one target of k left out; return steps, the share of passages memorised, and losses elsewhere."""
    shape = ax.models.ModelShape(layers=2, hidden=128, heads=4, kv_heads=4, ffn=512, vocab=256, seq_len=SEQ)
    model = ax.models.Transformer(shape, rngs=nnx.Rngs(0))
    trainer = ax.Trainer(model, optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 3e-3, 50, steps)), grid, clip=1.0)
    rng, curve = np.random.default_rng(0), []
    unseen = np.stack([data[at : at + SEQ + 1] for at in range(0, 64 * SEQ, SEQ)])
    generator = None
    for step in range(1, steps + 1):
        starts = rng.integers(64 * SEQ, len(data) - SEQ, ROWS)
        batch = np.stack([data[at : at + SEQ + 1] for at in starts])
        batch[:PASSAGES] = passages
        trainer.step(ax.goldfish(batch, k) if k else batch)
        if step % max(steps // 10, 1) == 0:
            trained = trainer.model
            if generator is None:
                generator = ax.Generator(trained, grid, slots=PASSAGES, length=SEQ)
            else:
                generator.update(trained)
            told = generator.generate([list(row[:PROMPT]) for row in passages], tokens=SEQ - PROMPT)
            same = [list(ids) == list(row[PROMPT:SEQ]) for (ids,), row in zip(told, passages, strict=True)]
            curve.append((step, float(np.mean(same)), trainer.evaluate([unseen])))
            print(f"k {k}  step {step}  memorised {curve[-1][1]:.2f}  loss elsewhere {curve[-1][2]:.3f}", flush=True)
    return curve


def main(steps: int = 300, picture: str = "runs/goldfish.png") -> None:
    data = text()
    rng = np.random.default_rng(1)
    passages = np.stack([data[at : at + SEQ + 1] for at in rng.integers(64 * SEQ, len(data) - SEQ, PASSAGES)])
    grid = ax.init()
    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, k, style in SETTINGS:
        curve = train(data, passages, k, grid, steps)
        axes.plot([step for step, *_ in curve], [share for _, share, _ in curve], style, label=name)
    axes.set(xlabel="step", ylabel="share of passages continued byte for byte", ylim=(-0.03, 1.03))
    axes.legend(title="Goldfish loss")
    axes.grid(alpha=0.3)
    Path(picture).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=150, bbox_inches="tight")
    print(f"picture {picture}")


if __name__ == "__main__":
    main(*(kind(word) for kind, word in zip((int, str), sys.argv[1:], strict=False)))
