"""Restore of checkpoints: finds a valid one and reads it into any grid's layout."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import jax

from axonn_jax.core.checkpoint.manifest import (
    MANIFEST,
    CheckpointManifest,
    CorruptCheckpoint,
    all_steps,
    file_faults,
    inside,
    read,
    step_of,
)
from axonn_jax.core.checkpoint.naming import AVERAGE, MASKS, PARAMS, SCALE, State
from axonn_jax.core.checkpoint.orbax import read_shard, reason, stored_array
from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.errors import UserError, first_of
from axonn_jax.core.models.comparison import differences
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import shape_in


class Checkpoint(NamedTuple):
    """A valid checkpoint."""

    path: Path
    manifest: CheckpointManifest

    def read_as(self, name: str) -> str:
        """Return the name of the array that a weights-only reader takes: with `train.ema`, a parameter's average."""
        average = AVERAGE + name.removeprefix(PARAMS)
        return average if name.startswith(PARAMS) and average in self.manifest.arrays else name

    @property
    def averaged(self) -> bool:
        """True if the run had `train.ema`."""
        return any(name.startswith(AVERAGE) for name in self.manifest.arrays)


def newest(
    directory: Path, sync: HostSync, warn: Callable[[str], None], *, below: int | None = None
) -> Checkpoint | None:
    """Return the newest valid checkpoint in `directory`, or None.

    Corrupt checkpoints are skipped with a warning. Each process reads a share of the files, and all return the same.

    Args:
        directory: Folder of `step_N` checkpoints.
        sync: Messages between the run's processes; all must call this.
        warn: Called with a line for each corrupt checkpoint.
        below: Only consider earlier steps than this.
    """
    by_step = {step_of(path): path for path in all_steps(directory)}
    # The first process's listing counts: a shared file system may show others an old one, and all must check the same.
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


def resolve_checkpoint(path: Path, sync: HostSync, warn: Callable[[str], None], field: str) -> Checkpoint:
    """Return the checkpoint at a user's path: a step_N, or the newest valid one in a run directory or its checkpoints/.

    Raises ``UserError`` for `field` if there is none, or if `path` is a corrupt step_N.
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
    """Check a checkpoint's files, each process a share, and return its manifest.

    Raises ``CorruptCheckpoint`` on every process if any of them finds a fault.
    """
    manifest, local_fault = None, ""
    try:
        manifest = read(path)
        local_fault = first_of(file_faults(path, manifest, (sync.rank, sync.size)), "; ")
    except CorruptCheckpoint as fault:
        local_fault = str(fault)
    faults = [text for text in sync.gather(local_fault) if text]
    if faults or manifest is None:
        # Deduplicated: a missing manifest is the same fault in every process.
        raise CorruptCheckpoint(first_of(list(dict.fromkeys(faults)), "; "))
    return manifest


def load(checkpoint: Checkpoint, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read arrays into the shapes, dtypes and layouts of `abstract`, whatever grid wrote them.

    Collective over the JAX world, with the same names. Raises ``CorruptCheckpoint`` if reading fails.
    """
    check_stored(checkpoint, abstract)
    loaded: State = {}
    for part in sorted({checkpoint.manifest.arrays[name].part for name in abstract}):
        names = {name: target for name, target in abstract.items() if checkpoint.manifest.arrays[name].part == part}
        try:
            loaded |= read_shard(checkpoint.path / part, names)
        except Exception as error:
            raise CorruptCheckpoint(f"{part}: {reason(error)}") from None
    return {name: loaded[name] for name in abstract}


def check_stored(checkpoint: Checkpoint, names: Iterable[str]) -> None:
    """Raise ``CorruptCheckpoint`` if an array's header contradicts its shape in the manifest; reads only headers."""
    # A larger array has padding, which the reader cuts. A smaller one must be refused: the reader would fill it up with
    # zeros, and a forged manifest could make it allocate any size.
    for name in names:
        array = checkpoint.manifest.arrays[name]
        try:
            stored = stored_array(checkpoint.path / array.part, name, 0).shape
        except ValueError as error:
            raise CorruptCheckpoint(f"{array.part}: {reason(error)}") from None
        if len(stored) != len(array.shape) or any(have < size for have, size in zip(stored, array.shape, strict=True)):
            raise CorruptCheckpoint(f"{array.part}: {name} is {tuple(stored)}, not {array.shape} as in {MANIFEST}")


def load_averaged(checkpoint: Checkpoint, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Read arrays like `load`, with a parameter's average in its place if the run had `train.ema`."""
    stored = load(checkpoint, {checkpoint.read_as(name): target for name, target in abstract.items()})
    return {name: stored[checkpoint.read_as(name)] for name in abstract}


def stored_shape(checkpoint: Checkpoint, field: str) -> ModelShape:
    """Return the shape of the saved transformer.

    Raises ``UserError`` for `field` if another model was saved, which has no such shape, or if the shape is impossible.
    """
    try:
        shape = shape_in(checkpoint.manifest.run)
    except ValueError as error:
        raise UserError(field, str(checkpoint.path), f"a valid checkpoint; {MANIFEST}: {error}") from None
    if shape is None:
        raise UserError(field, str(checkpoint.path), f"a checkpoint of a transformer, with its sizes in {MANIFEST}")
    return shape


def check_model(checkpoint: Checkpoint, shape: ModelShape | None, field: str, *, upcycles: bool = False) -> None:
    """Raise ``UserError`` listing the fields by which a model computes a different function from the saved one.

    With `upcycles`, experts are initialized from the layers of a dense model, so fields of experts may differ.
    """
    if shape is None:
        return
    stored = stored_shape(checkpoint, field)
    if upcycles:
        shape = replace(shape, experts=0, ffn=stored.ffn)
    if wrong := differences(shape, stored):
        raise UserError(field, str(checkpoint.path), f"a checkpoint of this model; {', '.join(wrong)}")


def check_shapes(
    checkpoint: Checkpoint, names: Mapping[str, tuple[int, ...]], field: str, *, only: str | tuple[str, ...] = ""
) -> None:
    """Raise ``UserError`` listing missing, unexpected and misshapen arrays of a checkpoint.

    Args:
        checkpoint: A valid checkpoint.
        names: Shapes of the full model's state by name.
        field: The setting that named the checkpoint, for the message.
        only: Prefix, or prefixes, of the names to check.
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
    if message := "; ".join(f"{len(arrays)} {kind}: {first_of(arrays)}" for kind, arrays in faults if arrays):
        raise UserError(field, str(checkpoint.path), f"a checkpoint of this model and optimizer; {message}")


def load_weights(
    checkpoint: Checkpoint,
    abstract: Mapping[str, jax.ShapeDtypeStruct],
    sizes: Mapping[str, tuple[int, ...]] | None = None,
) -> dict[str, jax.Array]:
    """Read only the parameters.

    Args:
        checkpoint: A valid checkpoint.
        abstract: Parameters to read, by their names in the model.
        sizes: Shapes without padding, by name of state; default: those of `abstract`.

    Raises:
        UserError: Missing, unexpected or misshapen arrays, or an unreadable file; the message names them.
    """
    sizes = sizes or {PARAMS + name: target.shape for name, target in abstract.items()}
    check_shapes(checkpoint, sizes, "checkpoint", only=PARAMS)
    try:
        loaded = load_averaged(checkpoint, {PARAMS + name: target for name, target in abstract.items()})
    except CorruptCheckpoint as fault:
        raise UserError("checkpoint", str(checkpoint.path), f"a valid checkpoint; {fault}") from None
    return {name: loaded[PARAMS + name] for name in abstract}
