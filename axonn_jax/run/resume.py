"""Checkpoints of a training run: saving its state, and choosing and loading the checkpoint to resume from."""

import itertools
import math
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from axonn_jax.core.adapters.config import LORA
from axonn_jax.core.adapters.stored import adapters_only_error
from axonn_jax.core.checkpoint.manifest import FOLDER, MANIFEST, CorruptCheckpoint, all_steps, step_of
from axonn_jax.core.checkpoint.naming import SCALE
from axonn_jax.core.checkpoint.orbax import reason
from axonn_jax.core.checkpoint.restore import Checkpoint, newest, resolve_checkpoint
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import HostSync, together
from axonn_jax.core.engines.base import facts_of, take
from axonn_jax.core.engines.engine import Engine
from axonn_jax.core.engines.optimizer import changed_rate
from axonn_jax.core.engines.saving import begin_save, finite
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.upcycle import other_function
from axonn_jax.core.terminal import counted
from axonn_jax.files.adapters.peft import is_adapter
from axonn_jax.files.data.corpora import Corpora
from axonn_jax.files.data.tokenize import alike
from axonn_jax.files.huggingface.hub import commit_of, resolve_path
from axonn_jax.files.huggingface.pretrained import FOLDER as PRETRAINED
from axonn_jax.files.huggingface.pretrained import is_pretrained, keep_small_files
from axonn_jax.files.into_engine import take_adapter, take_pretrained
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import to_toml
from axonn_jax.run.validate import WEIGHTS

_FACTS = {"position": int, "data.seed": int, "train.seed": int, "model.seq_len": int, "data": str}
_OTHERWISE = "or checkpoint.resume never to start anew, or checkpoint.weights to start from its parameters alone"


