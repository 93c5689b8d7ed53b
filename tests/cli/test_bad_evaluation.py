"""What `axonn-jax evaluate` refuses, in one line, before jax starts or a program runs."""

import json
import os
from pathlib import Path

import pytest

from axonn_jax.judge import build, jail
from axonn_jax.judge.suite import problems

SCAN = next(problem for problem in problems("mini") if problem.kind == "scan")
GENERATED = {
    "problem_type": "scan",
    "language": "cpp",
    "name": SCAN.name,
    "parallelism_model": "serial",
    "prompt": SCAN.prompt("serial"),
    "outputs": ["}", "}"],
}
RUN = {"did_run": True, "is_valid": True, "runtime": 0.5}
OUTPUT = {"did_build": True, "is_source_valid": True, "best_sequential_runtime": 0.1, "runs": [RUN]}
# What `axonn-jax evaluate` refuses with these words: what the line says.
FLAGS = [
    ("", "RUN_DIR = (not given): one of RUN_DIR, --generations FILE and --results FILE"),
    (
        "run --results g.json",
        "RUN_DIR and --results = 'together': one of RUN_DIR, --generations FILE and --results FILE",
    ),
    ("run", "--execute = (not given): --execute, which compiles and runs the generated code on this machine"),
    ("--generations g.json", "--execute = (not given): --execute, which"),
    (
        "run --execute --suite minni",
        "--suite = 'minni': one of mini, or a file of ParEval's prompts, FILE.json; did you mean 'mini'?",
    ),
    ("run --suite nothing.json", "--suite = 'nothing.json': a file of ParEval's prompts, JSON; No such file"),
    ("run --suite g.json --execute", "--execute = True: not given with --suite FILE.json, which is only continued"),
    (
        "run --suite g.json --out nowhere/g.json",
        "--out = 'nowhere/g.json': a file in a directory that exists and can be written",
    ),
    ("run --suite g.json --tokens 0", "--tokens = 0: an integer of at least 1"),
    ("run --suite g.json --temperature -1", "--temperature = -1.0: 0, or a number from 0.0001"),
    ("run --suite g.json --grid.pipe 2", "grid.pipe = 2: 1 in generation"),
    ("run --suite g.json", "tokens': a prompt of at most 15 tokens (model.seq_len = 16); this one has "),
    ("run --suite g.json --template alpca", "--template = 'alpca': alpaca, chat or FILE.jinja; did you mean 'alpaca'?"),
    ("run --suite g.json --template chat", "--template = 'chat': a model whose tokenizer has a chat template"),
    ("nowhere --suite g.json", "RUN_DIR = 'nowhere': an existing directory left by `axonn-jax train`"),
    ("run --execute --compiler nothing++", "--compiler = 'nothing++': a C++ compiler with OpenMP on the path"),
    ("run --execute --k 21", "--k = 21: at most the number of samples of each problem, 20"),
    ("--generations g.json --execute --k 3", "--k = 3: at most the number of samples of each problem, 2"),
    ("--generations g.json --execute --k 0", "--k = 0: an integer of at least 1"),
    ("--generations g.json --execute --samples 3", "--samples = 3: not given with --generations"),
    ("--generations g.json --execute --seconds 0", "--seconds = 0.0: a number of at least 1"),
    (
        "--results g.json",
        "--results = 'g.json': ParEval's results: outputs that are objects with did_build and runs; none is here",
    ),
    ("--results r.json --execute", "--execute = True: not given with --results"),
    (
        "--results r.json --k 2",
        "--k = 2: at most the number of samples of each problem, 1 (scan_of_running_maxima, serial)",
    ),
    ("--results r.json --metrics code", "--metrics = 'code': one of paper, as-code"),
]
# Files of results, or changes of a good one's only output, and what the line says.
RESULTS = {
    "missing": (None, "r.json': a file of ParEval's results, JSON; No such file"),
    "no JSON": (b"[{", "r.json': a file of ParEval's results, JSON; Expecting"),
    "deep": (b"[" * 99_999, "r.json': a file of ParEval's results, JSON; nested too deeply"),
    "NaN": (b"[NaN]", "r.json': a file of ParEval's results, JSON; NaN is no JSON"),
    "an object": (b'{"results": []}', "r.json': ParEval's results: a list with an object for each problem"),
    "of lm-eval": (b'[{"doc_id": 1}]', "r.json[0].name': a text, as in ParEval's results; here (not given)"),
    "no build": ({"did_build": None}, "r.json[0].outputs[0].did_build': true or false, as in"),
    "no word of its model": (
        {"is_source_valid": None},
        "r.json[0].outputs[0].is_source_valid': true or false, as in",
    ),
    "runs of text": ({"runs": "PASS"}, "r.json[0].outputs[0].runs': a list of at least one object, or null"),
    "no runs": ({"runs": []}, "r.json[0].outputs[0].runs': a list of at least one object, or null"),
    "a word": ({"runs": [RUN | {"is_valid": "yes"}]}, "r.json[0].outputs[0].runs[0].is_valid': true, false or null"),
    "no time": ({"runs": [RUN | {"runtime": None}]}, "r.json[0].outputs[0].runs[0].runtime': a number of seconds for"),
    "a time before": ({"runs": [RUN | {"runtime": -1}]}, "r.json[0].outputs[0].runs[0].runtime': a number of seconds"),
    "no reference": (
        {"best_sequential_runtime": None},
        "best_sequential_runtime': a number of seconds beside a valid run",
    ),
    "half a thread": ({"runs": [RUN | {"num_threads": 0.5}]}, "runs[0].num_threads': an integer of at least 1"),
}


