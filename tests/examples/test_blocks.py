"""Every block of code in README, documentation and example configs runs: Python by page, commands line by line."""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections import defaultdict
from pathlib import Path

import instruction_data
import pretrained
import pytest
from launched import AXONN, MPIRUN, environment

from axonn_jax.cli.main import main
from axonn_jax.files.data.prepare import prepare
from axonn_jax.files.data.prompts import prompt_ids
from axonn_jax.files.data.tokenize import load
from axonn_jax.judge.forms import form_of
from axonn_jax.judge.suite import MODELS, problems
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.run.config_file import read, split_argv
from axonn_jax.run.validate import check

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SHORT = "--train.warmup 0 --train.eval_batches 1 --model.layers 2 --model.hidden 32 --model.seq_len 32"
NOT_RUN = {  # what a line begins with, and why
    "scripts/setup": "the suite runs behind it",
    "scripts/test": "it is this suite",
    "scripts/demo": "trains for minutes",
    **dict.fromkeys(("AXONN_EXTRAS", "pip"), "installs"),
    "docker": "needs Docker",
    "axonn-jax launch -n 4 --mpirun": "needs two hosts; tests/cli/mpi/test_two_hosts.py",
    "python3 scripts/gpu/check --out": "needs a GPU",
    "srun": "needs Slurm",
    "sbatch": "needs Slurm; tests/cli/mpi/test_slurm.py",
    "export": "a shell's own",
    "lm-eval": "another project's",
    "unshare": "needs user namespaces",
    **dict.fromkeys(
        ("axonn-jax convert Qwen/", "axonn-jax prepare roneneldan/", "axonn-jax convert runs/tuned runs/out --push"),
        "needs the Hub; tests/cli/models/test_hub.py",
    ),
    "axonn-jax calibrate": "measures for a minute; tests/cli/test_calibrate_command.py runs it",
    "axonn-jax evaluate": "prompts too long for SHORT; tests/cli/judge/test_evaluate_command.py runs the lines",
    "axonn-jax plan --model gpt2 --machine here.toml": "needs calibrate's file",
}
FRESH = ("README.md", "index.md")  # pages for a reader whose shell has not activated the environment yet
# What takes a second or two: these run in the default suite, in the order of the pages.
QUICK = tuple(
    f"axonn-jax {words}"
    for words in ("prepare", "convert runs/qwen3", "convert runs/demo", "inspect", "prune", "train --help")
)
# Of the sizes that `SHORT` says.
QWEN = pretrained.CONFIGS["qwen3"] | {"hidden_size": 32, "num_attention_heads": 4, "vocab_size": 512}

# A kernel runs cells inside an event loop. Jupyter's own is 30 packages, 106 MB.
KERNEL = """
import asyncio
async def kernel(cells):
    for cell in cells:
        exec(cell, globals())
"""


def blocks(language):
    found = defaultdict(list)
    for page in PAGES:
        for block in re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M):
            found[page.name].append(block)
    if language == "sh":
        for config in sorted((ROOT / "examples").glob("*.toml")):
            if words := re.findall(r"^#   (axonn-jax .*)", config.read_text(), re.M):
                found[config.name].append("\n".join(words))
    return found


def lines(page):
    return [line.partition("  #")[0].strip() for block in SHELL[page] for line in block.splitlines() if line.strip()]


PYTHON, SHELL = blocks("python"), blocks("sh")
ALL = sorted({line for page in SHELL for line in lines(page)})
IN_ORDER = list(dict.fromkeys(line for page in SHELL for line in lines(page)))
TRAIN = [line for line in ALL if re.search("axonn-jax .*train examples", line)]
PLAN = [line for line in ALL if re.match("axonn-jax (plan|simulate) ", line) and "here.toml" not in line]


def test_every_block_names_its_language():
    for page in PAGES:
        opening = re.findall(r"^```(.*)$", page.read_text(), re.M)[::2]
        assert set(opening) <= {"python", "sh", "toml", "text"}, page.name


