"""The command line itself: help, version, exit statuses, one JSON object, ranks, signals and pipes."""

import dataclasses
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import types
import zlib
from codecs import BOM_UTF8
from importlib import metadata

import pytest
from commands import alone
from launched import AXONN, UNDER_MPIRUN, environment, finished, mpirun

from axonn_jax.cli import main as command_line
from axonn_jax.cli.main import COMMANDS, main, rank_of, report
from axonn_jax.core.documents import parse_json
from axonn_jax.core.errors import UserError, nearest
from axonn_jax.files.huggingface.families import FAMILIES
from axonn_jax.planning.machines.machine_file import dumps_machine, load_machine
from axonn_jax.run.config_file import read, tables


def install(monkeypatch, run, arguments=None):
    """Adds a command `try` that calls `run`."""
    module = types.ModuleType("a_command")
    if arguments is None:
        module.main = run
    else:
        module.Try, module.run = arguments, run
    monkeypatch.setitem(sys.modules, "axonn_jax.cli.try", module)
    monkeypatch.setitem(COMMANDS, "try", "tries")


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"], ["--version"], ["-V"]])
def test_help_and_version_import_nothing_heavy(argv):
    done = alone(*argv, heavy="jax jaxlib flax numpy rich mpi4py")
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_lists_every_command(monkeypatch, capsys, argv):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(argv) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for name, text in COMMANDS.items():
        assert " ".join(out.split()).count(f"{name} {text}") == 1
    assert all(len(line) <= 80 for line in out.splitlines())


