"""Trackers of services: Weights & Biases and MLflow, configured by their libraries' environment variables."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from axonn_jax.core.errors import UserError
from axonn_jax.run.tracking.tracker import RunFacts, Value

_PARAMS = 100
"""Maximum number of settings in a request to MLflow."""
_REFUSED = re.compile(r"[^/\w.\- :]")
"""Characters that MLflow refuses in a metric's name, such as those of "acc@1" or "eval_loss/c++"."""
_WAIT_S = 30.0
"""Seconds to wait for W&B's first answer, instead of its default of 90."""
_PATIENCE = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""MLflow's variables for the first request; with its defaults an unreachable server takes minutes to report."""


class WandbTracker:
    """Tracker that logs a run to Weights & Biases.

    With `WANDB_MODE=offline` the run is written to `wandb/` in the run directory, for `wandb sync`. W&B's process then
    writes 32 KiB at a time: `kill -9` loses the rows since the last write, SIGTERM none.

    Args:
        project: Name of the project.
    """

    def __init__(self, project: str):
        self._project = project
        self._run: Any = None

    def start(self, run: RunFacts) -> None:
        """Begin the run, or resume the one with this id; raise ``UserError`` without an account."""
        import wandb

        patience: dict[str, object] = {} if "WANDB_INIT_TIMEOUT" in os.environ else {"init_timeout": _WAIT_S}
        try:
            self._run = wandb.init(
                project=self._project,
                id=run.id,
                name=run.directory.name,
                dir=os.environ.get("WANDB_DIR", str(run.directory)),
                config=dict(run.config),
                resume="allow",
                # The run prints its log and progress itself.
                settings=wandb.Settings(console="off", silent=True, **patience),
            )
        except wandb.errors.UsageError as error:
            accepted = f"an account (`wandb login`), or WANDB_MODE=offline; {str(error).splitlines()[0]}"
            raise UserError("log.wandb", self._project, accepted) from None
        self._run.config.update(dict(run.config), allow_val_change=True)
        # Values of a step arrive in several calls, and each call is a row: the horizontal axis is the value `step`
        # instead of W&B's count of rows.
        self._run.define_metric("*", step_metric="step")

    def log(self, step: int, values: Mapping[str, Value]) -> None:
        """Record a row; pictures and tables become W&B's media types."""
        import wandb

        def media(value: Value) -> object:
            if isinstance(value, list):
                columns: list[str] = list(value[0]) if value else []
                rows: list[list[object]] = [[row.get(name) for name in columns] for row in value]
                return wandb.Table(columns=columns, data=rows)
            return wandb.Image(str(value)) if isinstance(value, Path) else value

        self._run.log({"step": step, **{name: media(value) for name, value in values.items()}})

    def finish(self, status: int) -> None:
        """End the run as finished for status 0, otherwise as failed."""
        self._run.finish(exit_code=status)


class MlflowTracker:
    """Tracker that logs a run to MLflow at `MLFLOW_TRACKING_URI`, a server or a database such as `sqlite:///mlflow.db`.

    Args:
        experiment: Name of the experiment, which is created if it does not exist.
    """

    def __init__(self, experiment: str):
        self._experiment = experiment

    def start(self, run: RunFacts) -> None:
        """Begin a run, or resume the one that is tagged with this id."""
        from mlflow import MlflowClient
        from mlflow.entities import Param

        self._client = MlflowClient()
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
        """Record numbers, without waiting for a server; texts, tables and pictures become artifacts."""
        import time

        from mlflow.entities import Metric

        now, numbers = int(time.time() * 1000), list[object]()
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
        """End the run as finished for status 0, as killed by a signal above 128, otherwise as failed."""
        import mlflow

        mlflow.flush_async_logging()
        self._client.set_terminated(self._id, "FINISHED" if not status else "KILLED" if status > 128 else "FAILED")


@contextmanager
def _impatient() -> Iterator[None]:
    """Let MLflow's first request fail quickly, unless the user's variables say otherwise."""
    # Only the first request: once a run is being logged, waiting for a busy server is better than losing values.
    defaults = {name: value for name, value in _PATIENCE.items() if name not in os.environ}
    os.environ.update(defaults)
    try:
        yield
    finally:
        for name in defaults:
            del os.environ[name]
