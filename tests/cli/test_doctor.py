"""Doctor against the real machine, and against machines where something is broken."""

import json
import os
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from launched import MPIRUN, OPEN_MPI_4, alive, gpu_environment, until

from axonn_jax.cli.doctor import Doctor, _show, run
from axonn_jax.cli.doctor.checks import extras, pinned, places, preallocated, slurm
from axonn_jax.cli.doctor.mpi import mpi4jax, same_mpi, two_ranks
from axonn_jax.cli.doctor.probes import Row, environment, installed, loopback, probe, ranges, satisfies, which
from axonn_jax.core.backend.small_products import sums_are_wrong
from axonn_jax.core.distributed.network import exposed
from axonn_jax.core.errors import UserError

COMMAND = "import sys; from axonn_jax.cli.main import main; sys.exit(main(['doctor', '--json', *sys.argv[1:]]))"
ROWS = {
    "python", "platform", "cores", "memory", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain",
    "tokenizers", "devices", "gpus", "mpicc", "mpirun", "mpi4py", "mpi4jax", "mpi ping", "hostname", "loopback",
    "disk", "slurm", "tensorboardX", "wandb", "mlflow-skinny", "pyarrow", "safetensors", "transformers", "torch",
}  # fmt: skip
TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_NODELIST": "n[1-2]",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
}


