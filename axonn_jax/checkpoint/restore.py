"""Restoring: finds a valid checkpoint and reads it into any grid's layout."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from axonn_jax.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    CorruptCheckpoint,
    all_steps,
    file_faults,
    inside,
    read,
    step_of,
)
from axonn_jax.checkpoint.naming import AVERAGE, MASKS, PARAMS, SCALE, State
from axonn_jax.checkpoint.orbax import read_shard, reason, stored_array
from axonn_jax.distributed.host_sync import HostSync
from axonn_jax.errors import UserError, first_of
from axonn_jax.models.config import ModelShape
from axonn_jax.models.declared.comparison import differences
from axonn_jax.models.presets import shape_in


class Checkpoint(NamedTuple):
    """A valid checkpoint."""

    path: Path
    manifest: CheckpointManifest

    def read_as(self, name: str) -> str:
        """Return the name of the array that a reader of weights alone takes: with `train.ema` a parameter's average."""
        average = AVERAGE + name.removeprefix(PARAMS)
        return average if name.startswith(PARAMS) and average in self.manifest.arrays else name

    @property
    def averaged(self) -> bool:
        """True if the run had `train.ema`."""
        return any(name.startswith(AVERAGE) for name in self.manifest.arrays)


def newest(
    directory: Path, sync: HostSync, warn: Callable[[str], None], *, below: int | None = None
) -> Checkpoint | None:
    """The newest valid checkpoint below `directory`, of steps under `below` if given; None without any.

    Corrupt checkpoints are skipped with a warning. Each process reads a share of the files, and all find the same; if
    not all see the directory, the first process's view counts.
    """
    by_step = {step_of(path): path for path in all_steps(directory)}
    steps = [int(text) for text in sync.gather(",".join(map(str, by_step)))[0].split(",") if text]
    for step in steps:
        if below is not None and step >= below:
            continue
        path = by_step.get(step, directory / f"step_{step:08d}")
        try:
            return Checkpoint(path, validated(path, sync))
        except CorruptCheckpoint as fault:
            warn(f"warning: checkpoint {path} is damaged and skipped: {fault}")
    return None


def named_checkpoint(path: Path, sync: HostSync, warn: Callable[[str], None], field: str) -> Checkpoint:
    """Return the checkpoint at a user's path: a step_N, or the newest valid one of a run directory or its checkpoints/.

    Raises ``UserError`` for `field` where there is none, or where the step_N itself is corrupt.
    """
    if step_of(path) is not None:
        try:
            return Checkpoint(path, validated(path, sync))
        except CorruptCheckpoint as fault:
            raise UserError(field, str(path), f"a valid checkpoint; {fault}") from None
    checkpoint = newest(inside(path), sync, warn)
    if checkpoint is None:
        raise UserError(field, str(path), "a step_N, or a run directory whose checkpoints/ holds a complete step_N")
    return checkpoint


def validated(path: Path, sync: HostSync) -> CheckpointManifest:
    """The manifest of a checkpoint whose files all processes together have checked.

    Raises ``CorruptCheckpoint`` on every process.
    """
    manifest, fault_here = None, ""
    try:
        manifest = read(path)
        fault_here = first_of(file_faults(path, manifest, (sync.rank, sync.size)), "; ")
    except CorruptCheckpoint as fault:
        fault_here = str(fault)
    faults = [text for text in sync.gather(fault_here) if text]
    if faults or manifest is None:
        raise CorruptCheckpoint(first_of(list(dict.fromkeys(faults)), "; "))
    return manifest


