"""Weights on disk, as global arrays under names that do not mention the grid."""

from collections.abc import Mapping
from pathlib import Path

import jax
import orbax.checkpoint as ocp

from axonn_jax.errors import UserError


def save_weights(directory: Path, step: int, params: Mapping[str, jax.Array]) -> Path:
    """Writes all parameters to `directory/step_N` with Orbax (every process its shards); returns the path."""
    path = (directory / f"step_{step:08d}").absolute()
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, dict(params), force=True)
    return path


def latest(directory: Path) -> Path:
    """The newest complete checkpoint below `directory`; raises ``UserError`` where there is none."""
    found = sorted(path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdigit())
    if not found:
        raise UserError("checkpoint", directory, "a run directory whose checkpoints/ holds a step_N")
    return found[-1]


def load_weights(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads parameters into the shapes and shardings asked for, on any grid.

    Raises ``UserError`` naming what is missing, unexpected or of another shape.
    """
    with ocp.StandardCheckpointer() as checkpointer:
        stored = checkpointer.metadata(path.absolute()).item_metadata.tree
        missing, extra = sorted(set(abstract) - set(stored)), sorted(set(stored) - set(abstract))
        if missing or extra:
            raise UserError("checkpoint", path, f"the model's parameters; missing {missing}, unexpected {extra}")
        for name, want in abstract.items():
            if tuple(stored[name].shape) != want.shape:
                raise UserError(f"checkpoint {name}", tuple(stored[name].shape), f"shape {want.shape}")
        return dict(checkpointer.restore(path.absolute(), dict(abstract)))
