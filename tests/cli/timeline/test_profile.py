"""Profiles of a run's steps: the traces, the lines about them, and a run whose numbers are those of one without."""

import json
import re

import jax
import pytest
from launched import UNDER_MPIRUN, command, flags, succeeded, write_config

from axonn_jax.cli.main import main
from axonn_jax.core.errors import UserError
from axonn_jax.pipe.timeline.spans import covered
from axonn_jax.run.config import LogConfig
from axonn_jax.run.profile import Profile, summary


@pytest.fixture(scope="module")
def config(prepared, tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("config") / "c.toml", prepared)


def losses(run):
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


def traces(run):
    return sorted(path.relative_to(run).parts[1] for path in run.glob("profile/**/*.xplane.pb"))


def test_a_trace_of_some_steps(config, tmp_path, capsys):
    options = {"grid_data": 2, "train_steps": 4, "train_eval_every": 0}
    for name, more in (("with", {"log_profile": "2:3"}), ("without", {})):
        assert main(["train", str(config), *flags({"log_dir": tmp_path / name, **options, **more})]) == 0
    lines = capsys.readouterr().err.splitlines()
    assert sum(f"profile of steps 2 to 3 in {tmp_path}/with/profile: " in line for line in lines) == 1
    shown = next(line for line in lines if line.startswith("profile: "))
    busy, words = re.fullmatch(r"profile: 2 devices busy (\d+)%; longest operations, ms .*: (.*)", shown).groups()
    times = [float(word.split()[-1]) for word in words.split(", ")]
    assert 0 < int(busy) <= 100
    assert times == sorted(times, reverse=True)
    assert len(times) == 10
    assert traces(tmp_path / "with") == ["rank_0"]
    assert losses(tmp_path / "with") == losses(tmp_path / "without")
    assert not (tmp_path / "without" / "profile").exists()


@pytest.mark.slow
@pytest.mark.parametrize("options", [pytest.param({"grid_pipe": 2}, marks=UNDER_MPIRUN)])
def test_every_process_has_its_own(config, tmp_path, options):
    succeeded(command(config, tmp_path / "run", ranks=2, train_steps=3, log_profile="2:2", **options))
    assert traces(tmp_path / "run") == ["rank_0", "rank_1"]


def test_a_run_that_ends_in_between_keeps_what_is_there(tmp_path):
    said = []
    with Profile(range(2, 9), tmp_path, 0, said.append) as profile:
        for step in (1, 2, 3):
            profile.step_starts(step, None)
            profile.step_ended(step, jax.jit(lambda x: x + 1.0)(float(step)))
    assert f"profile of steps 2 to 3 in {tmp_path}" in said[0]
    assert traces(tmp_path) == ["rank_0"]


def test_a_run_that_goes_on_behind_some_of_the_steps_traces_the_rest(tmp_path):
    said = []
    with Profile(range(2, 6), tmp_path, 0, said.append, behind=3) as profile:
        for step in (4, 5, 6):
            profile.step_starts(step, None)
            profile.step_ended(step, jax.jit(lambda x: x + 1.0)(float(step)))
    assert f"profile of steps 4 to 5 in {tmp_path}" in said[0]
    said.clear()
    Profile(range(2, 6), tmp_path, 1, said.append, behind=5)
    assert said == ["log.profile: step 5 is done already: nothing is traced"]


def test_calls_of_python_as_of_a_compilation_take_no_operations_place(tmp_path):
    """A trace has a million events: a step that compiled left few operations in it, or none."""
    said = []
    with Profile(range(1, 2), tmp_path, 0, said.append) as profile:
        profile.step_starts(1, None)
        for _ in range(1_100_000):
            len(said)
        profile.step_ended(1, jax.jit(lambda x: x + 1.0)(1.0))
    assert "profile: 1 device busy " in said[1]


def test_a_trace_that_cannot_be_written_ends_nothing(tmp_path, monkeypatch):
    said = []

    def full():
        raise OSError(28, "No space left on device")

    jax.profiler.start_trace(tmp_path / "another")  # a second one at a time is refused
    with Profile(range(1, 2), tmp_path, 0, said.append) as profile:
        profile.step_starts(1, None)
        profile.step_ended(1, None)
    jax.profiler.stop_trace()
    with Profile(range(1, 2), tmp_path, 0, said.append) as profile, monkeypatch.context() as patch:
        profile.step_starts(1, None)
        stop = jax.profiler.stop_trace
        patch.setattr(jax.profiler, "stop_trace", lambda: (stop(), full()))
        profile.step_ended(1, None)
    assert [line.split(":")[0] for line in said] == ["warning"] * 2
    assert said[1].endswith("No space left on device")
    with pytest.raises(OSError, match="left no trace"):
        summary(tmp_path / "none", 1)


def test_the_union_of_intervals():
    assert covered([(5, 6), (0, 2), (1, 3), (1, 2)]) == 4
    assert covered([]) == 0


@pytest.mark.parametrize("text", ["3", "0:2", "3:2", "1:101", "a:b", "1:2:3", ":", "-1:2"])
def test_other_texts_are_refused(text):
    with pytest.raises(UserError, match=r"log.profile = .*first and last of at most 100 steps"):
        assert not LogConfig(profile=text).profiled


def test_steps_are_both_ends():
    assert list(LogConfig(profile="10:13").profiled) == [10, 11, 12, 13]
    assert not LogConfig().profiled
