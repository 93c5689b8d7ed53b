"""Runs that live: what only hundreds of evaluations and saves, a full disk, signals and resumes bring to light.

A test of a few steps cannot see what grows: a text too long to be sent, a queue that nobody empties, a checkpoint that
a failed save takes with it. The losses are compared with those of a run that nothing disturbs.
"""

import json
import signal
from importlib.util import find_spec

import pytest
from commands import said
from launched import AXONN, finished, flags
from saved import disk_of

from axonn_jax.files.data.prepare import prepare
from axonn_jax.run.tracking.records import read_metrics

CONFIG = """
[model]
layers = 1
hidden = 16
heads = 2
seq_len = 24
[data]
mix = {{"{data}" = 1, "{other}" = 2}}
[train]
global_batch = 4
schedule = "constant"
lr = 3e-3
eval_batches = 1
ema = 0.9
"""
WATCH = """
import gc, json, os, signal, threading, time
from pathlib import Path

DISTURBED = json.loads(Path("disturbed.json").read_text())

class Watch:
    '''A tracker that notes what the process holds, and disturbs the run at the steps of disturbed.json.'''

    def start(self, run):
        self.directory, self.file = run.directory, Path("watched.jsonl").open("a")

    def log(self, step, values):
        if "loss" not in values:
            return
        memory = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6
        self.note("holds", step, memory, threading.active_count(), len(os.listdir("/proc/self/fd")))
        if step % 50 == 0:
            gc.collect()
            self.note("objects", step, len(gc.get_objects()))
        if (what := DISTURBED.get(str(step))) and not (done := Path(f"done_{step}")).exists():
            done.touch()  # a run that is killed comes by again
            getattr(self, what)()

    def fill(self):
        with open(self.directory.parent / "ballast", "wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    def empty(self):
        (self.directory.parent / "ballast").unlink()

    def jump(self):
        now = time.time
        time.time = lambda: now() + 86_400

    def kill(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def end(self):
        os.kill(os.getpid(), signal.SIGTERM)

    def warn(self):
        os.kill(os.getpid(), signal.SIGUSR1)

    def saved(self, step, path):
        steps = [int(path.name[5:]) for path in (self.directory / "checkpoints").glob("step_*")]
        self.note("saved", step, sorted(steps))

    def finish(self, status):
        self.note("finish", status)

    def note(self, *words):
        print(json.dumps(words), file=self.file, flush=True)
"""


@pytest.fixture
def place(prepared, tmp_path):
    """A folder with the settings of a run on a mix of two corpora, and the tracker that watches it."""
    folder = tmp_path
    (folder / "text").mkdir()
    (folder / "text/a.py").write_text("\n".join(f"def g{n}(y):\n    return y * {n % 31}\n" for n in range(900)))
    prepare(folder / "text", folder / "other", tokenizer=prepared, include=["*.py"], holdout=0.3)
    (folder / "watch.py").write_text(WATCH)
    (folder / "prompts.txt").write_text("def \n")
    (folder / "c.toml").write_text(CONFIG.format(data=prepared, other=folder / "other"))
    return folder


def undisturbed(place, steps, every):
    """Losses and held-out losses by step of a run without saves, samples and trackers."""
    said(
        "train", place / "c.toml", *flags({"log_dir": place / "alone", "train_steps": steps, "train_eval_every": every})
    )
    return losses(place / "alone")


def losses(run):
    """Losses and held-out losses by step; no step has two of a kind."""
    kinds = {"loss": {}, "eval_loss": {}}
    for record in read_metrics(run):
        for kind, found in kinds.items():
            if kind in record:
                assert record["step"] not in found, f"{kind} of step {record['step']} twice"
                found[record["step"]] = record[kind]
    return kinds["loss"], kinds["eval_loss"]


def watched(place, kind):
    lines = [json.loads(line) for line in (place / "watched.jsonl").read_text().splitlines()]
    return [words for name, *words in lines if name == kind]


