"""axonn-jax timeline: picture, table, one JSON object, refusals."""

import pytest
from commands import answer, refusal

from axonn_jax.cli.main import main
from axonn_jax.pipe.timeline.spans import Span
from axonn_jax.pipe.timeline.trace import write_trace


def step_of(number, start=0.0):
    """Two stages, one microbatch: half of the time idle."""
    rows = (
        (0, "F0.0", "forward", 0.0, 1.0),
        (0, "send F0.0", "communication", 0.8, 1.2),
        (1, "F1.0", "forward", 1.2, 2.0),
        (1, "B1.0", "backward", 2.0, 4.0),
        (0, "B0.0", "backward", 4.0, 5.0),
        (0, "O0", "optimizer", 5.0, 6.0),
        (1, "O1", "optimizer", 5.0, 5.2),
    )
    return [Span(rank, name, kind, start + a, start + b, number) for rank, name, kind, a, b in rows]


@pytest.fixture
def run_dir(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    write_trace(directory / "timeline.json", [*step_of(3), *step_of(4, 10.0), *step_of(5, 20.0)[:3]])
    return directory


def test_table_and_picture(run_dir, capsys):
    assert main(["timeline", str(run_dir)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = out.splitlines()
    assert lines[0] == "step 4 (recorded: 3, 4, 5), 6,000.000 ms"
    assert lines[2].split() == ["stage", "idle", "forward", "backward", "communication", "optimizer"]
    assert lines[3].split() == ["0", "50.0%", "16.7%", "16.7%", "6.7%", "(3.3%", "exposed)", "16.7%"]
    assert lines[4].split() == ["1", "50.0%", "13.3%", "33.3%", "0.0%", "(0.0%", "exposed)", "3.3%"]
    assert lines[5].split()[:2] == ["all", "50.0%"]
    assert len({len(line) for line in lines[2:6]}) == 1
    assert (run_dir / "timeline.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_is_one_object(run_dir, capsys):
    found = answer(capsys, "timeline", run_dir, "--step", 3)
    assert (found["step"], found["steps"], found["step_s"]) == (3, [3, 4, 5], pytest.approx(6.0))
    assert found["idle"] == pytest.approx(0.5)
    assert found["shares"]["backward"] == pytest.approx(0.25)
    assert found["shares"]["weight_gradient"] == 0
    assert [stage["stage"] for stage in found["stages"]] == [0, 1]
    assert found["stages"][0]["exposed_communication"] == pytest.approx(0.2 / 6)
    assert found["exposed_communication"] == pytest.approx(0.1 / 6)
    assert found["png"] == str(run_dir / "timeline.png")
    assert found["trace"] == str(run_dir / "timeline.json")


def test_an_unfinished_step_on_request(run_dir, capsys):
    assert answer(capsys, "timeline", run_dir, "--step", 5)["step"] == 5


def test_refusals(place, refused):
    for name in ("empty", "stopped", "other", "good"):
        (place / name).mkdir()
    (place / "other" / "timeline.json").write_text('{"traceEvents": [{"ph": "X", "name": "jit_step"}]}')
    write_trace(place / "stopped" / "timeline.json", [])
    write_trace(place / "good" / "timeline.json", [*step_of(3), *step_of(4, 10.0)])
    refused(["timeline"], "RUN_DIR = (not given)")
    refused(["timeline", "nowhere"], "RUN_DIR = 'nowhere': an existing directory left by a pipelined `axonn-jax train`")
    refused(["timeline", "good/timeline.json"], "RUN_DIR = 'good/timeline.json': an existing directory")
    refused(["timeline", "empty"], "timeline.json = 'empty/timeline.json': an existing file; a pipelined run (grid")
    refused(["timeline", "other"], "timeline.json = 'other/timeline.json': a whole trace as a pipelined run leaves it")
    refused(["timeline", "stopped"], "timeline.json = 'stopped/timeline.json': a trace with at least one step")
    refused(["timeline", "good", "--step", "9", "--json"], "--step = 9: a step that was recorded: 3, 4")
    refused(["timeline", "good", "--step", "last"], "--step = 'last': an integer")


def test_a_picture_that_cannot_be_written(run_dir, capsys):
    (run_dir / "timeline.png").mkdir()
    assert "a directory to write timeline.png in (Is a directory)" in refusal(capsys, "timeline", run_dir)


def test_a_step_is_played_again(run_dir, capsys):
    found = answer(capsys, "timeline", run_dir, "--replay", "1f1b")["replay"]
    assert (found["policy"], found["measured_s"]) == ("1f1b", pytest.approx(5.0))
    assert found["simulated_s"] == pytest.approx(5.0, rel=0.05)
    assert main(["timeline", str(run_dir), "--replay", "1f1b"]) == 0
    assert "simulated under 1f1b" in capsys.readouterr().out


def test_what_cannot_be_played_again(run_dir, capsys):
    for argv in (["--replay", "zero-bubble"], ["--replay", "1f1b", "--step", "5"], ["--replay", "fifo"]):
        refusal(capsys, "timeline", run_dir, *argv)
