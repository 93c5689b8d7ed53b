"""Checkpoints of a trainer: saving and loading its full state, and finding the newest one in a directory."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from axonn_jax.core.checkpoint.manifest import FOLDER, inside, name_of
from axonn_jax.core.checkpoint.readers import reader_of
from axonn_jax.core.checkpoint.restore import Checkpoint, newest, resolve_checkpoint
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import HostSync, host_sync, only_run_in, together
from axonn_jax.core.engines.base import facts_of, shape_of, take
from axonn_jax.core.engines.engine import Engine, RowChoice
from axonn_jax.core.engines.spmd import SpmdEngine
from axonn_jax.core.errors import UserError, plain
from axonn_jax.core.grid import Grid
from axonn_jax.core.terminal import say

_ITERATORS, _ROWS = "iterators", "rows"
"""Keys in a manifest's facts: the states of the processes' data iterators, and how a user's loss runs on rows."""
_ALL = 2**31


def save_as(
    engine: Engine,
    directory: Path,
    step: int,
    facts: Mapping[str, object] = MappingProxyType({}),
    *,
    keep: int | None = None,
    iterator: object = None,
) -> Path:
    """Save the full state of an engine and wait until the checkpoint is complete; collective over all processes.

    Args:
        engine: The engine.
        directory: Directory in which `step_N` is created.
        step: The number N.
        facts: Further facts of the run for the manifest.
        keep: Number of newest checkpoints to keep in the directory; None: all.
        iterator: State of this process's data iterator, which JSON can represent.

    Returns:
        The checkpoint's path.

    Raises:
        UserError: JSON cannot represent the iterator's state.
        OSError: The checkpoint cannot be written; the text has the reason.
    """
    # Lock the run directory if the checkpoints belong to one: a training run may be writing there.
    sync, run = host_sync(engine.grid), directory.parent if directory.name == FOLDER else directory
    failed = f"the checkpoint of step {step} was not saved in {directory}:"
    with together(sync):  # one process's unusable state must not leave the others waiting in the gather below
        local_state = _json_of(iterator)
    states = [json.loads(text) for text in sync.gather(local_state)]
    if any(state is not None for state in states):
        facts = {**facts, _ITERATORS: states}
    with only_run_in(str(run), sync, say, lambda _, accepted: OSError(f"{failed} it takes {accepted}")):
        saver = Saver(directory, engine.grid, sync, keep=keep or _ALL, sizes=engine.state_shapes())
        choice = (
            {_ROWS: row_choice.facts} if (row_choice := _row_choice(engine)) is not None and row_choice.facts else {}
        )
        begin_save(saver, engine, sync, step, {**facts_of(engine, sync, ""), **choice, **facts})
        with engine.saving():
            error = saver.settle()
            saver.close()
    if error:
        raise OSError(f"{failed} {error}")
    return directory / name_of(step)


def _json_of(state: object) -> str:
    def converted(value: object) -> object:
        if (scalar := plain(value)) is value:
            raise TypeError(f"a {type(value).__name__} in it")
        return scalar

    try:
        return json.dumps(state, default=converted, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        accepted = f"numbers, texts, lists and tables of them, as JSON holds; {error}"
        raise UserError("iterator", type(state).__name__, accepted) from None


def iterator_of(run: Mapping[str, Any], grid: Grid) -> object:
    """Return the state of this process's data iterator from a manifest's facts.

    Args:
        run: The manifest's facts.
        grid: The grid that loads the checkpoint.

    Returns:
        The state, or None if the checkpoint has none.

    Raises:
        UserError: Another number of processes saved the checkpoint, and their states differ.
    """
    states = run.get(_ITERATORS) or [None]
    if len(states) == grid.size:
        return states[grid.rank]
    # States that agree do not depend on the process, so they fit any number of processes.
    if any(state != states[0] for state in states):
        accepted = f"{len(states)} processes, as of the save: each had a state of its own"
        raise UserError("iterator", f"{grid.size} processes", accepted)
    return states[0]


def begin_save(
    saver: Saver, engine: Engine, sync: HostSync, step: int, facts: Mapping[str, object], loss: float = math.inf
) -> None:
    """Start saving the full state of an engine, unless it has infinite or NaN values; collective over all processes.

    Args:
        saver: The saver of the directory, which records the refusal of a non-finite state.
        engine: The engine.
        sync: Host exchange between the processes.
        step: The checkpoint's step.
        facts: Facts of the run for the manifest.
        loss: Held-out loss of the step, if checkpoints are kept by it.
    """
    with engine.saving() as progress:
        if finite(engine, sync):
            shape = shape_of(engine)
            run = {**facts, "model": asdict(shape)} if shape else facts
            saver.save(step, engine.state(), run, progress, loss=loss)
        else:
            saver.refuse(step, "weights or optimizer state are not finite numbers")


def finite(engine: Engine, sync: HostSync) -> bool:
    """Return True if an engine's state is finite on all processes; collective, 8 bytes a process."""
    return all(sync.gather_number(engine.finite()))


def load_checkpoint(engine: Engine, path: Path, *, weights_only: bool) -> Checkpoint | None:
    """Load a checkpoint, or the weights of a pretrained directory; collective over all processes.

    Args:
        engine: The engine whose state is replaced.
        path: A checkpoint, a directory of checkpoints, or a pretrained directory.
        weights_only: True to keep optimizer state and step, as a pretrained directory requires.

    Returns:
        The checkpoint; None for a pretrained directory, which is not one.

    Raises:
        UserError: The checkpoint does not fit the engine, or is not a checkpoint.
    """
    sync = host_sync(engine.grid)
    if (reader := reader_of(path)) is not None:
        if not weights_only:
            raise UserError("checkpoint", str(path), "a checkpoint; or weights_only=True for a pretrained directory")
        resolve_name(reader)(engine, path, sync, "checkpoint")
        return None
    checkpoint = resolve_checkpoint(path, sync, _say_on_first(sync), "checkpoint")
    take(engine, checkpoint, sync, "checkpoint", weights_only=weights_only)
    if not weights_only:
        _take_row_choice(engine, checkpoint)
    return checkpoint


def resume_newest(engine: Engine, directory: Path) -> Checkpoint | None:
    """Load the newest complete checkpoint of a directory; return None, and change nothing, without one.

    Collective over all processes.

    Args:
        engine: The engine whose state is replaced.
        directory: A run directory or a directory of checkpoints.
    """
    sync = host_sync(engine.grid)
    checkpoint = newest(inside(directory), sync, _say_on_first(sync))
    if checkpoint is not None:
        take(engine, checkpoint, sync, "directory", weights_only=False)
        _take_row_choice(engine, checkpoint)
    return checkpoint


def _row_choice(engine: Engine) -> RowChoice | None:
    return engine.row_choice if isinstance(engine, SpmdEngine) else None


def _take_row_choice(engine: Engine, checkpoint: Checkpoint) -> None:
    # A resumed run keeps the choice that the checkpoint's run made, instead of making a new one.
    if (choice := _row_choice(engine)) is not None:
        choice.facts = dict(checkpoint.manifest.run.get(_ROWS, {}))


def _say_on_first(sync: HostSync) -> Callable[[str], None]:
    # All processes come to the same conclusion about a checkpoint, so one line is enough.
    return say if sync.rank == 0 else lambda line: None
