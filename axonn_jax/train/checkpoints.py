"""Between a trainer and its checkpoints: what a run needs to go on, and where it goes on."""

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from axonn_jax.data.manifest import Manifest as DataManifest
from axonn_jax.errors import UserError
from axonn_jax.state.agree import Agreement, agreement
from axonn_jax.state.checkpoint import Found, at, fits, load, newest
from axonn_jax.state.manifest import MANIFEST, Damaged, all_steps, step_of
from axonn_jax.state.names import PARAMS, SCALE, State
from axonn_jax.state.part import reason
from axonn_jax.state.saver import Saver
from axonn_jax.train.config import Config, to_toml

if TYPE_CHECKING:
    from axonn_jax.train.trainer import Trainer

FOLDER = "checkpoints"
_FACTS: Mapping[str, type] = {
    "position": int,
    "data.seed": int,
    "train.seed": int,
    "model.seq_len": int,
    "data": str,
}
_OTHERWISE = "or checkpoint.resume never to start anew, or checkpoint.weights to start from its parameters alone"


def own_state(trainer: "Trainer") -> State:
    """What this process's jax world saves: every name once in the whole run, of two copies the first place's."""
    states, elsewhere = trainer.state(), trainer.state_elsewhere()
    merged = {name: value for place in sorted(states, reverse=True) for name, value in states[place].items()}
    return {name: value for name, value in merged.items() if name not in elsewhere}


def save_now(trainer: "Trainer", directory: Path, step: int) -> Path:
    """Saves all of a trainer's state and waits; raises ``OSError`` with the reason where it cannot."""
    agreed = agreement(trainer.grid)
    saver = Saver(directory, trainer.grid, agreed, keep=2**31, sizes=trainer.state_shapes())
    begin_save(saver, trainer, agreed, step, {})
    with trainer.saving():
        error = saver.settle()
        saver.close()
    if error:
        raise OSError(f"the checkpoint of step {step} was not saved in {directory}: {error}")
    return directory / f"step_{step:08d}"


def begin_save(saver: Saver, trainer: "Trainer", agreed: Agreement, step: int, facts: Mapping[str, Any]) -> None:
    """Begins to save all of a trainer's state, or refuses where that is not finite anywhere in the run."""
    with trainer.saving() as progress:
        if finite(trainer, agreed):
            saver.save(step, own_state(trainer), facts, progress)
        else:
            saver.refuse(step, "weights or optimizer state are not finite numbers")


def finite(trainer: "Trainer", agreed: Agreement) -> bool:
    """Whether a trainer's state is finite in all processes of the run, which all must ask."""
    return not any(agreed.gather("" if trainer.finite() else "not finite"))


def load_now(trainer: "Trainer", path: Path, *, weights_only: bool) -> int:
    """Loads a checkpoint that the caller names; returns its step."""
    agreed = agreement(trainer.grid)
    found = at(Path(path), agreed, lambda text: None, "checkpoint")
    _take(trainer, found, agreed, "checkpoint", weights_only=weights_only)
    return found.manifest.step


def _take(trainer: "Trainer", found: Found, agreed: Agreement, field: str, *, weights_only: bool) -> None:
    """Puts a sound checkpoint's arrays into a trainer; raises ``Damaged`` on all processes where one cannot read it."""
    only = PARAMS if weights_only else ""
    has = found.manifest.arrays

    def wanted(name: str) -> bool:
        return name.startswith(only) and (name in has or not name.startswith(SCALE))

    names = {name: shape for name, shape in trainer.state_shapes().items() if wanted(name)}
    fits(found, names, field, only=only)
    told = ""
    try:
        trainer.load_state(
            lambda wanted: load(found, wanted),
            steps_done=trainer.steps_done if weights_only else found.manifest.step,
            wanted=wanted,
        )
    except Damaged as fault:
        told = str(fault)
    if faults := [text for text in agreed.gather(told) if text]:
        raise Damaged(faults[0])


