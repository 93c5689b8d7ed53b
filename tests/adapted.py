"""The Llama of a fixture with adapters, as PEFT trained it in torch (`scripts/oracle/lora`), and runs of it here."""

import functools
import json
from pathlib import Path

import grids
import huggingface_fixtures as huggingface
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from safetensors.numpy import save_file

import axonn_jax as ax
from axonn_jax import GridShape, lora
from axonn_jax.core.tensor.params import split_module
from axonn_jax.files.adapters.peft import CONFIG, TENSORS, read_adapter
from axonn_jax.files.huggingface.entries import from_huggingface
from axonn_jax.files.huggingface.families import shape_from_config

STEPS = 20
OPTIMIZER = optax.adam(1e-2, 0.9, 0.95, 1e-3)
SHAPE = shape_from_config(huggingface.config("llama"))


@functools.cache
def stored():
    with np.load(huggingface.ROOT / "tests/fixtures/lora.npz", allow_pickle=False) as arrays:
        return dict(arrays)


def peft_directory(folder: Path, which: str = "last", kind: str = "", **changes) -> Path:
    """A directory as PEFT saved it, with `changes` of its config."""
    folder.mkdir(parents=True, exist_ok=True)
    config = json.loads(str(stored()[f"{kind}config"])) | changes
    (folder / CONFIG).write_text(json.dumps(config))
    prefix = f"{kind}{which}/"
    tensors = {key.removeprefix(prefix): value for key, value in stored().items() if key.startswith(prefix)}
    save_file(tensors, folder / TENSORS)
    return folder


def base(**options) -> ax.models.Transformer:
    """The Llama without adapters."""
    made = ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0), **options)
    weights = from_huggingface(huggingface.under("llama", "weights/"), SHAPE)
    return split_module(made).merge({name: jnp.asarray(value) for name, value in weights.items()})


def adapted(directory: Path, **options) -> ax.models.Transformer:
    """The Llama with the adapters of a directory."""
    config, arrays, _ = read_adapter(directory, SHAPE, "directory")
    given = {"rank": config.rank, "alpha": config.alpha, "targets": config.targets, "rslora": config.rslora}
    parts = split_module(lora(base(**options), **given))
    return parts.merge(parts.params | {name: jnp.asarray(value) for name, value in arrays.items()})


def batches(steps: int = STEPS):
    tokens = huggingface.fixture("llama")["tokens"]
    return [tokens[[(2 * step + i) % len(tokens) for i in range(4)]] for step in range(steps)]


def run(model, grid=GridShape(), steps=STEPS, optimizer=OPTIMIZER, **options):  # noqa: B008
    """Losses, norms and the trainer of some steps; adapters by name are `arrays` of the trainer."""
    trainer = ax.Trainer(model, optimizer, grids.lay(grid), **options)
    results = [trainer.step(batch) for batch in batches(steps)]
    return np.array([[float(r["loss"]), float(r["grad_norm"])] for r in results]), trainer


def arrays(trainer):
    """The adapters of a trainer by name."""
    own = trainer.engine.parts.adapters
    return {name: np.asarray(value) for name, value in trainer.engine.params.items() if name in own}


def far(a, b):
    """The largest difference, over the largest number."""
    return max(float(np.abs(a[name] - b[name]).max() / np.abs(b[name]).max()) for name in b)
