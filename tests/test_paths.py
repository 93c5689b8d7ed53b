"""Paths that a user gives, in a config, as a flag or in Python: `~` is expanded, and other storage is refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, get_args, get_type_hints

import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.cli.arguments import Arg, parse
from axonn_jax.core.options import LocalPath
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import loads, read

OF_CONFIG = [
    f"{table}.{key}"
    for table, kind in get_type_hints(Config).items()
    for key, hint in get_type_hints(kind, include_extras=True).items()
    if any(isinstance(note, LocalPath) for note in get_args(hint))
]
ELSEWHERE = ["gs://bucket/run", "s3://bucket", "file://host/run", "hf://datasets/x/y"]


@pytest.fixture(autouse=True)
def home(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_every_path_of_a_config_is_one_of_this_machine(home):
    assert len(OF_CONFIG) == 7
    for key in OF_CONFIG:
        with pytest.raises(ax.UserError, match=rf"^{key} = 'gs://bucket/run': a path of this machine"):
            loads("", [(key, "gs://bucket/run")])
    assert loads("", [("log.dir", "~/run")]).log.dir == str(home / "run")
    assert loads("", [("checkpoint.weights", "org/name@main")]).checkpoint.weights == "org/name@main"


def test_paths_inside_tables_of_a_config(home):
    told = [("data.mix", {"~/text": 1.0, "runs/b": 2.0}), ("data.held_out", {"math": "~/math"})]
    data = loads("", told).data
    assert data.mix == {str(home / "text"): 1.0, "runs/b": 2.0}
    assert data.held_out == {"math": str(home / "math")}
    for told in ("data.mix", {"s3://b/c": 1.0}), ("data.held_out", {"math": "s3://b/c"}):
        with pytest.raises(ax.UserError, match=r"^data\.\S+ = 's3://b/c': a path of this machine"):
            loads("", [told])


@pytest.mark.parametrize("text", ELSEWHERE)
def test_paths_of_commands(text, home):
    @dataclass
    class Command:
        out: Annotated[Path, Arg(positional="OUT")]

    assert parse(Command, ["~/run"], "command").out == home / "run"
    doors = [
        lambda: parse(Command, [text], "command"), lambda: load_machine(f"{text}.toml"), lambda: read(text),
        lambda: ax.Generator(text, ax.init()), lambda: ax.Loader(text, seq_len=8, global_batch=1),
        lambda: ax.models.from_pretrained(text, ax.init()),
    ]  # fmt: skip
    for door in doors:
        with pytest.raises(ax.UserError, match=r"^\S+ = .*: a path of this machine; mount other storage"):
            door()


def test_paths_in_a_script(home):
    grid = ax.init()
    loss = lambda model, batch: (model(batch) ** 2).mean()  # noqa: E731
    trainer = ax.Trainer(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.sgd(0.1), grid, loss=loss)
    trainer.step(np.ones((2, 4), np.float32))
    for text in ELSEWHERE:
        for door in trainer.save, trainer.load:
            with pytest.raises(ax.UserError, match=r"^(directory|path) = .*: a path of this machine"):
                door(text, *([1] if door == trainer.save else []))
        with pytest.raises(ax.UserError, match=r"^directory = .*: a path of this machine"), ax.tracked(grid, text):
            pass
    assert trainer.save("~/run", 1).is_relative_to(home / "run")
    assert trainer.load("~/run") == 1
