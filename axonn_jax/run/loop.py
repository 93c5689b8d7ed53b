"""Training loop around a trainer: data, evaluation, metrics, progress, pictures, checkpoints."""

import contextlib
import math
import signal
import time
from pathlib import Path
from typing import Any, cast

import numpy as np

from axonn_jax.core.adapters.config import step_flops
from axonn_jax.core.checkpoint.manifest import name_of
from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.distributed.processes import World
from axonn_jax.core.engines.optimizer import learning_rate
from axonn_jax.core.engines.step import StepMetrics
from axonn_jax.core.memory.report import write as write_memory
from axonn_jax.core.terminal import duration
from axonn_jax.files.data.corpora import Corpora
from axonn_jax.files.data.loader import Loader
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import settings_by_name
from axonn_jax.run.metrics import Best, Samples, keep_settings, plot_loss, recorded_eval_losses, trackers_of, usage
from axonn_jax.run.profile import Profile
from axonn_jax.run.progress import Progress
from axonn_jax.run.resume import Checkpoints
from axonn_jax.run.signals import StopSignals
from axonn_jax.run.tracking.files import start_trackers
from axonn_jax.run.tracking.records import JsonLines
from axonn_jax.run.tracking.tracker import RunFacts, Trackers, Value
from axonn_jax.trainer import Trainer

MOST_SKIPPED = 20
"""Consecutive non-finite steps that end a run; fp16's loss scale falls from its maximum to its minimum in 14."""


