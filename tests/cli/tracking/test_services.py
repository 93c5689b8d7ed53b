"""Weights & Biases, MLflow and a user's own tracker of one run that is killed and goes on on another grid."""

import json
import signal
import struct
from unittest.mock import MagicMock

import pytest
from launched import command, finished, write_config

from axonn_jax.run.tracking.files import FACTS
from axonn_jax.run.tracking.records import read_metrics
from axonn_jax.run.tracking.services import MlflowTracker, WandbTracker
from axonn_jax.run.tracking.tracker import RunFacts

STEPS, SAVED, KILLED = 8, 2, 5
OWN = f"""
import json, os, signal

class Mine:
    def start(self, run):
        self.path, self.first = run.directory / "own.jsonl", not run.resumed
        self.write("start", run.id, run.resumed, run.config["grid.z"])

    def log(self, step, values):
        self.write(step, *values)
        if self.first and step == {KILLED}:
            os.kill(os.getpid(), signal.SIGKILL)

    def saved(self, step, path):
        self.write("saved", step, (path / "manifest.json").exists())

    def finish(self, status):
        self.write("finish", status)

    def write(self, *words):
        with self.path.open("a") as file:
            file.write(json.dumps(words) + "\\n")
"""
LOG = """
[checkpoint]
every = 2
[log]
tracker = "mine:Mine"
wandb = "project"
mlflow = "experiment"
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory, prepared):
    """A run on data 2, killed behind step 5 of which step 4 is saved, and finished on z 2 x 2; its directory."""
    pytest.importorskip("wandb", reason="AXONN_EXTRAS=wandb,mlflow scripts/setup installs it")
    pytest.importorskip("mlflow")
    place = tmp_path_factory.mktemp("tracked")
    (place / "mine.py").write_text(OWN)
    config = write_config(place / "c.toml", prepared, 1, LOG)
    variables = {"WANDB_MODE": "offline", "MLFLOW_TRACKING_URI": f"sqlite:///{place}/mlflow.db"}
    given = {"train_steps": STEPS, "train_eval_every": 2}
    killed = finished(command(config, place / "run", grid_data=2, **given), cwd=place, **variables)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-3000:]
    again = finished(command(config, place / "run", grid_z=2, grid_x=2, **given), cwd=place, **variables)
    assert again.returncode == 0, again.stderr[-3000:]
    assert "warning" not in again.stderr
    return place / "run"


def losses(directory):
    return {record["step"]: record["loss"] for record in read_metrics(directory) if "loss" in record}


def test_a_tracker_of_ones_own_is_told_of_each_step_once(run):
    told = [json.loads(line) for line in (run / "own.jsonl").read_text().splitlines()]
    (first, second) = (words[2:] for words in told if words[0] == "start")
    assert first == [0, 1]
    assert second in ([2, 2], [4, 2])  # the save of step 4 may be under way
    assert len({words[1] for words in told if words[0] == "start"}) == 1
    assert [words[0] for words in told if "loss" in words] == [*range(1, STEPS + 1)]
    assert [words[0] for words in told if "eval_loss" in words] == [2, 4, 6, 8]
    assert told[-1] == ["finish", 0]
    saved = [words[1:] for words in told if words[0] == "saved"]
    assert all(complete for _, complete in saved)
    assert {2, 6, 8} <= {step for step, _ in saved}
    assert len({step for step, _ in saved}) == len(saved), "once, over the resume too"


def records(path):
    """The records of an offline run: behind 7 bytes LevelDB's log, whose blocks have 32 KiB."""
    raw, at, whole = path.read_bytes(), 7, b""
    while at + 7 <= len(raw):
        left = 2**15 - at % 2**15
        length, kind = struct.unpack_from("<HB", raw, at + 4) if left > 7 else (0, 0)
        if not kind:  # padding of a block
            at += left
            continue
        whole, at = whole + raw[at + 7 : at + 7 + length], at + 7 + length
        if kind in (1, 4):  # whole, or its last part
            yield whole
            whole = b""


