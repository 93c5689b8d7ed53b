"""An evaluation that is killed: the same command goes on where it was, and each sample is judged once."""

import json
import os
import signal
import subprocess
import sys

import pytest

from axonn_jax.cli.main import main
from axonn_jax.evaluate.suite import problems

SCAN = next(problem for problem in problems("mini") if problem.kind == "scan")
COUNT, KILLED_AT = 60, 33
# Judges by a line each, without a compiler; the first process is killed in the middle of a sample.
PROGRAM = """
import contextlib, os, signal, sys
from pathlib import Path
from axonn_jax.evaluate import build, judge, sandbox
from axonn_jax.cli.main import main

class Judge:
    def output(self, problem, model, prompt, text):
        with open("judged", "a") as file:
            file.write(text + chr(10))
        if len(Path("judged").read_text().split()) == int(sys.argv[1]):
            os.kill(os.getpid(), signal.SIGKILL)
        bad = int(text) % 3 == 0
        run = {"did_run": True, "is_valid": not bad, "runtime": None if bad else 0.1 + 0.2, "stopped": ""}
        return {
            "generated_output": text, "did_build": True, "is_source_valid": True, "are_all_valid": not bad,
            "best_sequential_runtime": None if bad else 0.6, "runs": [run],
        }

judge.judging = lambda *_, **__: contextlib.nullcontext(Judge())
sandbox.check_sandbox = lambda **_: None
build.compiler = lambda given: ["c++"]
sys.exit(main(["evaluate", "--generations", "g.json", "--execute", "--json", *sys.argv[2:]]))
"""


@pytest.fixture
def evaluated(tmp_path):
    """Evaluates in a process of its own, which is killed at a sample; gives the process and the samples judged."""
    entries = [
        {
            "problem_type": "scan",
            "language": "cpp",
            "name": SCAN.name,
            "parallelism_model": model,
            "prompt": SCAN.prompt(model),
            "outputs": [str(number) for number in numbers],
        }
        for model, numbers in (("serial", range(30)), ("omp", range(30, COUNT)))
    ]
    (tmp_path / "g.json").write_text(json.dumps(entries))

    def run(killed_at=0, *words):
        (tmp_path / "judged").write_text("")
        command = [sys.executable, "-c", PROGRAM, str(killed_at), *words]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": ":".join(sys.path)}
        )
        return done, [int(number) for number in (tmp_path / "judged").read_text().split()]

    return run


def test_a_killed_evaluation_goes_on(evaluated, tmp_path, capsys):
    done, first = evaluated(KILLED_AT)
    assert (done.returncode, first) == (-signal.SIGKILL, list(range(KILLED_AT)))
    file = tmp_path / "g.results.json.judged"
    with file.open("a") as torn:
        torn.write('{"generated_output": "3')  # a stop in the middle of a line
    done, rest = evaluated()
    assert rest == list(range(KILLED_AT - 1, COUNT)), done.stderr  # the sample under judgement alone is judged again
    assert done.stderr == f"g.results.json.judged: {KILLED_AT - 1} programs judged before are not judged again\n"
    report = json.loads(done.stdout)
    assert report["ends"] == {"right": 40, "wrong result": 20}
    outputs = [output for entry in json.loads((tmp_path / "g.results.json").read_text()) for output in entry["outputs"]]
    assert [int(output["generated_output"]) for output in outputs] == list(range(COUNT))
    assert outputs[1]["runs"][0]["runtime"] == 0.1 + 0.2
    assert not file.exists()
    assert main(["evaluate", "--results", str(tmp_path / "g.results.json"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["models"] == report["models"]
    assert evaluated()[1] == list(range(COUNT))  # a whole evaluation is made anew


def test_results_under_other_options_are_dropped(evaluated):
    evaluated(3)
    done, judged = evaluated(0, "--seconds", "9")
    assert judged == list(range(COUNT))
    assert done.stderr == (
        "g.results.json.judged: 2 programs judged before were of other texts or options: all are judged anew\n"
    )