def test_version_names_the_package_and_what_it_stands_on(capsys):
    assert main(["--version"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "axonn-jax 0.1.0"
    assert f"jax {metadata.version('jax')}" in lines


def test_train_help_shows_every_key_and_no_jax():
    done = alone("train", "--help", heavy="jax jaxlib flax rich mpi4py")
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout.startswith("usage: axonn-jax train CONFIG.toml ")
    for table, keys in tables().items():
        for key in keys:
            assert f"--{table}.{key} " in done.stdout
    assert "\x1b" not in done.stdout
    assert "True" not in done.stdout
    assert "{None" not in done.stdout


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name, capsys):
    assert main([name, "--help"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: axonn-jax {name}")
    assert err == ""


def test_status_of_the_command_is_the_exit_status(monkeypatch):
    install(monkeypatch, lambda argv: len(argv))
    assert main(["try", "a", "b", "c"]) == 3


def test_json_is_alone_on_standard_output(monkeypatch, capsys, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    for number in range(3):
        (source / f"{number}.txt").write_text("the same words and the same words again\n" * 20)
    argv = ["prepare", str(source), str(tmp_path / "out"), "--vocab", "260", "--json"]
    assert main(argv) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    assert json.loads(out)["vocab"] == 260
    assert main(argv) == 2  # OUT_DIR exists now
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: OUT_DIR = ")


def fail(error):
    def run(argv):
        raise error

    return run


def test_a_failed_run_is_one_line(monkeypatch, capsys):
    install(monkeypatch, fail(RuntimeError("device\n  lost " + "x" * 5000)))
    monkeypatch.delenv("AXONN_JAX_TRACEBACK", raising=False)
    assert main(["try"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: RuntimeError: device lost xxx")
    assert err.endswith("... (set AXONN_JAX_TRACEBACK=1 for the traceback)\n")
    assert err.count("\n") == 1
    assert len(err) < 800


def test_an_exception_that_is_only_called_error_is_named_with_its_module(monkeypatch, capsys):
    install(monkeypatch, fail(zlib.error("invalid block type")))
    assert main(["try"]) == 1
    assert capsys.readouterr().err.startswith("error: zlib.error: invalid block type")


def test_only_what_is_close_is_suggested():
    assert nearest("gpt_oss", FAMILIES) == ""
    assert nearest("gtp2", FAMILIES) == "; did you mean 'gpt2'?"
    flags = ["--grid.y", "--grid.data", "--top", "--machine"]
    assert nearest("--grid.foo", flags) == ""  # what is shared is no sign
    assert nearest("--grid.dat", flags) == "; did you mean '--grid.data'?"
    assert nearest("--step", ["--merge", "--help"]) == ""
    assert nearest("--gird.data", flags) == "; did you mean '--grid.data'?"


def test_traceback_on_request(monkeypatch, capsys):
    install(monkeypatch, fail(RuntimeError("device lost")))
    monkeypatch.setenv("AXONN_JAX_TRACEBACK", "1")
    assert main(["try"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("Traceback (most recent call last):")
    assert err.endswith("\nerror: RuntimeError: device lost\n")


@pytest.mark.parametrize(("code", "status"), [(None, 0), (0, 0), (7, 7)])
def test_system_exit_is_a_status(monkeypatch, code, status):
    install(monkeypatch, fail(SystemExit(code)))
    assert main(["try"]) == status


def test_a_message_on_exit_is_a_failed_run(monkeypatch, capsys):
    install(monkeypatch, fail(SystemExit("no more")))
    assert main(["try"]) == 1
    assert "no more" in capsys.readouterr().err


def test_interrupt(monkeypatch, capsys):
    install(monkeypatch, fail(KeyboardInterrupt()))
    assert main(["try"]) == 130
    assert capsys.readouterr() == ("", "interrupted\n")


def test_interrupt_signal_of_a_process():
    code = """
import signal, sys, time, types
from axonn_jax.cli import main as m
module = types.ModuleType("a_command")
def run(argv):
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs start without it
    print("ready", flush=True)
    time.sleep(60)
module.main = run
sys.modules["axonn_jax.cli.try"] = module
m.COMMANDS = {"try": ""}
sys.exit(m.main(["try"]))
"""
    with subprocess.Popen([sys.executable, "-c", code], env=environment(), stdout=-1, stderr=-1, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "interrupted\n")


def test_reader_of_standard_output_gone():
    read, write = os.pipe()
    os.close(read)
    argv = [*AXONN, "train", "--help"]
    done = subprocess.run(argv, env=environment(), stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_another_broken_pipe_is_a_failed_run(monkeypatch, capsys):
    install(monkeypatch, fail(BrokenPipeError(32, "Broken pipe")))
    assert main(["try"]) == 1
    assert "error: BrokenPipeError: " in capsys.readouterr().err


OMPI = {"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "1"}


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, (0, 1, 0)),
        (OMPI, (3, 4, 0)),
        (OMPI | {"OMPI_COMM_WORLD_SIZE": "1"}, (0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "3"}, (0, 1, 0)),
        ({"OMPI_COMM_WORLD_RANK": "x", "OMPI_COMM_WORLD_SIZE": "4"}, (0, 1, 0)),
        ({"PMIX_RANK": "2", "PMIX_SIZE": "4"}, (2, 4, 0)),
        ({"PMI_RANK": "1", "PMI_SIZE": "2"}, (1, 2, 0)),
        ({"JAX_PROCESS_ID": "1", "JAX_NUM_PROCESSES": "2"}, (1, 2, 0)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_LOCALID": "1"}, (5, 8, 1)),
        ({"SLURM_PROCID": "5", "SLURM_NTASKS": "1"}, (0, 1, 0)),
        # mpirun in a Slurm batch shell: every process inherits the batch step's SLURM_PROCID
        (OMPI | {"SLURM_PROCID": "0", "SLURM_NTASKS": "4"}, (3, 4, 0)),
    ],
)
def test_rank(environ, ranks):
    assert rank_of(environ) == ranks


def of_slurm(rank, local):
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": str(os.getpid())}
    return {**job, "SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": str(local)}


@pytest.mark.parametrize("error", [UserError("train.lr", 1, "2"), OSError("no disk")], ids=["mistake", "failure"])
@pytest.mark.parametrize(
    "environ",
    [{}, OMPI | {"OMPI_COMM_WORLD_RANK": "0"}, OMPI, of_slurm(4, 0)],
    ids=["alone", "first", "last", "first on a host"],
)
def test_a_process_that_nobody_has_ended_tells_what_it_met_and_who_it_is(environ, error, monkeypatch, capsys):
    for name, text in environ.items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(command_line, "_GRACE_S", 0.0)
    monkeypatch.setattr(command_line, "_APART_S", 0.0)
    rank = rank_of(os.environ)[0]
    assert report(error) == (2 if isinstance(error, UserError) else 1)
    said = "train.lr = 1: 2\n" if isinstance(error, UserError) else "OSError: no disk (set "
    assert capsys.readouterr().err.startswith(f"error: {f'rank {rank}: ' if rank else ''}{said}")


@pytest.mark.skipif(sys.platform != "linux", reason="/proc")
def test_a_later_task_of_slurm_tells_a_mistake_that_the_first_on_its_host_has_not_met(monkeypatch, capsys):
    """Slurm may let tasks live where one has failed: they would all tell what the first one has told."""
    for name, text in of_slurm(5, 1).items():
        monkeypatch.setenv(name, text)
    monkeypatch.setattr(command_line, "_GRACE_S", 0.0)
    monkeypatch.setattr(command_line, "_APART_S", 0.0)
    mistake = UserError("train.lr", 1, "2")
    assert report(mistake) == 2
    assert capsys.readouterr().err == ""
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, env=of_slurm(4, 0)) as first:
        assert report(mistake) == 2
        first.communicate(b"\n")
    assert capsys.readouterr().err == "error: rank 5: train.lr = 1: 2\n"


def test_control_characters_do_not_reach_the_terminal(capsys):
    assert main(["\x1b[31mred\n"]) == 2
    assert report(ValueError("\x1b[31mred")) == 1
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("text", ["Gloo failed: Connection reset by peer", "NCCL: remote process exited"])
def test_a_process_that_another_has_left_says_so(text, capsys):
    assert report(RuntimeError(f"UNKNOWN: {text}")) == 1
    assert capsys.readouterr().err.startswith("error: another process of the run has ended")


@dataclasses.dataclass(frozen=True)
class Try:
    """Tries."""

    size: int = 3
    """How much."""


def test_a_new_command_needs_one_line(monkeypatch, capsys):
    install(monkeypatch, lambda args: args.size, arguments=Try)
    assert main(["try", "--size", "5"]) == 5
    assert main(["try", "--siz", "5"]) == 2
    assert main(["--help"]) == 0
    assert re.search(r"^  try +tries$", capsys.readouterr().out, re.M)


@pytest.mark.parametrize("ranks", [pytest.param(3, marks=UNDER_MPIRUN)])
def test_only_one_line_under_mpirun(ranks, tmp_path):
    done = finished(mpirun(ranks, *AXONN, "train", "none.toml"), cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("error: ") == 1
    assert "error: CONFIG.toml = 'none.toml': no such file" in done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
@pytest.mark.parametrize(("words", "status"), [("--version", 0), ("doctor --help", 0), ("trian", 2)])
def test_closed_streams_change_no_status(words, status, closed):
    line = f"{shlex.quote(sys.executable)} -m axonn_jax.cli.main {words} {closed}"
    done = finished(["sh", "-c", line])
    assert done.returncode == status, done.stderr
    assert (done.stderr.count("\n") == 1) == (status == 2 and "2>&-" not in closed)


def test_a_file_opened_later_takes_no_closed_stream():
    code = (
        "import sys; from axonn_jax.cli.main import main; main(['--version']); print(open('/dev/null').fileno() > 2, "
    )
    line = f'{shlex.quote(sys.executable)} -c "{code}file=sys.stderr)" >&- <&-'
    done = finished(["sh", "-c", line])
    assert done.stderr == "True\n"


ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def test_an_ascii_locale_takes_and_shows_what_it_cannot_express(tmp_path):
    code = "from axonn_jax.cli.arguments import parse; from axonn_jax.cli.generate import Generate; import sys; "
    code += "print(ascii(parse(Generate, ['run', '--prompt', sys.argv[1]], 'generate').prompt))"
    assert finished([sys.executable, "-c", code, "é 漢"], **ASCII).stdout == "'\\xe9 \\u6f22'\n"
    (tmp_path / "text").mkdir()
    for number in range(30):
        (tmp_path / "text" / f"{number}.txt").write_text(f"line {number} of a text\n" * 20)
    words = [*AXONN, "prepare", tmp_path / "text", tmp_path / "é", "--vocab", 260]
    done = finished(words, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "\\xe9" in done.stdout


def test_a_byte_order_mark_in_front_of_a_file_is_left_out(tmp_path):
    (tmp_path / "run.toml").write_bytes(BOM_UTF8 + b"[train]\nsteps = 3\n")
    assert read(tmp_path / "run.toml").train.steps == 3
    (tmp_path / "machine.toml").write_bytes(BOM_UTF8 + dumps_machine(load_machine("laptop")).encode())
    assert load_machine(str(tmp_path / "machine.toml")).name == "machine"
    assert parse_json(BOM_UTF8 + b'{"prompt": "x"}') == {"prompt": "x"}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("la", {"launch"}),
        ("train --grid.p", {"--grid.pipe"}),
        ("prepare --tok", {"--tokenizer"}),
        ("plan --memory.re", {"--memory.reshard_after"}),
        ("inspect run", set()),
    ],
)
def test_a_shell_completes_commands_and_flags(capsys, typed, completed):
    assert main(["--completion"]) == 0
    words = f"axonn-jax {typed}".split()
    script = f"{capsys.readouterr().out}\nCOMP_WORDS=({' '.join(words)}) COMP_CWORD={len(words) - 1}\n"
    done = subprocess.run(
        ["bash", "-c", f'{script}_axonn_jax; echo "${{COMPREPLY[@]}}"'], capture_output=True, text=True, check=True
    )
    assert set(done.stdout.split()) == completed
    assert done.stderr == ""
