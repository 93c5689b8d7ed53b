"""What the tests of bad input share: prepared data, an empty place to run in, and what a refusal looks like."""

import shutil
import sys
import types

import pytest
from commands import refusal

from axonn_jax.core.distributed import initialize

BASE = {
    "model": ["layers = 2", "hidden = 32", "heads = 4", "seq_len = 16"],
    "data": ['path = "DATA"'],
    "grid": ["x = 1"],
    "train": ["steps = 10", "global_batch = 8"],
}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty current directory, in which a run that would start fails."""

    def train(config):
        raise AssertionError("training was started")

    module = types.ModuleType("axonn_jax.run.main")
    module.train = train
    monkeypatch.setitem(sys.modules, "axonn_jax.run.main", module)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def write_config(place, prepared):
    """Writes run.toml: a good configuration with some keys changed."""

    def write(changes=None, data=prepared):
        tables = {name: list(lines) for name, lines in BASE.items()}
        for table, lines in (changes or {}).items():
            keys = {line.partition("=")[0].strip() for line in lines}
            kept = [line for line in tables.get(table, []) if line.partition("=")[0].strip() not in keys]
            tables[table] = [*kept, *lines]
        text = "\n".join(f"[{name}]\n" + "\n".join(lines) for name, lines in tables.items())
        (place / "run.toml").write_text(text.replace("DATA", str(data)))

    return write


@pytest.fixture
def run_dir(prepared, place, write_config, monkeypatch):
    """The directory of a run as far as a refusal to generate reads it; jax must not be started."""
    write_config({"model": ["vocab = 300"]})
    (place / "run").mkdir()
    (place / "run.toml").rename(place / "run" / "config.toml")
    shutil.copyfile(prepared / "tokenizer.json", place / "run" / "tokenizer.json")
    monkeypatch.setattr(initialize, "start", lambda *_: pytest.fail("jax was started"))
    return place / "run"


@pytest.fixture
def refused(place, capsys):
    """Checks that a command line ends with status 2, one line and no trace on the disk."""

    def check(argv, *parts):
        before = sorted(place.rglob("*"))
        line = refusal(capsys, *argv)
        for part in parts:
            assert part in f"{line}\n"
        assert sorted(place.rglob("*")) == before

    return check
