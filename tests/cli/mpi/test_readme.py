"""The README's own `mpirun` lines, as they stand."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from launched import MPIRUN, UNDER_MPIRUN, environment, errors

ROOT = Path(__file__).resolve().parents[3]
LINES = re.findall(r"^(mpirun .*?)(?: +#.*)?$", (ROOT / "README.md").read_text(), re.M)
SHORT = "--train.steps 1 --train.warmup 0 --train.eval_batches 1 --model.layers 2 --model.hidden 32 --model.seq_len 32"
NOTICE = "`mpirun --bind-to none`"

pytestmark = UNDER_MPIRUN


def shell(line, folder, prepared):
    """Runs a line in a folder laid out as the README has it, with the commands of this interpreter."""
    (folder / "runs").mkdir()
    (folder / "runs" / "text").symlink_to(prepared)
    shutil.copytree(ROOT / "examples", folder / "examples")
    command = folder / "axonn-jax"
    command.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m axonn_jax.cli.main "$@"\n')
    command.chmod(0o755)
    path = os.pathsep.join([str(folder), str(Path(MPIRUN).parent), os.environ["PATH"]])
    env = {**environment(), "PATH": path, "PYTHONPATH": str(ROOT)}
    return subprocess.run(line, shell=True, cwd=folder, env=env, capture_output=True, text=True, timeout=300)


def test_the_readme_has_lines_for_two_and_for_four():
    assert [re.search(r"-n (\d)", line)[1] for line in LINES] == ["2", "4"]


@pytest.mark.parametrize(
    "line", [pytest.param(line, marks=[pytest.mark.slow] * ("-n 4" in line), id=line[:30]) for line in LINES]
)
def test_the_line_trains_on_all_cores(line, prepared, tmp_path):
    done = shell(f"{line} {SHORT}", tmp_path, prepared)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "trained 1 steps" in done.stderr
    assert not errors(done.stderr)
    assert NOTICE not in done.stderr
    cores = shell_cores(line)
    assert cores == os.sched_getaffinity(0)


def shell_cores(line):
    """The cores that every process of the line's launcher and options may use."""
    words = line.partition("axonn-jax")[0].split()
    code = "import os; print(*os.sched_getaffinity(0))"
    done = subprocess.run(
        [MPIRUN, *words[1:], sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    (cores,) = {frozenset(map(int, line.split())) for line in done.stdout.splitlines()}
    return cores