class Checkpoints:
    """Checkpoints of a training run; every method is collective over the run's processes.

    Args:
        config: The checked configuration.
        data: Corpora of the run, whose fingerprint a checkpoint must have.
        engine: The engine to save and to load.
        sync: Host exchange between the processes.
        say: Printer of a line for people.
    """

    def __init__(self, config: Config, data: Corpora, engine: Engine, sync: HostSync, say: Callable[[str], None]):
        self._config, self._engine, self._sync, self._say = config, engine, sync, say
        self._data = data.fingerprint()
        self.directory = Path(config.log.dir) / FOLDER
        keep = config.checkpoint
        often = {"keep": keep.keep, "keep_every": keep.keep_every}
        self.saver = Saver(self.directory, engine.grid, sync, warn=say, sizes=engine.state_shapes(), **often)
        self.saved_step = 0
        """Newest step that was resumed or passed to the saver."""
        self._lora: Mapping[str, object] = {}

    def resume(self) -> int:
        """Load what the configuration asks for: a checkpoint, initial weights, an adapter, or nothing.

        Returns:
            The data position in sequences; 0 for a new run.

        Raises:
            UserError: A checkpoint is of another model or optimizer, other data or other seeds, or checkpoints cannot
                be written.
        """
        where = self._config.checkpoint.resume
        if (fault := self._sync.gather(self._unwritable() if self._sync.rank == 0 else "")[0]) != "":
            raise UserError("log.dir", self._config.log.dir, f"a directory that checkpoints can be written in: {fault}")
        self.saver.clean()
        weights = self._config.checkpoint.weights
        # Checkpoints of adapters do not contain the base, so it is loaded in a resumed run, too.
        if self._engine.parts.adapters:
            base = self._start_from(weights)
            self._lora = facts_of(self._engine, self._sync, str(base.absolute()))
        checkpoint = self._resumed(where)
        if checkpoint is None and (adapter := self._config.checkpoint.adapter):
            self._begin_with(Path(adapter))
        step = checkpoint.manifest.step if checkpoint is not None else 0
        if checkpoint is None and weights and not self._engine.parts.adapters:
            self._start_from(weights)
        self._set_aside(step)
        if checkpoint is None:
            return 0
        # A checkpoint of another run is not one of this directory's, so it does not count as saved here.
        self.saved_step = step if checkpoint.path.parent.absolute() == self.directory.absolute() else 0
        if self.saved_step:
            self.saver.resumed(step)
        facts, updates = checkpoint.manifest, step - int(self._engine.state().get(f"{SCALE}skipped", 0))
        saved = f"(saved on grid {facts.grid}, {counted(facts.processes, 'process')})"
        saved += changed_rate(self._config.train, facts.run.get("config"), updates)
        self._say(f"resumed at step {step} from {checkpoint.path} {saved}")
        return int(facts.run["position"])

    def recall(self, losses: Mapping[int, float]) -> None:
        """Register the held-out losses of complete checkpoints, by step, for `checkpoint.best`."""
        finite_losses = {step: loss for step, loss in losses.items() if loss < math.inf}
        self.saver.losses |= finite_losses if self._config.checkpoint.best else {}

    def best_at(self, loss: float) -> bool:
        """Return True if `checkpoint.best` asks for a checkpoint with this held-out loss.

        The loss must be below that of every step that is saved or being saved; failed saves do not count.
        """
        return self._config.checkpoint.best and loss < min(self.saver.losses.values(), default=math.inf)

    def save(self, step: int, position: int, loss: float = math.inf) -> None:
        """Start saving the state after a step, once an unfinished save has ended.

        Args:
            step: The step.
            position: Data position in sequences.
            loss: Held-out loss of the step. With `checkpoint.best` the checkpoint is kept until another complete one
                has a lower loss.
        """
        loss = loss if self._config.checkpoint.best else math.inf
        begin_save(self.saver, self._engine, self._sync, step, self._facts(position), loss)
        self.saved_step = step

    def finite(self) -> bool:
        """Return True if the state is finite on all processes."""
        with self._engine.saving():
            return finite(self._engine, self._sync)

    def settle(self) -> str:
        """Wait for the save in progress; return the reason of its failure, the same on all processes, or ""."""
        with self._engine.saving():
            return self.saver.settle()

    def close(self) -> None:
        """Stop the background threads."""
        self.saver.close()

    def _resumed(self, where: str) -> Checkpoint | None:
        """Find and load the checkpoint to resume; fall back to the previous one if it cannot be read."""
        if where == "never":
            return None
        if where != "auto":
            requested = resolve_checkpoint(Path(where), self._sync, self._say, "checkpoint.resume")
            try:
                self._load(requested)
            except CorruptCheckpoint as fault:
                raise UserError("checkpoint.resume", where, f"a valid checkpoint; {fault}") from None
            return requested
        below, unread = None, ""
        while (checkpoint := newest(self.directory, self._sync, self._say, below=below)) is not None:
            try:
                self._load(checkpoint)
                return checkpoint
            except CorruptCheckpoint as fault:
                unread, below = f"{checkpoint.path} cannot be read: {fault}", checkpoint.manifest.step
            # The failed load may have pruned the engine, which cannot take an earlier, unpruned checkpoint any more.
            if self._config.prune.starts_dense:
                break
            self._say(f"warning: checkpoint {unread}; using the checkpoint before")
        # Starting anew is impossible: the load freed the engine's initial arrays to make room for the checkpoint's.
        if unread:
            raise UserError("checkpoint.resume", where, f"a valid checkpoint, or never to start anew; {unread}")
        return None

    def _load(self, checkpoint: Checkpoint) -> None:
        self._check_same(checkpoint)
        take(self._engine, checkpoint, self._sync, "checkpoint.resume", weights_only=False)

    def _start_from(self, weights: str) -> Path:
        """Load the parameters of a path, or of a name on the Hub, and return the path."""
        with together(self._sync):
            path = resolve_path(weights, "checkpoint.weights", WEIGHTS)
        anew = "adapters beside them" if self._engine.parts.adapters else "optimizer and data start anew"
        if is_pretrained(path):
            take_pretrained(self._engine, path, self._sync, "checkpoint.weights")
            self._keep_small_files(path, path)
            self._say(f"parameters from {commit_of(path) or path}; {anew}")
            return path
        checkpoint = resolve_checkpoint(path, self._sync, self._say, "checkpoint.weights")
        if LORA in checkpoint.manifest.run:
            raise adapters_only_error(checkpoint, "checkpoint.weights")
        try:
            copied = take(self._engine, checkpoint, self._sync, "checkpoint.weights", weights_only=True)
        except CorruptCheckpoint as fault:
            raise UserError("checkpoint.weights", str(path), f"a valid checkpoint; {fault}") from None
        new = "; each expert is a copy of the dense layer, routers are new" if copied else ""
        if copied and (moe := self._config.model.shape().moe) is not None:
            setting = other_function(moe, self._config.moe)
            new += f"; with {setting} the experts compute another function than the dense layer" if setting else ""
        self._say(f"parameters of step {checkpoint.manifest.step} from {checkpoint.path}; {anew}{new}")
        run = checkpoint.path.parent.parent if checkpoint.path.parent.name == FOLDER else checkpoint.path.parent
        self._keep_small_files(run / PRETRAINED, run)
        return path

    def _begin_with(self, path: Path) -> None:
        field = "checkpoint.adapter"
        if is_adapter(path):
            take_adapter(self._engine, path, self._sync, field)
        else:
            path = (checkpoint := resolve_checkpoint(path, self._sync, self._say, field)).path
            try:
                take(self._engine, checkpoint, self._sync, field, weights_only=True)
            except CorruptCheckpoint as fault:
                raise UserError(field, str(path), f"a valid checkpoint; {fault}") from None
        self._say(f"adapters from {path}; optimizer and data start anew")

    def _keep_small_files(self, source: Path, base: Path) -> None:
        """Copy config, tokenizer and templates of the initial model into the run directory, for `axonn-jax convert`.

        Warns if the data was prepared with another tokenizer than `base`, a pretrained directory or a run.
        """
        data = self._config.data.tokenizer
        with together(self._sync):
            if self._sync.rank == 0 and source.is_dir():
                keep_small_files(source, Path(self._config.log.dir) / PRETRAINED, "checkpoint.weights")
            if self._sync.rank == 0 and not alike(base, Path(data), "checkpoint.weights"):
                self._say(
                    f"warning: {data} was prepared with another tokenizer than that of {base}; "
                    f"`axonn-jax prepare --tokenizer {base}` takes it"
                )

    def _check_same(self, checkpoint: Checkpoint) -> None:
        """Raise ``UserError`` if a resumed run has other seeds or data than its checkpoint; all else may change."""
        now, then, path = self._facts(0), checkpoint.manifest.run, checkpoint.path
        if not set(_FACTS) <= set(then):
            raise UserError("checkpoint.resume", str(path), f"a checkpoint of `axonn-jax train`; {_OTHERWISE}")
        for key, kind in _FACTS.items():
            if type(then[key]) is not kind or (kind is int and not 0 <= then[key] < 2**63):
                raise CorruptCheckpoint(f"{MANIFEST} was not written by a save: run[{key!r}] is no {kind.__name__}")
        for key in ("data.seed", "train.seed", "model.seq_len"):
            if now[key] != then[key]:
                raise UserError(key, now[key], f"{then[key]}, as in {path}, {_OTHERWISE}")
        if now["data"] != then["data"]:
            data_config = self._config.data
            mixed = " and the mix" if data_config.mix else ""
            trained = f"the data{mixed} that {path} was trained on, {_OTHERWISE}"
            raise UserError(
                "data.mix" if data_config.mix else "data.path", data_config.mix or data_config.path, trained
            )

    def _facts(self, position: int) -> Mapping[str, object]:
        config = self._config
        return {
            "position": position,
            "global_batch": config.train.global_batch,
            "data.seed": config.data.seed,
            "train.seed": config.train.seed,
            "model.seq_len": config.model.shape().seq_len,
            "data": self._data,
            "config": to_toml(config),
            **self._lora,
        }

    def _unwritable(self) -> str:
        # Checked before the first step, so that a full or read-only disk is not discovered hours later.
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryFile(dir=self.directory):
                return ""
        except OSError as error:
            return reason(error)

    def _set_aside(self, step: int) -> None:
        """Rename checkpoints of later steps than the resumed one, which would otherwise count as the newest."""
        if self._sync.rank == 0:
            for path in all_steps(self.directory):
                if (step_of(path) or 0) > step:
                    names = (f"aside_{path.name}{f'.{number}' if number > 1 else ''}" for number in itertools.count(1))
                    path.rename(next(free for name in names if not os.path.lexists(free := path.with_name(name))))
        self._sync.gather("")  # no process may list the directory before the renames are done
