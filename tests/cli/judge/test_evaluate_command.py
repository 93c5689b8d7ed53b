"""`axonn-jax evaluate` from a model's directory to its figures; one that was stopped goes on."""

import json
import signal
import sys

import pytest
from commands import answer
from launched import finished
from pretrained import bpe, directory

from axonn_jax.cli.main import main
from axonn_jax.judge.formats import read_generations
from axonn_jax.judge.suite import MODELS, problems

GENERATED = {
    "problem_type", "language", "name", "parallelism_model", "prompt", "temperature", "top_p", "do_sample",
    "max_new_tokens", "prompted", "outputs",
}  # fmt: skip
KIND = "reduce"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with a model of random weights."""
    folder = tmp_path_factory.mktemp("evaluate") / "model"
    directory(folder, "llama", max_position_embeddings=1024)
    bpe(301, ["<|endoftext|>"]).save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture
def prompts(tmp_path):
    """A file of a problem's prompts for both execution models."""
    entries = [
        {
            "problem_type": one.kind,
            "language": "cpp",
            "name": one.name,
            "parallelism_model": kind,
            "prompt": one.prompt(kind),
        }
        for one in problems("mini")
        if one.kind == KIND
        for kind in MODELS
    ]
    (tmp_path / "prompts.json").write_text(json.dumps(entries))
    return tmp_path / "prompts.json"


def evaluated(capsys, *words):
    return answer(capsys, "evaluate", *words)


@pytest.mark.parametrize("template", ["none", "alpaca"])
def test_a_models_generations_are_judged(model, prompts, tmp_path, capsys, template):
    file, more = tmp_path / "generations.json", ["--samples", "2", "--tokens", "6", "--seed", "3"]
    found = evaluated(capsys, model, "--suite", prompts, "--out", file, "--template", template, *more)
    assert found == {"generations": str(file), "prompts": 2, "samples": 2}
    entries = json.loads(file.read_text())
    for entry, asked in zip(entries, json.loads(prompts.read_text()), strict=True):
        assert set(entry) == GENERATED
        assert {key: entry[key] for key in asked} == asked
        assert [entry[key] for key in ("temperature", "top_p", "max_new_tokens")] == [0.2, 0.95, 6]
        assert entry["prompted"] == (template != "none")
        assert len(entry["outputs"]) == 2
        assert all(isinstance(text, str) for text in entry["outputs"])
    if template == "none":
        grid = ["--grid.data", "2", "--grid.y", "2", "--out", tmp_path / "other.json"]
        evaluated(capsys, model, "--suite", file, *grid, *more)  # a file with outputs holds prompts too
        assert json.loads((tmp_path / "other.json").read_text()) == entries


def test_a_model_is_judged(model, tmp_path, monkeypatch, capsys):
    reduce = [one for one in problems("mini") if one.kind == KIND]
    monkeypatch.setattr("axonn_jax.cli.evaluate.problems", lambda suite: reduce)
    out = tmp_path / "made.json"
    words = ["--suite", "mini", "--execute", "--samples", "2", "--tokens", "6", "--out", out, "--k", "2"]
    found = evaluated(capsys, model, *words)
    assert found["ends"] == {"not built": 4}  # random tokens
    values = {"build": 0.0, "pass": 0.0, "speedup": 0.0, "efficiency": 0.0}
    assert {name: one["types"]["all"]["2"] for name, one in found["models"].items()} == dict.fromkeys(MODELS, values)
    judged = json.loads(out.read_text())
    outputs = [[output["generated_output"] for output in entry["outputs"]] for entry in judged]
    assert [entry["outputs"] for entry in read_generations(out, "FILE")] == outputs


def test_right_programs_are_measured(prompts, tmp_path, capsys):
    entries, known = json.loads(prompts.read_text()), {one.name: one for one in problems("mini")}
    for entry in entries:
        right = known[entry["name"]].reference(entry["parallelism_model"])
        entry |= {"outputs": [right, "return 1; }", "nothing(); }"], "temperature": 0.2}
    extra = {**entries[0], "parallelism_model": "kokkos"}
    (tmp_path / "made.json").write_text(json.dumps([*entries, extra]))
    assert main(["evaluate", "--generations", str(tmp_path / "made.json"), "--execute"]) == 0
    out, err = capsys.readouterr()
    assert "not judged: 1 of kokkos\n" in err
    assert "right: 2, wrong result: 2, not built: 2\n" in out
    file = tmp_path / "made.results.json"
    assert out.endswith(f"results: {file}\n")
    for entry in json.loads(file.read_text()):
        assert [output["did_build"] for output in entry["outputs"]] == [True, True, False]
        assert [output["are_all_valid"] for output in entry["outputs"]] == [True, False, False]
        assert entry["outputs"][0]["best_sequential_runtime"] > 0
    found = evaluated(capsys, "--results", file)
    for one in found["models"].values():
        for kind in ("all", KIND):
            values = one["types"][kind]["1"]
            assert values["build"] == pytest.approx(2 / 3)
            assert values["pass"] == pytest.approx(1 / 3)
            assert values["speedup"] > 0
            assert values["efficiency"] == pytest.approx(values["speedup"] / one["n"])


SCAN = next(problem for problem in problems("mini") if problem.kind == "scan")
COUNT, KILLED_AT = 60, 33
# Judges by a line each, without a compiler; the first process is killed in the middle of a sample.
PROGRAM = """
import contextlib, os, signal, sys
from pathlib import Path
from axonn_jax.judge import build, judge, sandbox
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
def goes_on(tmp_path):
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
        done = finished(command, cwd=tmp_path)
        return done, [int(number) for number in (tmp_path / "judged").read_text().split()]

    return run


def test_a_killed_evaluation_goes_on(goes_on, tmp_path, capsys):
    done, first = goes_on(KILLED_AT)
    assert (done.returncode, first) == (-signal.SIGKILL, list(range(KILLED_AT)))
    file = tmp_path / "g.results.json.judged"
    with file.open("a") as torn:
        torn.write('{"generated_output": "3')  # a stop in the middle of a line
    done, rest = goes_on()
    assert rest == list(range(KILLED_AT - 1, COUNT)), done.stderr  # the sample under judgement alone is judged again
    assert done.stderr == f"g.results.json.judged: {KILLED_AT - 1} programs judged before are not judged again\n"
    report = json.loads(done.stdout)
    assert report["ends"] == {"right": 40, "wrong result": 20}
    outputs = [output for entry in json.loads((tmp_path / "g.results.json").read_text()) for output in entry["outputs"]]
    assert [int(output["generated_output"]) for output in outputs] == list(range(COUNT))
    assert outputs[1]["runs"][0]["runtime"] == 0.1 + 0.2
    assert not file.exists()
    assert answer(capsys, "evaluate", "--results", str(tmp_path / "g.results.json"))["models"] == report["models"]
    assert goes_on()[1] == list(range(COUNT))  # a whole evaluation is made anew


def test_results_under_other_options_are_dropped(goes_on):
    goes_on(3)
    done, judged = goes_on(0, "--seconds", "9")
    assert judged == list(range(COUNT))
    assert done.stderr == (
        "g.results.json.judged: 2 programs judged before were of other texts or options: all are judged anew\n"
    )
