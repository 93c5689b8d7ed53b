"""scripts/bench/race: contestants in processes take turns behind a check of equal losses, and flags are parsed."""

import json
import os
import sys

import pytest
from figures import flags, over, quartiles, show
from race import HERE, Entrant, race

CONTESTANT = """
def contestant(spec):
    steps = []
    def answer(order):
        steps.append(order)
        if len(steps) > spec.get("ends", 9):
            raise ValueError("it is gone")
        return {"seconds": spec["seconds"], "loss": spec["loss"], "rank": spec["rank"]}
    return answer
"""


@pytest.fixture
def raced(tmp_path):
    """Races contestants that are told what to answer."""
    (tmp_path / "told.py").write_text(CONTESTANT)
    path = os.pathsep.join([str(tmp_path), str(HERE.parents[1])])

    def run(**specs):
        given = {"build": "told:contestant", "loss": 2.0, "seconds": 1.0, "environment": {"PYTHONPATH": path}}
        entrants = {name: Entrant({**given, **spec}, spec.get("ranks", 1)) for name, spec in specs.items()}
        return race(entrants, 2, quiet=True)

    return run


def test_contestants_take_turns_and_the_slowest_rank_counts(raced):
    taken = raced(a={}, b={"seconds": 2.0, "loss": 2.0005, "ranks": 2}, c={"loss": 3.0, "rows": 4})
    assert {name: [step["seconds"] for step in steps] for name, steps in taken.items()} == {
        "a": [1.0, 1.0],
        "b": [2.0, 2.0],
        "c": [1.0, 1.0],
    }
    assert [step["rank"] for step in taken["b"]] == [0, 0]


def test_other_losses_and_a_process_that_ends_stop_the_benchmark(raced):
    with pytest.raises(SystemExit, match=r"not the same step: \{'a': 2.0, 'b': 2.1\}"):
        raced(a={}, b={"loss": 2.1})
    with pytest.raises(SystemExit, match="error: b ends when others take turns: ValueError: it is gone"):
        raced(a={}, b={"ends": 1})


def test_flags_have_the_types_of_their_defaults(monkeypatch, capsys):
    line = ["bench", "out", "--sizes", "1", "2", "--rounds", "3", "--no-mpi", "--limit", "4"]
    monkeypatch.setattr(sys, "argv", line)
    given = flags("Text.", "folder", rounds=5, sizes=(8,), no_mpi=False, limit=int, density=0.1)
    assert vars(given) == {
        "folder": "out", "rounds": 3, "sizes": [1, 2], "no_mpi": True, "limit": 4, "density": 0.1, "json": False,
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["bench", "--rounds", "0"])
    with pytest.raises(SystemExit, match="2"):
        flags("Text.", rounds=5)
    assert "--rounds: at least 1" in capsys.readouterr().err


def test_figures_are_a_table_and_lines_or_one_object(capsys):
    figures = {"rows": [{"name": "a", "s": 0.5, "all": [1]}, {"name": "b", "s": 12345.6, "all": []}], "ratio": 1.25}
    show(figures, as_json=False)
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [
        ["name", "s"], ["a", "0.5"], ["b", "12,346"], ["ratio", "1.25"],
    ]  # fmt: skip
    show(figures, as_json=True)
    found = json.loads(capsys.readouterr().out)
    assert found["rows"] == figures["rows"]
    assert {"device", "versions"} <= set(found)
    assert over([1.0, 4.0, 3.0], [1.0, 2.0, 1.0]) == 2.0
    assert quartiles([3.0]) == (3.0, 3.0, 3.0)
