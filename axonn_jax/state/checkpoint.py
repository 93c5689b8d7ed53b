"""Finds a sound checkpoint and reads it into any grid's layout."""

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

from axonn_jax.errors import UserError
from axonn_jax.state.agree import Agreement, Alone
from axonn_jax.state.files import check, listed, verify
from axonn_jax.state.manifest import Damaged, Manifest, all_steps, read, step_of
from axonn_jax.state.names import PARAMS, SCALE, State
from axonn_jax.state.part import read_part, reason

_SHOWN = 5


class Found(NamedTuple):
    """A sound checkpoint."""

    path: Path
    manifest: Manifest


def newest(
    directory: Path, agreement: Agreement, warn: Callable[[str], None], *, below: int | None = None
) -> Found | None:
    """The newest sound checkpoint below `directory`, of steps under `below` if given; None without any.

    Every damaged one that is passed over is told in a warning. All processes read a share of the files each and find
    the same; of a directory that they do not all see, the first process's view counts.
    """
    own = [str(step_of(path)) for path in all_steps(directory)]
    steps = [int(text) for text in agreement.gather(",".join(own[:64]))[0].split(",") if text]
    by_step = {step_of(path): path for path in all_steps(directory)}
    for step in steps:
        if below is not None and step >= below:
            continue
        path = by_step.get(step, directory / f"step_{step:08d}")
        try:
            return Found(path, sound(path, agreement))
        except Damaged as fault:
            warn(f"warning: checkpoint {path} is damaged and passed over: {fault}")
    return None


def at(path: Path, agreement: Agreement, warn: Callable[[str], None], field: str) -> Found:
    """The checkpoint that a user names: a step_N, or the newest sound one of a run directory or its checkpoints/.

    Raises ``UserError`` for `field` where there is none, or where the step_N itself is damaged.
    """
    if step_of(path) is not None:
        try:
            return Found(path, sound(path, agreement))
        except Damaged as fault:
            raise UserError(field, str(path), f"a sound checkpoint; {fault}") from None
    inside = path / "checkpoints" if (path / "checkpoints").is_dir() else path
    found = newest(inside, agreement, warn)
    if found is None:
        raise UserError(field, str(path), "a step_N, or a run directory whose checkpoints/ holds a complete step_N")
    return found


def sound(path: Path, agreement: Agreement) -> Manifest:
    """The manifest of a checkpoint whose files all processes together have checked; ``Damaged`` on all of them."""
    manifest, told = None, ""
    try:
        manifest = read(path)
        told = listed(verify(path, manifest, (agreement.rank, agreement.size)))
    except Damaged as fault:
        told = str(fault)
    faults = [text for text in agreement.gather(told) if text]
    if faults or manifest is None:
        raise Damaged(listed(list(dict.fromkeys(faults))))
    return manifest


def load(found: Found, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> State:
    """Reads arrays into the shapes, types and layouts asked for, whatever grid wrote them.

    Every process of a jax world calls it with the same names. Raises ``Damaged`` where reading fails.
    """
    loaded: State = {}
    for part in sorted({found.manifest.arrays[name].part for name in wanted}):
        names = {name: want for name, want in wanted.items() if found.manifest.arrays[name].part == part}
        try:
            loaded |= read_part(found.path / part, names)
        except Exception as error:
            raise Damaged(f"{part}: {reason(error)}") from None
    return {name: loaded[name] for name in wanted}


def fits(found: Found, names: Mapping[str, tuple[int, ...]], field: str, *, only: str = "") -> None:
    """Raises ``UserError`` that lists what is missing, unexpected or of another shape in a checkpoint.

    `names` are the shapes of the whole model's state; `only` is the prefix of the names that are looked at.
    """
    arrays = {name: array for name, array in found.manifest.arrays.items() if name.startswith(only)}
    missing = sorted(set(names) - set(arrays))
    extra = sorted(name for name in set(arrays) - set(names) if not name.startswith(SCALE))
    other = [
        f"{name} {arrays[name].shape} instead of {shape}"
        for name, shape in sorted(names.items())
        if name in arrays and arrays[name].shape != tuple(shape)
    ]
    faults = [("missing", missing), ("unexpected", extra), ("of another shape", other)]
    if told := "; ".join(f"{len(which)} {word}: {_some(which)}" for word, which in faults if which):
        raise UserError(field, str(found.path), f"a checkpoint of this model and optimizer; {told}")


def latest(directory: Path, warn: Callable[[str], None]) -> Found:
    """The newest sound checkpoint below a run's checkpoints/; raises ``UserError`` where there is none."""
    found = newest(directory, Alone(), warn)
    if found is None:
        raise UserError("checkpoint", str(directory), "a run directory whose checkpoints/ holds a complete step_N")
    return found


def load_weights(found: Found, abstract: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Reads the parameters alone, by their names in the model.

    Raises ``UserError`` naming what is missing, unexpected or of another shape, or what cannot be read.
    """
    fits(found, {PARAMS + name: want.shape for name, want in abstract.items()}, "checkpoint", only=PARAMS)
    try:
        loaded = load(found, {PARAMS + name: want for name, want in abstract.items()})
    except Damaged as fault:
        raise UserError("checkpoint", str(found.path), f"a sound checkpoint; {fault}") from None
    return {name: loaded[PARAMS + name] for name in abstract}


def faults(path: Path) -> str:
    """What is wrong with a checkpoint directory, empty if it is sound: for people who look."""
    try:
        check(path)
    except Damaged as fault:
        return str(fault)
    return ""


def _some(names: Iterable[str]) -> str:
    listed_names = list(names)
    more = f", and {len(listed_names) - _SHOWN} more" if len(listed_names) > _SHOWN else ""
    return ", ".join(listed_names[:_SHOWN]) + more