def load(checkpoint: Checkpoint, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read arrays into the shapes, types and layouts asked for, whatever grid wrote them.

    Collective over the jax world, with the same names. Raises ``CorruptCheckpoint`` where reading fails.
    """
    check_stored(checkpoint, wanted)
    loaded: State = {}
    for part in sorted({checkpoint.manifest.arrays[name].part for name in wanted}):
        names = {name: want for name, want in wanted.items() if checkpoint.manifest.arrays[name].part == part}
        try:
            loaded |= read_shard(checkpoint.path / part, names)
        except Exception as error:
            raise CorruptCheckpoint(f"{part}: {reason(error)}") from None
    return {name: loaded[name] for name in wanted}


def check_stored(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ``CorruptCheckpoint`` where an array's own header has other sizes than the manifest.

    Headers alone are read. Of a larger array the rest is padding; a smaller one would be filled up with zeros, of
    whatever size the manifest says.
    """
    for name in names:
        array = checkpoint.manifest.arrays[name]
        try:
            stored = stored_array(checkpoint.path / array.part, name, 0).shape
        except ValueError as error:
            raise CorruptCheckpoint(f"{array.part}: {reason(error)}") from None
        if len(stored) != len(array.shape) or any(here < size for here, size in zip(stored, array.shape, strict=True)):
            raise CorruptCheckpoint(f"{array.part}: {name} is {tuple(stored)}, not {array.shape} as in {MANIFEST}")


def load_alone(checkpoint: Checkpoint, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read arrays as `load` does, averages in the place of the parameters of a run with `train.ema`."""
    stored = load(checkpoint, {checkpoint.read_as(name): want for name, want in wanted.items()})
    return {name: stored[checkpoint.read_as(name)] for name in wanted}


def stored_shape(checkpoint: Checkpoint, field: str) -> ModelShape | None:
    """Return the sizes of the saved model; None for a save from Python by an earlier version, without sizes.

    Raises ``UserError`` for `field` on impossible sizes.
    """
    try:
        return shape_in(checkpoint.manifest.run)
    except ValueError as error:
        raise UserError(field, str(checkpoint.path), f"a valid checkpoint; {MANIFEST}: {error}") from None


def check_model(checkpoint: Checkpoint, given: ModelShape | None, field: str, *, upcycles: bool = False) -> None:
    """Raise ``UserError`` listing the fields by which a model computes another function than the saved one.

    With `upcycles`, experts are copies of a dense model's layers, and their fields may differ.
    """
    stored = stored_shape(checkpoint, field)
    if given is None or stored is None:
        return
    if upcycles:
        given = replace(given, experts=0, ffn=stored.ffn)
    if wrong := differences(given, stored):
        raise UserError(field, str(checkpoint.path), f"a checkpoint of this model; {', '.join(wrong)}")


def check_shapes(
    checkpoint: Checkpoint, names: Mapping[str, tuple[int, ...]], field: str, *, only: str | tuple[str, ...] = ""
) -> None:
    """Raise ``UserError`` listing missing, unexpected and misshapen arrays of a checkpoint.

    `names` are the shapes of the whole model's state; `only` is a prefix of names, or several: others are ignored.
    """
    arrays = {name: array for name, array in checkpoint.manifest.arrays.items() if name.startswith(only)}
    missing = sorted(set(names) - set(arrays))
    extra = sorted(name for name in set(arrays) - set(names) if not name.startswith((SCALE, MASKS)))
    reshaped = [
        f"{name} {arrays[name].shape} instead of {shape}"
        for name, shape in sorted(names.items())
        if name in arrays and arrays[name].shape != tuple(shape)
    ]
    faults = [("missing", missing), ("unexpected", extra), ("of another shape", reshaped)]
    if message := "; ".join(f"{len(which)} {word}: {first_of(which)}" for word, which in faults if which):
        raise UserError(field, str(checkpoint.path), f"a checkpoint of this model and optimizer; {message}")


def load_weights(
    checkpoint: Checkpoint,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, jax.Array]:
    """Read the parameters alone, by their names in the model; `sizes` are shapes without padding, by name of state.

    Raises ``UserError`` naming missing, unexpected or misshapen arrays, or the unreadable file.
    """
    sizes = sizes or {PARAMS + name: want.shape for name, want in abstract.items()}
    check_shapes(checkpoint, sizes, "checkpoint", only=PARAMS)
    try:
        loaded = load_alone(checkpoint, {PARAMS + name: want for name, want in abstract.items()})
    except CorruptCheckpoint as fault:
        raise UserError("checkpoint", str(checkpoint.path), f"a valid checkpoint; {fault}") from None
    return {name: loaded[PARAMS + name] for name in abstract}
