"""Trainers from flat options: each goes to the table of the configuration that has it."""

from dataclasses import fields
from typing import Any

from axonn_jax import MemoryConfig, TensorConfig, Trainer


def make_trainer(model: Any, optimizer: Any, grid: Any, **options: Any) -> Trainer:
    """`Trainer(model, optimizer, grid, ...)`, fields of its `memory` and `tensor` given by their names."""
    for name, table in (("memory", MemoryConfig), ("tensor", TensorConfig)):
        chosen = {field.name: options.pop(field.name) for field in fields(table) if field.name in options}
        options[name] = table(**chosen)
    return Trainer(model, optimizer, grid, **options)
