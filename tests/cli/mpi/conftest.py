import mpi_runs
import pytest
import texts
from commands import said
from launched import write_config

from axonn_jax.cli.main import main


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """Training text with a vocabulary of 512."""
    folder = tmp_path_factory.mktemp("mpi")
    said("prepare", texts.write(folder / "text"), folder / "data", "--vocab", "512")
    return folder / "data"


@pytest.fixture
def config(prepared, tmp_path):
    """A run's file that saves every second step."""
    return write_config(tmp_path / "c.toml", prepared, 2, "[checkpoint]\nevery = 2")


@pytest.fixture(scope="session")
def one_process(prepared, tmp_path_factory):
    """The directory of a model's run in one process and one stage."""
    folder, done = tmp_path_factory.mktemp("one"), {}

    def run(model):
        if model not in done:
            done[model] = folder / model.replace(" ", "_")
            assert main(["train", *mpi_runs.words(model, folder, prepared, done[model])]) == 0
        return done[model]

    return run


@pytest.fixture(scope="session")
def run_of(prepared, tmp_path_factory):
    """The directory of a case of mpi_runs.py, and what its run said; fails where it did not end well."""
    folder, started = tmp_path_factory.mktemp("runs"), {}

    def run(name):
        start = mpi_runs.start_of(name)
        if start not in started:
            started[start] = mpi_runs.run_start(start, folder, prepared)
        done, texts = started[start]
        text = texts.get(name)
        assert text is not None, f"not begun; the start ended with {done.returncode}: {done.stderr[-3000:]}"
        assert "\ntrained " in text, f"status {done.returncode}: {text[-3000:]}"
        return folder / mpi_runs.directory_of(name), text

    run.status = lambda name: (run(name), started[mpi_runs.start_of(name)][0].returncode)[1]
    return run
