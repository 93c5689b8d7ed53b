"""Four models in plain Flax NNX with their scripts' losses and batches: the examples' own, and a small MLP."""

import functools
import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import jax
import numpy as np
import optax
from flax import nnx

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"


class MLP(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = nnx.Sequential(
            nnx.Linear(24, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 64, rngs=rngs), nnx.relu,
            nnx.Linear(64, 32, rngs=rngs), nnx.RMSNorm(32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs),
        )  # fmt: skip

    def __call__(self, x):
        return self.layers(x)


def _mlp_batches(steps: int):
    draw = np.random.default_rng(0)
    weights = draw.standard_normal((24, 8))
    for _ in range(steps):
        x = draw.standard_normal((16, 24))
        yield {"x": x.astype(np.float32), "y": np.tanh(x @ weights).astype(np.float32)}


def _mlp_loss(model, batch):
    return optax.squared_error(model(batch["x"]), batch["y"]).mean()


@functools.cache
def example(name: str) -> ModuleType:
    """The module of an example file."""
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name: str) -> SimpleNamespace:
    """A model's script: `make`, `loss`, `batches(steps)`, `call(batch)` for `parallelize`."""
    if name == "mlp":
        make, loss, batches, inputs = (lambda: MLP(nnx.Rngs(0))), _mlp_loss, _mlp_batches, lambda b: b["x"]
    else:
        module = example({"transformer": "flax_script"}.get(name, name))
        make, loss, batches = module.make_model, module.loss_of, module.batches
        inputs = (lambda b: b[:, :-1]) if name == "transformer" else (lambda b: b["image"])
    return SimpleNamespace(make=make, loss=loss, batches=batches, call=lambda batch: lambda model: model(inputs(batch)))


def train(model, name: str, steps: int, place=lambda batch: batch):
    """Losses of an ordinary nnx.jit loop with Adam; the model is trained in place."""
    its = script(name)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, batch):
        loss, grads = nnx.value_and_grad(its.loss)(model, batch)
        optimizer.update(model, grads)
        return loss

    with jax.numpy_dtype_promotion("standard"):  # as users have it: optax.adam under nnx.Optimizer mixes dtypes
        losses = [step(model, optimizer, place(batch)) for batch in its.batches(steps)]
    return np.asarray(jax.device_get(losses)), optimizer, step