def doctor(*arguments: str, stub: Path | None = None, launcher: tuple[str, ...] = ()) -> tuple[int, dict[str, Any]]:
    env = {**os.environ, "PYTHONPATH": str(stub)} if stub else dict(os.environ)
    env |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(
        [*launcher, sys.executable, "-c", COMMAND, *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.stdout.count("\n") == 1, done.stdout + done.stderr
    whole = json.loads(done.stdout)
    assert whole["ok"] == (done.returncode == 0)
    return done.returncode, {row["check"]: row for row in whole["rows"]}


def hide(folder: Path, module: str, code: str) -> Path:
    (folder / module).mkdir()
    (folder / module / "__init__.py").write_text(code)
    return folder


def test_json_has_all_rows_and_every_trouble_a_remedy(tmp_path: Path) -> None:
    status, rows = doctor(stub=hide(tmp_path, "mpi4jax", "raise ImportError('hidden by a test')"))
    assert status == 0  # MPI is needed by nobody who stays in one process
    assert set(rows) >= ROWS
    assert ("sums" in rows) == sums_are_wrong()
    for row in rows.values():
        assert row["status"] in ("ok", "warning", "missing")
        assert row["found"]
        assert row["fails"]
        assert bool(row["fix"]) == (row["status"] != "ok"), row
    import jax

    assert rows["jax"]["found"].startswith(jax.__version__)
    assert rows["jax"]["status"] == "ok"
    assert rows["mpi4jax"]["status"] == "missing"
    assert "ImportError: hidden by a test" in rows["mpi4jax"]["found"] or "not installed" in rows["mpi4jax"]["found"]
    assert "mpi4jax" in rows["mpi4jax"]["fix"] or "setup --again" in rows["mpi4jax"]["fix"]


SENDS = """
import time, warnings
import jax
warnings.warn("The latest supported JAX version with this release of mpi4jax is 0.0.1")
def has_cuda_support(): return False
def send(array, dest, tag, comm): {}
def recv(like, source, tag, comm): return jax.numpy.zeros_like(like) + {}
"""


@pytest.mark.skipif(installed("mpi4jax") is None, reason="no mpi4jax; scripts/setup builds it where it finds an MPI")
@pytest.mark.parametrize(
    ("launcher", "send", "arrives", "status", "says"),
    [
        (MPIRUN, "pass", "source", "ok", "tried, 2 ranks exchange an array"),
        (None, "pass", "source", "ok", "tried, a rank sends itself an array"),
        (MPIRUN, "pass", "source + 1", "warning", "an array does not arrive: AssertionError: what one rank sent"),
        (MPIRUN, "raise RuntimeError('no target')", "source", "warning", "does not arrive: RuntimeError: no target"),
        (None, "time.sleep(600)", "source", "warning", "an array does not arrive: no answer within 8 s"),
    ],
)
def test_mpi4jax_is_tried_whatever_it_says_of_the_version_of_jax(
    launcher: str | None, send: str, arrives: str, status: str, says: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(hide(tmp_path, "mpi4jax", SENDS.format(send, arrives))))
    row = mpi4jax(two_ranks(launcher, "Open MPI"), 8 if "sleep" in send else 60)
    assert (row.status, bool(row.fix)) == (status, status != "ok")
    assert says in row.found


def test_broken_jax_is_an_exit_status_of_1(tmp_path: Path) -> None:
    status, rows = doctor(stub=hide(tmp_path, "jax", "raise ImportError('no such library: libfoo')"))
    assert status == 1
    for check in ("jax", "devices"):
        assert rows[check]["status"] == "missing"
        assert "libfoo" in rows[check]["found"]
    assert rows["tokenizers"]["status"] == "ok"


def test_hanging_devices_do_not_hang_doctor(tmp_path: Path) -> None:
    code = "import time\n__version__ = '9'\ndef devices():\n    time.sleep(600)\n"
    stub = hide(tmp_path, "jax", code)
    status, rows = doctor("--timeout", "4", stub=stub)
    assert status == 1
    assert rows["devices"]["status"] == "missing"
    assert "no answer within 4 s" in rows["devices"]["found"]
    assert rows["devices"]["fix"] == "export JAX_PLATFORMS=cpu"


def test_tasks_of_srun_start_no_mpirun_and_the_first_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TASK, "SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}.items():
        monkeypatch.setenv(name, value)
    _, rows = doctor()
    assert rows["mpi ping"]["status"] == "ok"
    assert rows["mpi ping"]["found"].startswith("not tried: this is a task of srun")
    monkeypatch.setenv("SLURM_PROCID", "1")
    monkeypatch.setattr("axonn_jax.cli.doctor.examine", lambda timeout: [])
    monkeypatch.setattr("axonn_jax.cli.doctor._show", lambda rows: pytest.fail("shown"))
    assert run(Doctor()) == 0


@pytest.mark.mpi
@pytest.mark.skipif(which("mpirun")[0] is None, reason="there is no mpirun")
def test_doctor_started_by_mpirun_still_finds_mpi() -> None:
    _, rows = doctor(launcher=(str(which("mpirun")[0]), "-n", "1"))
    assert rows["mpi ping"]["status"] == "ok", rows["mpi ping"]
    told = re.fullmatch(r"mpirun on (.*); each rank on (.*)", rows["listens"]["found"])
    assert told, rows["listens"]
    assert told[2] == "none" or OPEN_MPI_4  # in shared memory; ranks of Open MPI 4 listen for its daemons
    if exposed(set(told[1].split(", "))):  # as Open MPI 5.0.11 does
        assert rows["listens"]["status"] == "warning"
        assert rows["listens"]["fix"].startswith("unshare ")


GPUS = "import json; from axonn_jax.cli.doctor.checks import gpu_shares; print(json.dumps(vars(gpu_shares(60))))"


@pytest.mark.mpi
@pytest.mark.skipif(which("mpirun")[0] is None, reason="there is no mpirun")
@pytest.mark.parametrize(
    ("ranks", "visible", "status", "found"),
    [
        (1, "0,1", "ok", "rank 0 takes 0,1 of 2 (GPU-a, GPU-b)"),
        (2, "3,2,1,0", "ok", "rank 0 takes 0,1 of 4 (GPU-d, GPU-c); rank 1 takes 2,3 of 4 (GPU-b, GPU-a)"),
        (3, "1,2", "warning", "GPUs seen by ranks 0, 1, 2 = 2: at least 3, 1 for each of 3 processes"),
    ],
)
def test_each_rank_says_which_gpus_all_would_take(
    ranks: int, visible: str, status: str, found: str, tmp_path: Path
) -> None:
    variables = {**gpu_environment(tmp_path, ["GPU-a", "GPU-b", "GPU-c", "GPU-d"]), "CUDA_VISIBLE_DEVICES": visible}
    words = [str(which("mpirun")[0]), "--oversubscribe", "-n", str(ranks), sys.executable, "-c", GPUS]
    done = subprocess.run(words, env=variables, capture_output=True, text=True, timeout=150)
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(rows) == ranks, done.stderr
    for row in rows:
        assert row["status"] == status
        assert row["found"].startswith(found)


def test_timeout_must_be_of_use() -> None:
    with pytest.raises(UserError, match="--timeout = 0: a number of seconds above 0"):
        run(Doctor(timeout=0))


def test_plain_output_has_no_escapes_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [Row("a", "ok", "1.0", "x"), Row("b", "missing", "no [b] here", "everything", "get b", required=True)]
    _show(rows)
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "a  ok       1.0" in out
    assert "b: no [b] here\n  would fail: everything\n  to fix it:  get b" in out
    assert out.rstrip().endswith("broken: b")


def test_on_a_terminal_long_findings_stay_in_their_column_and_statuses_have_colours(capsys, monkeypatch) -> None:
    rows = [Row("mpi4jax", "ok", "0.9.1, tried: two ranks exchange an array", "x"), Row("b", "missing", "no", "y", "z")]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name, value in {"TERM": "xterm", "COLUMNS": "40", "NO_COLOR": ""}.items():
        monkeypatch.setenv(name, value)
    _show(rows)
    title, _, *lines = capsys.readouterr().out.splitlines()
    assert title.startswith("axonn_jax ")
    assert lines[:4] == [
        "mpi4jax  \x1b[32mok     \x1b[0m  0.9.1, tried: two",
        "                  ranks exchange an",
        "                  array",
        "b        \x1b[31mmissing\x1b[0m  no",
    ]
    for name, value in {"NO_COLOR": "1", "TERM": "dumb"}.items():
        monkeypatch.setenv(name, value)
        _show(rows)
        assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("check", "environ", "status", "found"),
    [
        (slurm, TASK, "ok", "they agree"),
        (slurm, TASK | {"SLURM_NTASKS": "8"}, "warning", "SLURM_STEP_NUM_TASKS=4 but SLURM_NTASKS=8"),
        (slurm, TASK | {"OMPI_COMM_WORLD_SIZE": "2"}, "warning", "SLURM_STEP_NUM_TASKS=4 but OMPI_COMM_WORLD_SIZE=2"),
        (slurm, TASK | {"PMI_RANK": "3"}, "ok", "they agree"),
        (slurm, TASK | {"SLURM_PROCID": "4"}, "warning", "PROCID < STEP_NUM_TASKS"),
        (slurm, TASK | {"SLURM_LOCALID": "x"}, "warning", "no number"),
        # the limit on pinned memory, beside the host's memory
        (pinned, {}, "ok", "is not set: runs raise it from 64"),
        (pinned, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "512"}, "ok", "LIMIT_GB = 512; the host has "),
        (pinned, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "1"}, "warning", "LIMIT_GB = 1; the host has "),
        (pinned, {"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB": "all"}, "warning", "LIMIT_GB = 'all': a whole number of GiB"),
        # the share of a GPU that runs take
        (preallocated, {}, "ok", "XLA_CLIENT_MEM_FRACTION is not set: runs take 92% of a GPU's"),
        (preallocated, {"XLA_CLIENT_MEM_FRACTION": ".95"}, "ok", "= .95: runs take at most 95%"),
        (preallocated, {"XLA_PYTHON_CLIENT_MEM_FRACTION": ".5"}, "warning", "= .5: runs take at most 50%"),
        (preallocated, {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}, "warning", "= false: runs take at most 75%"),
        (preallocated, {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}, "ok", "= platform: runs take at most 100%"),
    ],
)
def test_what_the_environment_says_is_a_row(check, environ, status, found) -> None:
    row = check(environ)
    assert (row.status, bool(row.fix)) == (status, status != "ok")
    assert found in row.found


