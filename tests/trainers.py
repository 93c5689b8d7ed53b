"""Trainers of small models from flat options, and what their steps tell."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import fields
from typing import Any

import grids
import numpy as np
from flax import nnx

from axonn_jax import GridShape, MemoryConfig, TensorConfig, Trainer
from axonn_jax.models import ModelShape, Transformer


def transformer(shape: ModelShape, **layout: Any) -> Callable[[], Transformer]:
    """What makes the model, a stage at a time in a pipeline."""
    return lambda: Transformer(shape, rngs=nnx.Rngs(0), **layout)


def make_trainer(model: Any, optimizer: Any, grid: Any, **options: Any) -> Trainer:
    """`Trainer(model, optimizer, grid, ...)`, fields of its `memory` and `tensor` given by their names.

    A `ModelShape` stands for its transformer, a `GridShape` for the grid over the first devices.
    """
    for name, table in (("memory", MemoryConfig), ("tensor", TensorConfig)):
        chosen = {field.name: options.pop(field.name) for field in fields(table) if field.name in options}
        options[name] = table(**chosen)
    model = transformer(model) if isinstance(model, ModelShape) else model
    return Trainer(model, optimizer, grids.lay(grid) if isinstance(grid, GridShape) else grid, **options)


def ids(vocab: int, *sizes: int, seed: int = 0) -> np.ndarray:
    """Random token ids."""
    return np.random.default_rng(seed).integers(0, vocab, sizes)


def again(few: np.ndarray, steps: int) -> np.ndarray:
    """As many batches as there are steps: a few that come again and again."""
    return few[np.arange(steps) % len(few)]


def losses(trainer: Trainer, batches: Iterable[Any]) -> list[float]:
    """The loss of each step."""
    return [float(trainer.step(batch)["loss"]) for batch in batches]


def curve(trainer: Trainer, batches: Iterable[Any]) -> list[list[float]]:
    """Loss and gradient norm of each step."""
    metrics = [trainer.step(batch) for batch in batches]
    return [[float(m[name]) for name in ("loss", "grad_norm")] for m in metrics]


def params(trainer: Trainer) -> dict[str, np.ndarray]:
    """A copy of the weights."""
    return {name: np.asarray(value) for name, value in trainer.engine.params.items()}


def same(got: Mapping[str, Any], want: Mapping[str, Any], **tolerance: float) -> None:
    """Arrays of the same names are equal, or within a tolerance."""
    compare = np.testing.assert_allclose if tolerance else np.testing.assert_array_equal
    for name, value in want.items():
        compare(np.asarray(got[name]), np.asarray(value), **tolerance, err_msg=name)