def test_weights_and_biases_has_one_run_with_each_step_once(run):
    from wandb.proto.wandb_internal_pb2 import Record

    rows, ids, pictures = [], set(), set()
    for path in sorted(run.glob("wandb/offline-run-*/*.wandb")):
        for record in map(Record.FromString, records(path)):
            ids |= {record.run.run_id} - {""}
            row = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            rows += [row] if row else []
            pictures |= {name.partition(".")[0] for name in row if name.startswith("pictures/")}
    assert ids == {json.loads((run / FACTS).read_text())["id"]}
    got = {row["step"]: row["loss"] for row in rows if "loss" in row}
    assert sorted(got) == [row["step"] for row in rows if "loss" in row], "none twice"
    assert {6, 7, 8} <= set(got)  # rows of the killed process that W&B had not written are lost
    assert got == pytest.approx({step: loss for step, loss in losses(run).items() if step in got}, abs=1e-5)
    assert [row["step"] for row in rows if "eval_loss" in row][-2:] == [6, 8]
    assert pictures == {"pictures/loss"}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of MLflow's own use of SQLAlchemy
def test_mlflow_has_one_run_with_each_step_once(run):
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{run.parent}/mlflow.db")
    (only,) = client.search_runs([client.get_experiment_by_name("experiment").experiment_id])
    assert only.info.status == "FINISHED"
    assert only.data.params["model.layers"] == "1"
    history = [(point.step, point.value) for point in client.get_metric_history(only.info.run_id, "loss")]
    assert [step for step, _ in history] == [*range(1, STEPS + 1)]
    assert dict(history) == pytest.approx(losses(run), abs=1e-5)
    assert [point.step for point in client.get_metric_history(only.info.run_id, "eval_loss")] == [2, 4, 6, 8]


def test_mlflow_gets_a_name_that_it_refuses_in_characters_that_it_takes():
    pytest.importorskip("mlflow")
    tracker = MlflowTracker("experiment")
    tracker._client, tracker._id, tracker._remote = MagicMock(), "id", False
    tracker.log(1, {"acc@1": 0.5, "eval_loss/c++": 2.0, "été 2.x: a-b": 1.0})
    metrics = tracker._client.log_batch.call_args.kwargs["metrics"]
    assert [metric.key for metric in metrics] == ["acc_1", "eval_loss/c__", "été 2.x: a-b"]


def test_wandb_without_an_account_is_one_line(tmp_path, prepared):
    pytest.importorskip("wandb")
    config = write_config(tmp_path / "c.toml", prepared, 1, '[log]\nwandb = "project"')
    done = finished(command(config, tmp_path / "run"), HOME=str(tmp_path), WANDB_BASE_URL="http://127.0.0.1:9")
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("error: log.wandb = 'project': an account (`wandb login`), or WANDB_MODE=offline; ")


@pytest.mark.parametrize(("own", "waits"), [(None, 30), ("7", None)])
def test_wandb_waits_for_its_server_as_the_user_says_or_briefly(tmp_path, monkeypatch, own, waits):
    wandb = pytest.importorskip("wandb")
    given = {}
    monkeypatch.setattr(wandb, "init", lambda **options: given.update(options) or MagicMock())
    if own:
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", own)
    WandbTracker("project").start(RunFacts(tmp_path, "abc"))
    assert given["settings"].model_dump(exclude_unset=True).get("init_timeout") == waits


def test_mlflow_without_its_server_is_one_line_soon(tmp_path, prepared):
    """Seven retries, MLflow's own, take four minutes."""
    pytest.importorskip("mlflow")
    config = write_config(tmp_path / "c.toml", prepared, 1, '[log]\nmlflow = "experiment"')
    done = finished(command(config, tmp_path / "run"), timeout=100, MLFLOW_TRACKING_URI="http://127.0.0.1:9")
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = [line for line in done.stderr.splitlines() if "error" in line]
    assert line.startswith("error: log.mlflow = 'experiment': a tracker that starts; MlflowException: ")