class Checkpoints:
    """The checkpoints of a training run: resumes it, saves it."""

    def __init__(self, config: Config, trainer: "Trainer", agreed: Agreement, say: Callable[[str], None]):
        self._config, self._trainer, self._agreed, self._say = config, trainer, agreed, say
        self.directory = Path(config.log.dir) / FOLDER
        keep = config.checkpoint
        often = {"keep": keep.keep, "keep_every": keep.keep_every}
        self.saver = Saver(self.directory, trainer.grid, agreed, warn=say, sizes=trainer.state_shapes(), **often)
        self.saved_step = 0
        """The step whose state is the newest that has been given to the saver, or that was resumed."""

    def resume(self) -> int:
        """Goes on where the configuration says; returns the data position. 0: a new run.

        Raises ``UserError`` where a checkpoint is of another model or optimizer, other data or other seeds.
        """
        asked = self._config.checkpoint.resume
        if (trouble := self._agreed.gather(self._unwritable() if self._agreed.rank == 0 else "")[0]) != "":
            raise UserError(
                "log.dir", self._config.log.dir, f"a directory that checkpoints can be written in: {trouble}"
            )
        self.saver.clean()
        found = self._resumed(asked)
        step = found.manifest.step if found is not None else 0
        self._set_aside(step)
        if found is None:
            if self._config.checkpoint.weights:
                self._start_from(Path(self._config.checkpoint.weights))
            return 0
        self.saved_step = step if found.path.parent.absolute() == self.directory.absolute() else 0
        if self.saved_step:
            self.saver.resumed(step)
        facts = found.manifest
        self._say(
            f"resumed at step {step} from {found.path} (saved on grid {facts.grid}, {facts.processes} process(es))"
        )
        position: int = facts.run["position"]
        return position

    def save(self, step: int, position: int) -> None:
        """Begins to save the state after a step; waits for the save before, if it still runs."""
        begin_save(self.saver, self._trainer, self._agreed, step, self._facts(position))
        self.saved_step = step

    def finite(self) -> bool:
        """Whether the state is finite, in all processes of the run."""
        with self._trainer.saving():
            return finite(self._trainer, self._agreed)

    def settle(self) -> str:
        """Waits for the save under way; returns why it failed, on all processes, or an empty text."""
        with self._trainer.saving():
            return self.saver.settle()

    def close(self) -> None:
        """Ends what runs in the background."""
        self.saver.close()

    def _resumed(self, asked: str) -> Found | None:
        """Finds a checkpoint and loads it; one that cannot be read after all gives way to the one before."""
        if asked == "never":
            return None
        if asked != "auto":
            named = at(Path(asked), self._agreed, self._say, "checkpoint.resume")
            try:
                self._load(named)
            except Damaged as fault:
                raise UserError("checkpoint.resume", asked, f"a sound checkpoint; {fault}") from None
            return named
        below: int | None = None
        while (found := newest(self.directory, self._agreed, self._say, below=below)) is not None:
            try:
                self._load(found)
                return found
            except Damaged as fault:
                self._say(f"warning: checkpoint {found.path} cannot be read and is passed over: {fault}")
                below = found.manifest.step
        return None

    def _load(self, found: Found) -> None:
        self._check_same(found)
        _take(self._trainer, found, self._agreed, "checkpoint.resume", weights_only=False)

    def _start_from(self, path: Path) -> None:
        found = at(path, self._agreed, self._say, "checkpoint.weights")
        try:
            _take(self._trainer, found, self._agreed, "checkpoint.weights", weights_only=True)
        except Damaged as fault:
            raise UserError("checkpoint.weights", str(path), f"a sound checkpoint; {fault}") from None
        self._say(f"parameters of step {found.manifest.step} from {found.path}; optimizer and data start anew")

    def _check_same(self, found: Found) -> None:
        """A run goes on only with the seeds and the data that it began with: all else may change."""
        now, then = self._facts(0), found.manifest.run
        if not set(_FACTS) <= set(then):
            raise UserError("checkpoint.resume", str(found.path), f"a checkpoint of `axonn-jax train`; {_OTHERWISE}")
        for key, kind in _FACTS.items():
            if type(then[key]) is not kind or (kind is int and not 0 <= then[key] < 2**63):
                raise Damaged(f"{MANIFEST} is not one that a save writes: run[{key!r}] is no {kind.__name__}")
        for key in ("data.seed", "train.seed", "model.seq_len"):
            if now[key] != then[key]:
                raise UserError(key, now[key], f"{then[key]}, as in {found.path}, {_OTHERWISE}")
        if now["data"] != then["data"]:
            raise UserError(
                "data.path", self._config.data.path, f"the data that {found.path} was trained on, {_OTHERWISE}"
            )

    def _facts(self, position: int) -> Mapping[str, Any]:
        config = self._config
        shards = DataManifest.load(config.data.path).splits["train"].shards
        return {
            "position": position,
            "global_batch": config.train.global_batch,
            "data.seed": config.data.seed,
            "train.seed": config.train.seed,
            "model.seq_len": config.model.seq_len,
            "data": hashlib.sha256("".join(shard.sha256 for shard in shards).encode()).hexdigest(),
            "config": to_toml(config),
        }

    def _unwritable(self) -> str:
        """Why nothing can be written where checkpoints go: better told before the first step than after hours."""
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                return ""
        except OSError as error:
            return reason(error)

    def _set_aside(self, step: int) -> None:
        """Keeps, under other names, what the directory holds of later steps than this run goes on from."""
        if self._agreed.rank == 0:
            for path in all_steps(self.directory):
                if (step_of(path) or 0) > step:
                    path.rename(_free_name(path.with_name(f"aside_{path.name}")))
        self._agreed.gather("")


def _free_name(path: Path) -> Path:
    number, candidate = 1, path
    while candidate.exists():
        number += 1
        candidate = path.with_name(f"{path.name}.{number}")
    return candidate