@pytest.fixture
def files(run_dir, place):
    """The files that the flags name."""
    (place / "g.json").write_text(json.dumps([GENERATED]))
    (place / "r.json").write_text(json.dumps([GENERATED | {"outputs": [OUTPUT]}]))
    return place


@pytest.fixture
def jailed(tmp_path_factory, monkeypatch):
    """Puts a jail with a changed line in the place of the real one, as on a system that refuses the call."""

    def change(line, other):
        text = Path(jail.__file__).read_text()
        assert line in text
        file = tmp_path_factory.mktemp("jail") / "changed.py"
        file.write_text(text.replace(line, other))
        monkeypatch.setattr(jail, "__file__", str(file))
        monkeypatch.setattr(build, "hand_over", lambda *_, **__: pytest.fail("something was built"))

    return change


@pytest.mark.parametrize(("words", "says"), FLAGS, ids=[words for words, _ in FLAGS])
def test_flags(files, refused, words, says):
    refused(["evaluate", *words.split()], says)


@pytest.mark.parametrize("case", RESULTS)
def test_results(files, refused, case):
    change, says = RESULTS[case]
    if change is None:
        (files / "r.json").unlink()
    elif isinstance(change, bytes):
        (files / "r.json").write_bytes(change)
    else:
        (files / "r.json").write_text(json.dumps([GENERATED | {"outputs": [OUTPUT | change]}]))
    refused(["evaluate", "--results", "r.json"], "error: --results = 'r.json", says)


@pytest.mark.parametrize("at", [0, 1])
def test_a_problem_judged_in_part(files, refused, at):
    entries = [GENERATED | {"outputs": outputs} for outputs in ([[OUTPUT, "}"]], [[OUTPUT], ["}"]])[at]]
    (files / "r.json").write_text(json.dumps(entries))
    accepted = "objects, as other outputs of scan_of_running_maxima (serial) are: it is judged in part"
    refused(["evaluate", "--results", "r.json"], f"error: --results = 'r.json[{at}].outputs': {accepted}")


def test_draws_from_a_problem_in_several_entries(files, refused):
    (files / "g.json").write_text(json.dumps([GENERATED, GENERATED]))
    says = "--k = 5: at most the number of samples of each problem, 4"
    refused(["evaluate", "--generations", "g.json", "--execute", "--k", "4", "5"], says)


def test_generations(files, refused):
    command = ["evaluate", "--generations", "g.json", "--execute"]
    for change, says in [
        ({"name": "scan_of_running_maximum"}, "--generations = 'scan_of_running_maximum': a problem of the suite mini"),
        ({"name": "scan_of_running_maximum"}, "did you mean 'scan_of_running_maxima'?"),
        ({"parallelism_model": "cuda"}, "--generations = 'cuda': programs of one of serial, omp"),
        ({"outputs": []}, "g.json[0].outputs': a list of at least one text"),
        ({"outputs": ["}", 7]}, "g.json[0].outputs[1]': a text, as in ParEval's generations; here 7"),
    ]:
        (files / "g.json").write_text(json.dumps([GENERATED | change]))
        refused(command, says)


def test_a_directory_without_a_tokenizer(files, refused):
    (files / "run" / "tokenizer.json").unlink()
    refused(["evaluate", "run", "--suite", "g.json"], "RUN_DIR = 'run", "No such file")


def test_no_compiler(files, refused, monkeypatch):
    monkeypatch.setenv("PATH", str(files))
    monkeypatch.delenv("CXX", raising=False)
    refused(["evaluate", "run", "--execute"], "--compiler = 'c++ or g++': a C++ compiler with OpenMP on the path")


def test_a_compiler_that_compiles_nothing(files, refused):
    says = "--compiler = '/", "a compiler that builds the suite's own programs; "
    refused(["evaluate", "--generations", "g.json", "--execute", "--compiler", "false"], *says)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes to another user")
def test_no_user_to_change_to(files, refused, jailed):
    jailed("os.setuid(NOBODY)", "raise OSError(22, 'Invalid argument')")
    says = "--execute = True: a system that gives the sandbox its means; or --as-root; missing: ", "user 65534 (nobody)"
    refused(["evaluate", "--generations", "g.json", "--execute"], *says)


def test_no_filter(files, refused, jailed):
    jailed("_PR_SET_SECCOMP, 2,", "_PR_SET_SECCOMP, 99,")
    says = "--execute = True: a system that gives the sandbox its means", "a filter of system calls: Invalid argument"
    refused(["evaluate", "--generations", "g.json", "--execute"], *says)