def flat(place, objects_a_step, megabytes, behind=100):
    """Holds the most that a process has in the second half of its steps against that in the first half of them.

    A save under way has a few threads and files of its own, at any step.
    """
    held = [words for words in watched(place, "holds") if words[0] >= behind]
    halves = held[: len(held) // 2], held[len(held) // 2 :]
    for place_in_words, (what, more) in enumerate((("memory", megabytes), ("threads", 4), ("files", 8)), 1):
        before, after = (max(words[place_in_words] for words in half) for half in halves)
        assert after <= before + more, what
    first, *later = (words for words in watched(place, "objects") if words[0] >= behind)
    for step, objects in later:
        assert objects - first[1] <= objects_a_step * (step - first[0]) + 200, f"behind step {step}"


SERVICES = {
    name: value for name, value in {"log_wandb": "project", "log_mlflow": "experiment"}.items() if find_spec(name[4:])
}
STEPS, FULL, EMPTY = 300, 150, 172


# Three hundred evaluations and over two hundred saves are what it is about.
def test_hundreds_of_evaluations_and_saves_on_a_disk_that_fills_and_empties(place, tmp_path):
    want, held_out = undisturbed(place, STEPS + 2, 50)
    (place / "disturbed.json").write_text(json.dumps({FULL: "fill", EMPTY: "empty"}))
    with disk_of("16m", tmp_path / "disk") as disk:
        given = {
            "log_dir": disk / "run",
            "train_steps": STEPS,
            "train_eval_every": 1,
            "train_sample_every": 50,
            "train_sample_prompts": place / "prompts.txt",
            "checkpoint_every": 2,
            "checkpoint_keep": 2,
            "checkpoint_best": True,
            "log_tensorboard": True,
            "log_tracker": "watch:Watch",
            **SERVICES,
        }
        service = {"WANDB_MODE": "offline", "WANDB_DIR": str(place), "MLFLOW_TRACKING_URI": f"sqlite:///{place}/m.db"}
        words = [*AXONN, "train", place / "c.toml", *flags(given)]
        done = finished(words, 200, place, **service)
        assert done.returncode == 0, done.stderr[-3000:]
        found, evaluated = losses(disk / "run")
        assert found == {step: want[step] for step in range(1, STEPS + 1)}, "each line, full disk or not"
        assert list(evaluated) == list(range(1, STEPS + 1))
        assert evaluated == evaluated | {step: loss for step, loss in held_out.items() if step <= STEPS}
        saves = watched(place, "saved")
        assert len(saves) > 200 - (EMPTY - FULL)
        for step, kept in saves:  # of the complete ones so far the best is always there
            best = min((evaluated[other], other) for other, _ in saves if other <= step)
            assert best[1] in kept, f"behind step {step}"
        assert "log.tensorboard = True: OSError: [Errno 28] No space left on device; nothing more" in done.stderr
        assert done.stderr.count("Traceback") == 0
        assert watched(place, "finish") == [[0]]
        # A save leaves about 22 lists in tensorstore 0.1.86, whose metrics forget to give them back.
        flat(place, objects_a_step=30, megabytes=40)
        again = finished([*words, "--train.steps", STEPS + 2], 200, place, **service)
        assert again.returncode == 0, again.stderr[-3000:]
        assert losses(disk / "run")[0] == want
        assert losses(disk / "run")[1][STEPS + 2] == held_out[STEPS + 2]


LONG = 10_000
GRIDS = {"grid_data": 2}, {"grid_z": 2, "grid_y": 2}, {"grid_pipe": 2}
EACH = 60


@pytest.mark.slow
def test_what_a_month_brings(place):
    """20,000 lines of metrics, kill -9, SIGTERM, a clock that jumps a day, a job that is requeued, other grids."""
    want, held_out = undisturbed(place, LONG, 1)
    disturbed = {1_200: "kill", 2_600: "end", 4_100: "jump", 5_300: "warn"}
    (place / "disturbed.json").write_text(json.dumps(disturbed))
    alike = LONG - EACH * len(GRIDS)
    given = {
        "log_dir": place / "run",
        "train_steps": alike,
        "train_eval_every": 1,
        "checkpoint_every": 500,
        "checkpoint_best": True,
        "log_tensorboard": True,
        "log_tracker": "watch:Watch",
    }
    words = [*AXONN, "launch", "--requeue", "--mpirun", "mpirun", "train", place / "c.toml", *flags(given)]
    for restarts, status in enumerate((128 + signal.SIGTERM, 128 + signal.SIGUSR1, 0)):
        slurm = {"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": str(restarts)}
        done = finished(words, 1000, place, **slurm)
        assert done.returncode == status, done.stderr[-3000:]
        assert "Traceback" not in done.stderr
    assert losses(place / "run") == tuple(
        {step: loss for step, loss in kind.items() if step <= alike} for kind in (want, held_out)
    )
    assert watched(place, "finish") == [[128 + signal.SIGTERM], [128 + signal.SIGUSR1], [0]]
    flat(place, objects_a_step=1, megabytes=20, behind=6_000)
    (place / "disturbed.json").write_text("{}")
    for number, grid in enumerate(GRIDS, 1):
        there = {**given, "train_steps": alike + number * EACH, **grid}
        done = finished([*AXONN, "train", place / "c.toml", *flags(there)], 300, place)
        assert done.returncode == 0, done.stderr[-3000:]
    found, evaluated = losses(place / "run")
    assert found == pytest.approx(want, rel=1e-4), "rounding of other grids alone, in a few dozen steps"
    assert evaluated == pytest.approx(held_out, rel=1e-4)