class Run:
    """The training loop of one run; collective over its processes."""

    def __init__(self, config: Config, data: Corpora, world: World, trainer: Trainer, sync: HostSync):
        self.config, self.data, self.trainer, self.engine, self.sync = config, data, trainer, trainer.engine, sync
        self.shape = shape = config.model.shape()
        self.directory, self.first = Path(config.log.dir), world.rank == 0
        self.rows = trainer.rows(config.train.global_batch)
        self.progress = Progress(config.train.steps, shown=self.first)
        self.checkpoints = Checkpoints(config, data, self.engine, sync, self.say)
        self.train_data = self._loader(path=data, position=self.checkpoints.resume(), dropped=config.goldfish)
        loaders = ((c.name, self._loader(path=c.manifest, split="valid", shuffle=False)) for c in data.evaluated)
        # A generator, so that only one loader keeps its shards open at a time.
        self.eval_batches = {name: loader.first(config.train.eval_batches) for name, loader in loaders}
        self.tokens, self.rate = config.train.global_batch * shape.seq_len, learning_rate(config.train)
        self.flops = step_flops(shape, config.lora, config.train.global_batch)
        self.start = self.engine.steps_done
        self.profile = Profile(config.log.profiled, self.directory, world.rank, self.say, behind=self.start)
        self.pruning = trainer.pruning
        self.pruning.loaded()
        self.first_position, self.skipped_in_row = self.train_data.position, 0
        self.lines, self.trackers = JsonLines(warn=self.say), Trackers([], RunFacts(self.directory, ""), self.say)
        self.best, self.samples = Best(), cast(Samples | None, None)

    def say(self, text: str) -> None:
        """Print a line on the first process."""
        self.progress.say(text)

    def go(self, stop: StopSignals) -> int:
        """Train until the last step or a signal to stop; return the exit status."""
        # Trackers must hear of every kind of end, or a service would show the run as running forever.
        with contextlib.ExitStack() as ending:
            self._begin(ending)
            status = self._go(stop)
            self.trackers.finish(status)
        return status

    def _begin(self, ending: contextlib.ExitStack) -> None:
        config, run = self.config, RunFacts(self.directory, "", resumed=self.start)
        if self.first:
            keep_settings(config, self.directory)
            entries = trackers_of(config.log, self.lines)
            self.trackers = start_trackers(entries, self.directory, settings_by_name(config), self.start, self.say)
        ending.enter_context(self.trackers)
        if self.engine.heartbeat is not None:
            self.engine.heartbeat.farewell = self.trackers.finish
        losses = recorded_eval_losses(self.directory if self.first and self.start else None, self.sync)
        self.best = Best((step, loss) for step, loss, _ in losses)
        self.checkpoints.recall({step: loss for step, loss, complete in losses if complete})
        if config.train.sample_every:
            self.samples = Samples(config, self.shape, self.engine.grid, self.sync, run=run, say=self.say)
            ending.callback(self.samples.close)

    def _go(self, stop: StopSignals) -> int:
        steps, every, save_every = self.config.train.steps, self.config.train.eval_every, self.config.checkpoint.every
        if self.start >= steps:
            self.say(
                f"step {self.start} of {steps} is done already: nothing left to train. A larger train.steps goes on, "
                "checkpoint.resume = 'never' begins anew"
            )
            self._say_undone()
            return 0
        if self.start:
            self._make_up()
        if self._enough:
            self._pictures(self.start)
            self.say(f"ended early at step {self.start}: nothing left to train. A larger train.patience, or 0, goes on")
            return 0
        self.say(f"{self.shape.params():,} parameters; {self.tokens:,} tokens a step; run directory {self.directory}")
        start = mark = time.monotonic()
        stopping = enough = False
        with self.progress, self.profile:
            self.pruning.at(self.start)
            for line in (*self.engine.explain(self.config.train.global_batch), *self.pruning.lines()):
                self.say(line)
            self.say("compiling the step (the first time takes a while)")
            if self.start == 0 and self.config.checkpoint.weights and self.eval_batches:
                self._evaluate(0)  # the baseline of a run that starts from pretrained weights
            previous = waiting = cast(StepMetrics | None, None)
            fault = self.train_data.ahead(min(2, steps - self.start))
            for step in range(self.start + 1, steps + 1):
                if save_every > 0 and step % save_every == 0:
                    self.checkpoints.settle()  # so that a run that dies is never more than one save behind
                # Pruning blocks on the device, and its time must not count as part of either step.
                if waiting is not None and self.pruning.due(step):
                    mark, waiting = self._report(step - 1, waiting, mark), None
                self.profile.step_starts(step, previous)
                metrics = self.trainer.step(next(self.train_data))
                self.profile.step_ended(step, metrics)
                mark += self.pruning.took()
                fault = self.train_data.ahead(min(2, steps - step))
                for line in self.pruning.lines():
                    self.say(line)
                loss, ended = metrics["loss"], waiting is None
                # Metrics are read one step late, so the host only blocks while the devices have the next step queued.
                if waiting is not None:
                    mark = self._report(step - 1, waiting, mark)
                # Every process looks at the same step's metrics here, so they all leave the loop together.
                if previous is not None and self._broken(previous):
                    return self._abort(step - 1)
                previous = waiting = metrics
                # A pipelined or offloaded step has already finished when it returns, so reading it does not block.
                if isinstance(loss, np.generic) or (ended and loss.is_ready()):
                    mark, waiting = self._report(step, waiting, mark), None
                stopping = stop.requested(fault) and step < steps
                evaluates = self.eval_batches and (step == steps or (every > 0 and step % every == 0 and not stopping))
                samples = self.samples if not stopping and self.samples and self.samples.due(step) else None
                saves = step == steps or stopping or (save_every > 0 and step % save_every == 0)
                # Write the metrics of all steps in a checkpoint before it, so a resumed run misses no line.
                if waiting is not None and (evaluates or saves or samples):
                    mark, waiting = self._report(step, waiting, mark), None
                eval_loss = math.inf
                if evaluates:
                    eval_loss = self._evaluate(step)
                    saves = saves or self.checkpoints.best_at(eval_loss)
                    enough = self._enough and step < steps
                    mark = time.monotonic()
                if saves or enough:
                    self.checkpoints.settle()
                    self._tell_saved()  # before `saver.last` is replaced by the newer one
                    self.checkpoints.save(step, self.train_data.position, eval_loss)
                if samples is not None:
                    self._sample(samples, step)
                    mark = time.monotonic()
                if stopping or enough:
                    break
        if stopping:
            return self._stopped(stop, step, fault)
        error = self.checkpoints.settle()
        self._tell_saved()
        done = [f"trained {step} {f'of {steps} ' if enough else ''}steps in {duration(time.monotonic() - start)}"]
        epochs = self.data.epochs(self.train_data.position, self.shape.seq_len)
        done += [f"{count:.3g} epochs of {name}" for name, count in epochs.items()]
        saved = "error: the last checkpoint was not saved" if error else f"checkpoint {self._checkpoint(step)}"
        if enough:
            self.say(f"ended early: no held-out loss was below that of step {self.best.step}, {self.best.loss:.4f}")
        self.say("; ".join([", ".join(done), *self._pictures(step), saved]))
        if self.config.checkpoint.best and math.isfinite(self.best.loss):
            best, losses = self.checkpoints.saver.best, self.checkpoints.saver.losses
            where = str(self._checkpoint(best)) if best else "(none)"
            # The checkpoint of the best step may be missing: its save failed, or the initial weights were best.
            if best and best != self.best.step:
                where = f"(none); the best one, {losses[best]:.4f}, is {where}"
            self.say(f"the lowest held-out loss, {self.best.loss:.4f}, is of step {self.best.step}; checkpoint {where}")
        self._say_undone()
        return 1 if error else 0

    @property
    def _enough(self) -> bool:
        """True if the last `train.patience` evaluations did not lower the loss."""
        return 0 < self.config.train.patience <= self.best.since

    def _make_up(self) -> None:
        """Evaluate and sample at the resumed step if the run was stopped between its checkpoint and those."""
        every, step, texts = self.config.train.eval_every, self.start, self.samples.log if self.samples else None
        recorded = [bool(log and key in log.resumed_keys) for log, key in ((self.lines, "eval_loss"), (texts, "text"))]
        evaluated, sampled = (bool(self.sync.gather_number(value)[0]) for value in recorded)
        if every > 0 and step % every == 0 and not evaluated:
            self.checkpoints.recall({step: self._evaluate(step)})
        if self.samples and self.samples.due(step) and not sampled:
            self._sample(self.samples, step)

    def _say_undone(self) -> None:
        if line := self.pruning.undone():
            self.say(line)

    def _pictures(self, step: int) -> list[str]:
        """Draw the run's pictures; return their paths joined by commas, or an empty list."""
        drawn: list[Path] = []
        try:
            pictures = self.engine.write_timeline(self.directory)
            if self.first:
                drawn = [plot_loss(self.directory, self.data.unigram_entropy if self.eval_batches else None), *pictures]
                shown: dict[str, Value] = {f"pictures/{path.stem}": path for path in drawn if path.suffix == ".png"}
                self.trackers.record(step, shown)
        except (OSError, ValueError) as error:
            self.say(f"warning: the run's pictures could not be written: {getattr(error, 'strerror', None) or error}")
        return [", ".join(map(str, drawn))] if drawn else []

    def _tell_saved(self) -> None:
        if last := self.checkpoints.saver.last:
            self.trackers.saved(last[0], self._checkpoint(last[0]))

    def _sample(self, samples: Samples, step: int) -> None:
        model = self.trainer.averaged if self.config.train.ema else self.trainer.model
        self.trackers.log(step, samples=samples.write(step, model))

    def _checkpoint(self, step: int) -> Path:
        return self.checkpoints.directory / name_of(step)

    def _stopped(self, stop: StopSignals, step: int, fault: str) -> int:
        """End on a signal (status 128 + its number) or a fault of the data (2); status 1 if the state is not saved."""
        error, number = self.checkpoints.settle(), stop.number()
        self._tell_saved()
        faults = [text for text in self.sync.gather(fault) if text]
        why = f"error: {faults[0]}; ended" if faults else f"ended by {signal.Signals(number).name}"
        outcome = f"its state was not saved: {error}" if error else f"checkpoint {self._checkpoint(step)}"
        self.say(f"{'error: ' if error and not faults else ''}{why} after step {step}; {outcome}")
        self._pictures(step)  # after the line: drawing is slow, and people wait to hear whether the state is saved
        return 1 if error else 2 if faults else 128 + number

    def _abort(self, step: int) -> int:
        """End a run whose steps no longer change anything, without a checkpoint."""
        self.checkpoints.settle()
        last, state = self.checkpoints.saver.last, "the weights are not finite either"
        if self.checkpoints.finite():
            state = "the weights are finite: check the data and train.lr"
        fallback = f"the last checkpoint is of step {last[0]}" if last else "there is no checkpoint"
        why = f"loss or gradients of the last {MOST_SKIPPED} steps were not finite"
        self.say(f"error: ended after step {step}: {why}; {state}; {fallback}")
        return 1

    def _broken(self, metrics: StepMetrics) -> bool:
        finite = math.isfinite(float(metrics["loss"]) + float(metrics["grad_norm"]))
        self.skipped_in_row = 0 if finite else self.skipped_in_row + 1
        return self.skipped_in_row >= MOST_SKIPPED

    def _report(self, step: int, metrics: StepMetrics, mark: float) -> float:
        """Wait for a step (the run's only host sync per step) and record its metrics; return the completion time."""
        loss, norm = float(metrics["loss"]), float(metrics["grad_norm"])
        now = time.monotonic()
        if not self.first:
            return now
        self._tell_saved()
        finite = math.isfinite(loss) and math.isfinite(norm)
        step_s, skipped = now - mark, int(metrics["skipped"])
        if not finite:
            self.say(f"step {step} changed nothing: its loss ({loss:.4g}) or gradients ({norm:.4g}) are not finite")
        if step % self.config.log.every == 0 or step == self.config.train.steps or not finite:
            position = self.first_position + (step - self.start) * self.config.train.global_batch
            record: dict[str, Value] = {
                "loss": loss,
                "tokens": position * self.shape.seq_len,
                "tokens_per_s": self.tokens / step_s,
                "step_s": step_s,
                "grad_norm": norm,
                "lr": float(self.rate(step - 1 - (skipped if finite else skipped - 1))),
                "skipped": skipped,
                **{key: float(value) for key, value in metrics.items() if key not in ("loss", "grad_norm", "skipped")},
                **usage(self.engine.grid, self.flops, step_s),
                **{f"epochs/{name}": count for name, count in self.data.epochs(position, self.shape.seq_len).items()},
            }
            self.trackers.record(step, record)
        if step == self.pruning.pruned_at + 1:
            write_memory(self.engine.memory(), self.directory, self.say)
        self.progress.update(step, loss, self.tokens / step_s, step_s, self.checkpoints.saver.last, skipped)
        return now

    def _evaluate(self, step: int) -> float:
        losses = {name: self.trainer.evaluate(batches) for name, batches in self.eval_batches.items()}
        loss, entropy = self.data.mean(losses), self.data.unigram_entropy
        by_corpus = losses if len(self.data.all) > 1 else {}
        extra = {f"eval_loss/{name}": value for name, value in by_corpus.items()}
        self.trackers.log(step, eval_loss=loss, unigram_entropy=entropy, **extra)
        shown = "".join(f", {name} {value:.4f}" for name, value in by_corpus.items())
        self.say(f"step {step}: held-out loss {loss:.4f} (unigram entropy {entropy:.4f}){shown}")
        self.best.seen(step, loss)
        return loss

    def _loader(self, **options: Any) -> Loader:
        batch, seed, seq_len = self.config.train.global_batch, self.config.data.seed, self.shape.seq_len
        # `main` has already compared the checksums where data.verify asks for it.
        return Loader(seq_len=seq_len, global_batch=batch, rows=self.rows, seed=seed, verify=False, **options)
