"""Weights on disk, as global arrays under names that do not mention the grid."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from axonn_jax.errors import UserError


def save_weights(directory: Path, step: int, params: Mapping[str, jax.Array]) -> Path:
    """Writes all parameters to `directory/step_N` with Orbax (every process its shards); returns the path."""
    path = _path(directory, step)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, dict(params), force=True)
    return path


def save_weights_in_parts(
    directory: Path, step: int, parts: Mapping[int, Mapping[str, jax.Array]], *, first: bool, agree: Callable[[], None]
) -> Path:
    """Writes the parameters of each place of a pipe to `directory/step_N/place_P`; returns the path of `step_N`.

    Processes write their own places; `agree` waits for all of them, and then the `first` one gives the whole its
    name, so that a `step_N` is complete. All must see the same directory.
    """
    path = _path(directory, step)
    unfinished, replaced = (path.with_name(f"{word}_{path.name}") for word in ("unfinished", "replaced"))
    if first:  # what an earlier run left: with more places it would leave parts of a place nobody writes now
        shutil.rmtree(unfinished, ignore_errors=True)
    agree()
    for place, params in parts.items():
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(unfinished / f"place_{place:03d}", dict(params), force=True)
    agree()
    if first:
        shutil.rmtree(replaced, ignore_errors=True)
        if path.exists():
            path.rename(replaced)
        unfinished.rename(path)
        shutil.rmtree(replaced, ignore_errors=True)
    agree()
    return path


def latest(directory: Path) -> Path:
    """The newest complete checkpoint below `directory`; raises ``UserError`` where there is none."""
    found = sorted(path for path in directory.glob("step_*") if path.name.removeprefix("step_").isdigit())
    if not found:
        raise UserError("checkpoint", directory, "a run directory whose checkpoints/ holds a step_N")
    return found[-1]


def load_weights(path: Path, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads parameters into the shapes and shardings asked for, on any grid, whatever grid wrote them.

    Raises ``UserError`` naming what is missing, unexpected or of another shape.
    """
    folders = sorted(path.absolute().glob("place_*")) or [path.absolute()]
    with ocp.StandardCheckpointer() as checkpointer:
        stored: dict[str, tuple[Path, Any]] = {}
        for folder in reversed(folders):  # of a parameter that two places hold, the first one's copy is read
            tree = checkpointer.metadata(folder).item_metadata.tree
            stored.update((name, (folder, entry)) for name, entry in tree.items())
        missing, extra = sorted(set(abstract) - set(stored)), sorted(set(stored) - set(abstract))
        if missing or extra:
            raise UserError("checkpoint", path, f"the model's parameters; missing {missing}, unexpected {extra}")
        for name, want in abstract.items():
            if tuple(stored[name][1].shape) != want.shape:
                raise UserError(f"checkpoint {name}", tuple(stored[name][1].shape), f"shape {want.shape}")
        loaded: dict[str, jax.Array] = {}
        for folder in folders:
            # Orbax reads a folder whole: what another folder gives is read into its own shape and left aside.
            tree = checkpointer.metadata(folder).item_metadata.tree
            read = checkpointer.restore(folder, {name: abstract[name] for name in tree})
            loaded.update((name, value) for name, value in read.items() if stored[name][0] == folder)
        return {name: loaded[name] for name in abstract}


def _path(directory: Path, step: int) -> Path:
    return (directory / f"step_{step:08d}").absolute()