def test_slurm_without_and_in_a_batch_shell() -> None:
    assert slurm({}).found == "no Slurm variables"
    batch = slurm({"SLURM_JOB_ID": "7", "SLURM_PROCID": "0", "SLURM_NTASKS": "4"})
    assert batch.status == "ok"
    assert "a batch shell" in batch.found


@pytest.mark.parametrize(
    ("version", "range_", "expected"),
    [
        ("0.10.2", ">=0.10.2", True),
        ("0.12.0.1", ">=0.10.2", True),
        ("0.9", ">=0.10.2", False),
        ("3.11.7", ">=3.11,<3.14", True),
        ("3.14.0", "<3.14,>=3.11", False),
        ("2.0", "==2", True),
        ("2.1", "!=2.1", False),
        ("1.0rc1", "", True),
    ],
)
def test_satisfies(version: str, range_: str, expected: bool) -> None:
    assert satisfies(version, range_) is expected


def test_ranges_are_those_of_pyproject() -> None:
    found = ranges("axonn_jax")
    assert found["jax"][0].startswith(">=")
    assert not found["jax"][1]
    assert found["mpi4jax"][1]
    assert ranges("no-such-distribution") == {}


def test_the_remedy_of_a_missing_package_is_the_extra_that_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("axonn_jax.cli.doctor.checks.installed", lambda name: None)
    rows = {row.check: row.fix for row in extras()}
    assert rows.pop("torch").endswith("-m pip install torch")
    for name, fix in rows.items():
        (extra,) = re.findall(r"-m pip install 'axonn_jax\[(.*)\]'$", fix)
        of_extra = [text for text in metadata.requires("axonn_jax") or [] if f'extra == "{extra}"' in text]
        assert any(text.startswith(name) for text in of_extra), fix


def test_other_processes_do_not_inherit_a_launcher() -> None:
    env = environment({"OMPI_COMM_WORLD_RANK": "1", "PMIX_RANK": "1", "OMPI_MCA_btl": "self", "PATH": "p"})
    assert env == {"OMPI_MCA_btl": "self", "PATH": "p", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_probe_ends_the_children_too(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    seen = probe(["bash", "-c", f"sleep 600 & echo $! > {pid}; wait"], 1)
    assert seen.timed_out
    assert seen.trouble == "no answer within 1 s"
    until(lambda: not alive(int(pid.read_text())), lambda: "it is still there", 5)


def test_probe_of_a_missing_program() -> None:
    seen = probe(["/no/such/program"], 1)
    assert not seen.ok
    assert "No such file" in seen.trouble


def test_same_mpi() -> None:
    assert same_mpi("mpirun (Open MPI) 5.0.11", "Open MPI v5.0.11")
    assert not same_mpi("mpirun (Open MPI) 4.1.2", "Open MPI v5.0.11")
    assert not same_mpi("HYDRA build details: Version: 4.2.0", "Open MPI v5.0.11")
    assert same_mpi("HYDRA build details: Version: 4.2.0", "MPICH Version: 4.1.0")


def test_loopback_works_here() -> None:
    assert loopback() == ""


def test_a_working_directory_that_is_gone_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    rows = {row.check: row for row in places()}
    assert rows["disk"].status == "warning"
    assert "No such file" in rows["disk"].found
