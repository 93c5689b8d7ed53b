"""Checkpoints of a trainer: all of its state saved, loaded, and the newest in a directory found again."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from pkgutil import resolve_name
from types import MappingProxyType
from typing import Any

from axonn_jax.checkpoint.manifest import FOLDER, inside, name_of
from axonn_jax.checkpoint.restore import Checkpoint, named_checkpoint, newest
from axonn_jax.checkpoint.save import Saver
from axonn_jax.distributed.host_sync import HostSync, host_sync, only_run_in, together
from axonn_jax.errors import UserError, plain
from axonn_jax.grid import Grid
from axonn_jax.readers import reader_of
from axonn_jax.terminal import say
from axonn_jax.train.engines.base import facts_of, shape_of, take
from axonn_jax.train.engines.engine import Engine, RowChoice
from axonn_jax.train.engines.spmd import SpmdEngine

_ITERATORS, _ROWS = "iterators", "rows"
"""Names among a manifest's facts: of the states of the processes' data, and of the way in which the loss runs."""
_ALL = 2**31


def save_as(
    engine: Engine,
    directory: Path,
    step: int,
    facts: Mapping[str, Any] = MappingProxyType({}),
    *,
    keep: int | None = None,
    iterator: Any = None,
) -> Path:
    """Save all of an engine's state and wait; raises ``OSError`` with the reason of a failure.

    Args:
        engine: The engine, of which all processes save at once.
        directory: The directory in which `step_N` is made.
        step: The number N.
        facts: What the manifest says of the run.
        keep: The newest checkpoints that stay there; None: all.
        iterator: The state of this process's data, as JSON holds it.
    """
    # The run whose checkpoints the directory has, if any, may be at work.
    sync, run = host_sync(engine.grid), directory.parent if directory.name == FOLDER else directory
    failed = f"the checkpoint of step {step} was not saved in {directory}:"
    with together(sync):  # a state that one process cannot save must not keep the others waiting
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


def _json_of(state: Any) -> str:
    def converted(value: Any) -> Any:
        if (scalar := plain(value)) is value:
            raise TypeError(f"a {type(value).__name__} in it")
        return scalar

    try:
        return json.dumps(state, default=converted, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        accepted = f"numbers, texts, lists and tables of them, as JSON holds; {error}"
        raise UserError("iterator", type(state).__name__, accepted) from None


def iterator_of(run: Mapping[str, Any], grid: Grid) -> Any:
    """Return the state of this process's data in a manifest's facts, None without any.

    Raises ``UserError`` where other numbers of processes have saved states that differ.
    """
    states = run.get(_ITERATORS) or [None]
    if len(states) == grid.size:
        return states[grid.rank]
    if any(state != states[0] for state in states):
        accepted = f"{len(states)} processes, as of the save: each had a state of its own"
        raise UserError("iterator", f"{grid.size} processes", accepted)
    return states[0]


def begin_save(
    saver: Saver, engine: Engine, sync: HostSync, step: int, facts: Mapping[str, Any], loss: float = math.inf
) -> None:
    """Begin to save all of an engine's state, or refuse infinite or NaN values anywhere in the run."""
    with engine.saving() as progress:
        if finite(engine, sync):
            shape = shape_of(engine)
            run = {**facts, "model": asdict(shape)} if shape else facts
            saver.save(step, engine.state(), run, progress, loss=loss)
        else:
            saver.refuse(step, "weights or optimizer state are not finite numbers")


def finite(engine: Engine, sync: HostSync) -> bool:
    """True if an engine's state is finite in all processes of the run, which all must ask."""
    return all(sync.gather_number(engine.finite()))


def load_checkpoint(engine: Engine, path: Path, *, weights_only: bool) -> Checkpoint | None:
    """Load the caller's checkpoint, or weights alone of a pretrained directory, which is no checkpoint."""
    sync = host_sync(engine.grid)
    if (reader := reader_of(path)) is not None:
        if not weights_only:
            raise UserError("checkpoint", str(path), "a checkpoint; or weights_only=True for a pretrained directory")
        resolve_name(reader)(engine, path, sync, "checkpoint")
        return None
    checkpoint = named_checkpoint(path, sync, _say_on_first(sync), "checkpoint")
    take(engine, checkpoint, sync, "checkpoint", weights_only=weights_only)
    if not weights_only:
        _take_row_choice(engine, checkpoint)
    return checkpoint


def resume_newest(engine: Engine, directory: Path) -> Checkpoint | None:
    """Load the newest checkpoint of a directory that is whole; None where there is none, and nothing changes."""
    sync = host_sync(engine.grid)
    checkpoint = newest(inside(directory), sync, _say_on_first(sync))
    if checkpoint is not None:
        take(engine, checkpoint, sync, "directory", weights_only=False)
        _take_row_choice(engine, checkpoint)
    return checkpoint


def _row_choice(engine: Engine) -> RowChoice | None:
    return engine.row_choice if isinstance(engine, SpmdEngine) else None


def _take_row_choice(engine: Engine, checkpoint: Checkpoint) -> None:
    """Go on in the way in which the loss of a checkpoint's run ran."""
    if (choice := _row_choice(engine)) is not None:
        choice.facts = dict(checkpoint.manifest.run.get(_ROWS, {}))


def _say_on_first(sync: HostSync) -> Callable[[str], None]:
    """Return a function that prints a line in the first process alone, as all find the same."""
    return say if sync.rank == 0 else lambda line: None