@pytest.mark.parametrize("line", TRAIN)
def test_the_configuration_of_a_training_line_is_good(line, checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    assert configured(line)


def configured(line):
    """The checked configuration of a training line."""
    file, *flags = shlex.split(line.partition("axonn-jax ")[2].partition("train ")[2].rstrip("'"))
    return check(read(file, split_argv(flags)[1]))


def test_lines_that_share_a_run_are_the_same_or_go_on(checkout, monkeypatch):
    """Else the second of them says that its steps are done already, and what reads a run finds another one."""
    monkeypatch.chdir(checkout)
    begun = defaultdict(dict)
    for page in SHELL:
        left = {"runs/demo", "runs/qwen3"}
        for line in lines(page):
            if line in TRAIN:
                config = configured(line)
                before = begun[config.log.dir]
                assert line in before or config.train.steps > max(before.values(), default=0), (line, list(before))
                before[line] = config.train.steps
                left.add(config.log.dir)
            elif read_run := re.search(r"axonn-jax (?:generate|inspect|loki|prune|timeline) (\S+)", line):
                assert read_run[1] in left, line
            left |= set(re.findall(r"runs/[\w-]+", line))


@pytest.mark.parametrize("line", [line for line in ALL if "axonn-jax " in line and "train " not in line])
def test_a_command_knows_the_flags_of_its_line(line, monkeypatch):
    command, *words = shlex.split(line.partition("axonn-jax ")[2])
    home = importlib.import_module(f"axonn_jax.cli.{command}")
    started = []
    monkeypatch.setattr(home, "run", lambda args: started.append(args) or 0)
    assert main([command, *words]) == 0
    assert started


def test_quick_lines_run_in_the_order_of_the_pages(checkout, monkeypatch, capsys):
    monkeypatch.chdir(checkout)
    for name in ("text", "demo-data"):
        Path("runs", name).unlink()
    quick = [line for line in IN_ORDER if line.startswith(QUICK) and not line.startswith(tuple(NOT_RUN))]
    assert {words for words in QUICK if any(line.startswith(words) for line in quick)} == set(QUICK)
    short = shlex.split(f"train examples/gpt-tiny.toml --train.steps 1 {SHORT}")
    for line in quick:
        if re.search(r"runs/(saved|dense|demo)\b", line) and not Path("runs/demo").exists():
            assert main(short) == 0, capsys.readouterr().err
            for name in ("saved", "dense", "demo"):
                shutil.copytree("runs/gpt-tiny", f"runs/{name}")
        if line.startswith("axonn-jax prepare"):  # each page begins anew
            shutil.rmtree(shlex.split(line)[3], ignore_errors=True)
        assert main(shlex.split(line)[1:]) == 0, (line, capsys.readouterr().err)


@pytest.mark.parametrize("line", PLAN)
def test_a_planning_line_answers(line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out


def test_the_files_shown_are_good(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    for shown in blocks("toml").values():
        for block in shown:
            Path("shown.toml").write_text(block)
            if "device" in tomllib.loads(block):
                load_machine("shown.toml")
            else:
                check(read("shown.toml"))


def test_the_model_of_a_page_holds_the_prompts_that_evaluate_asks(checkout, monkeypatch):
    monkeypatch.chdir(checkout)
    train, evaluate, *_ = map(shlex.split, lines("evaluate.md"))
    seq_len = read(train[2], split_argv(train[3:])[1]).model.seq_len
    form = form_of(evaluate[evaluate.index("--template") + 1], Path())
    prepare(ROOT / "axonn_jax", checkout / "prepared", vocab=4096, include=["*.py"])
    tokenizer = load("prepared/tokenizer.json")
    asked = [form.text(problem.prompt(model)) for problem in problems("mini") for model in MODELS]
    assert max(len(prompt_ids(tokenizer, text, special=form.special)) for text in asked) < min(seq_len, 400)


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("blocks") / "text"
    # A twentieth of so few files, which is the default, may be one that is nearly empty.
    prepare(ROOT / "axonn_jax", path, vocab=512, include=["cli/*.py", "run/*.py"], holdout=0.1)
    return path


@pytest.fixture
def checkout(text, tmp_path):
    """A folder laid out as a reader has it; `axonn-jax train` is made short, and each run goes on for one more step."""
    for name in ("examples", "scripts", "axonn_jax", "README.md"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "runs").mkdir()
    for name in ("text", "demo-data", "code", "math"):
        (tmp_path / "runs" / name).symlink_to(text)
    model = pretrained.write_model(tmp_path / "runs/qwen3", QWEN, pretrained.weights(QWEN))
    shutil.copy(text / "tokenizer.json", model)
    (tmp_path / "runs/instructions").mkdir()
    instruction_data.write(tmp_path / "runs/instructions/functions.jsonl", instruction_data.rows(20))
    commands = tmp_path / "commands"
    commands.mkdir()
    short = f'case " $* " in *" train "*) set -- "$@" {SHORT} --train.steps "$STEPS";; esac'
    (commands / "axonn-jax").write_text(f'#!/bin/sh\n{short}\nexec {shlex.join(AXONN)} "$@"\n')
    for name in ("python", "python3"):
        (commands / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    for command in commands.iterdir():
        command.chmod(0o755)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    mpi = [str(Path(MPIRUN).parent)] if MPIRUN else []
    (tmp_path / ".venv/bin/activate").write_text(f"PATH={shlex.quote(':'.join([str(commands), *mpi]))}:$PATH\n")
    return tmp_path


def run(line, folder, step=1, before="source .venv/bin/activate"):
    bare = [each for each in os.environ["PATH"].split(os.pathsep) if not Path(each, "axonn-jax").exists()]
    env = {**environment(), "PATH": os.pathsep.join(bare), "PYTHONPATH": str(ROOT), "STEPS": str(step)}
    words = ["bash", "-c", f"{before}\n{line}"]
    done = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=600)
    return done.returncode, f"{line}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


# pipeline.md: test_flax_scripts.py; bring.md: its notebook
@pytest.mark.parametrize("page", [page for page in PYTHON if page not in ("pipeline.md", "bring.md")])
def test_the_python_of_a_page_runs(page, checkout):
    (checkout / "page.py").write_text("\n".join(PYTHON[page]))
    status, said = run("python page.py", checkout)
    assert status == 0, said


def test_the_notebook_is_the_page_and_runs(checkout):
    stored = (ROOT / "examples/bring.ipynb").read_text()
    printed = subprocess.run([sys.executable, ROOT / "scripts/docs/notebook"], capture_output=True, text=True)
    assert stored == printed.stdout, "scripts/docs/notebook >examples/bring.ipynb"
    assert all(block in "\n\n\n".join(cells(stored)) + "\n" for block in PYTHON["bring.md"])
    (checkout / "kernel.py").write_text(f"{KERNEL}asyncio.run(kernel({cells(stored)!r}))\n")
    status, said = run("python kernel.py", checkout)
    assert status == 0, said


def cells(notebook):
    return ["".join(cell["source"]) for cell in json.loads(notebook)["cells"] if cell["cell_type"] == "code"]


@pytest.mark.parametrize("page", FRESH)
def test_a_fresh_shell_finds_the_commands_of_a_page(page, checkout):
    left_out = ("pip ", "docker ", *([] if MPIRUN else ["mpirun "]))
    typed = [line for line in lines(page) if not line.startswith(left_out)]
    asked = [line if line.startswith("source ") else f"type -P {line.split()[0]}" for line in typed]
    status, said = run("\n".join(asked), checkout, before="set -e")
    assert status == 0, said


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.skipif(MPIRUN is None or shutil.which("sh") is None, reason="no MPI; scripts/setup installs one")
@pytest.mark.parametrize("page", list(SHELL))
def test_the_commands_of_a_page_run(page, checkout):
    prepared = [shlex.split(line)[3] for line in lines(page) if line.startswith("axonn-jax prepare")]
    for name in prepared:
        (checkout / name).unlink(missing_ok=True)
    if not prepared and "axonn-jax train" not in lines(page)[0]:
        assert run("axonn-jax train examples/gpt-tiny.toml --data.path runs/text", checkout)[0] == 0
        shutil.copytree(checkout / "runs/gpt-tiny", checkout / "runs/demo")
    before = "" if page in FRESH else "source .venv/bin/activate"
    for step, line in enumerate(lines(page), 2):
        if line.startswith("source "):
            before = line
        elif not line.startswith(tuple(NOT_RUN)):
            status, said = run(line, checkout, step, before)
            assert status == 0, said
        elif line.startswith("scripts/"):
            assert os.access(ROOT / line.split()[0], os.X_OK)
