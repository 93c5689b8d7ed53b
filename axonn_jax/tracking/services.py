"""Trackers of services: Weights & Biases and MLflow, each by its own library and its variables."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.tracking.tracker import RunFacts, Value

_PARAMS = 100
"""Settings that MLflow takes in a request."""
_REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow does not take in a metric's name, as in "acc@1" or "eval_loss/c++"."""
_WAIT_S = 30.0
"""Time for W&B's first answer; by itself it waits for 90 s."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's variables for a first request; by themselves a server that is not there takes minutes."""


class WandbTracker:
    """Run of Weights & Biases; `WANDB_MODE=offline` writes it to `wandb/` of the run directory, for `wandb sync`.

    Each call is a row of its own whose horizontal axis is the value `step`, as values of one step come one after the
    other. Offline, W&B's own process writes 32 KiB at a time: `kill -9` loses the rows of less, SIGTERM none.

    Args:
        project: Name of the project.
    """

    def __init__(self, project: str):
        self._project = project
        self._run: Any = None

    def start(self, run: RunFacts) -> None:
        """Begin the run, or go on with the one of this id; raise ``UserError`` without an account."""
        import wandb

        patience: dict[str, Any] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": _WAIT_S}
        try:
            self._run = wandb.init(
                project=self._project,
                id=run.id,
                name=run.directory.name,
                dir=os.environ.get("WANDB_DIR", str(run.directory)),
                config=dict(run.config),
                resume="allow",
                # The log and the display of progress are the run's own.
                settings=wandb.Settings(console="off", silent=True, **patience),
            )
        except wandb.errors.UsageError as error:
            accepted = f"an account (`wandb login`), or WANDB_MODE=offline; {str(error).splitlines()[0]}"
            raise UserError("log.wandb", self._project, accepted) from None
        self._run.config.update(dict(run.config), allow_val_change=True)
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record a row; pictures and tables are media."""
        import wandb

        def media(value: Value) -> Any:
            if isinstance(value, list):
                columns: list[Any] = list(value[0]) if value else []
                rows: list[Any] = [[row.get(name) for name in columns] for row in value]
                return wandb.Table(columns=columns, data=rows)
            return wandb.Image(str(value)) if isinstance(value, Path) else value

        self._run.log({"step": step, **{name: media(value) for name, value in values.items()}})

    def finish(self, status: int) -> None:
        """End the run: finished with status 0, else failed."""
        self._run.finish(exit_code=status)


class MlflowTracker:
    """Run of an MLflow experiment at `MLFLOW_TRACKING_URI`: a server, or a database as `sqlite:///mlflow.db`.

    Args:
        experiment: Name of the experiment, which is made where it is not there.
    """

    def __init__(self, experiment: str):
        self._experiment = experiment

    def start(self, run: RunFacts) -> None:
        """Begin a run, or go on with the one whose tag has this id."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client: Any = MlflowClient()
        self._remote = str(self._client.tracking_uri).startswith("http")
        with _impatient():
            existing = self._client.get_experiment_by_name(self._experiment)
        experiment = existing.experiment_id if existing else self._client.create_experiment(self._experiment)
        tag = "axonn_jax.run"
        if runs := self._client.search_runs([experiment], f"tags.`{tag}` = '{run.id}'") if run.resumed else []:
            self._id = runs[0].info.run_id
            self._client.set_terminated(self._id, "RUNNING")
            return
        new_run = self._client.create_run(experiment, run_name=run.directory.name, tags={tag: run.id})
        self._id = new_run.info.run_id
        params = [Param(name, str(value)) for name, value in run.config.items()]
        for at in range(0, len(params), _PARAMS):
            self._client.log_batch(self._id, params=params[at : at + _PARAMS])

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record numbers, without waiting for a server; texts, tables and pictures are artifacts."""
        import time

        from mlflow.entities import Metric

        now, numbers = int(time.time() * 1000), list[Any]()
        for name, value in values.items():
            if isinstance(value, Path):
                self._client.log_artifact(self._id, str(value))
            elif isinstance(value, list):
                self._client.log_dict(self._id, {"rows": value}, f"{name}/{step:08d}.json")
            elif isinstance(value, str):
                self._client.log_text(self._id, value, f"{name}/{step:08d}.txt")
            else:
                numbers.append(Metric(_REFUSED.sub("_", name), float(value), now, step))
        if numbers:
            self._client.log_batch(self._id, metrics=numbers, synchronous=not self._remote)

    def finish(self, status: int) -> None:
        """End the run: finished with status 0, killed by a signal (above 128), else failed."""
        import mlflow

        mlflow.flush_async_logging()
        self._client.set_terminated(self._id, "FINISHED" if not status else "KILLED" if status > 128 else "FAILED")


@contextmanager
def _impatient() -> Iterator[None]:
    """Let MLflow give up soon, where the user's variables do not say when; later requests are worth their waits."""
    defaults = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(defaults)
    try:
        yield
    finally:
        for name in defaults:
            del os.environ[name]
