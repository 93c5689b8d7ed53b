"""The parts of scripts/setup that decide something, without installing anything."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def setup() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        yield script("_setup.py", patch)


@pytest.fixture(scope="module")
def versions(setup: ModuleType) -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "_setup", setup)
        yield script("versions", patch)


def script(name: str, patch: pytest.MonkeyPatch) -> ModuleType:
    loader = SourceFileLoader(f"axonn_scripts_{name}", str(ROOT / "scripts" / name))
    module = ModuleType(loader.name)
    module.__file__ = loader.path
    patch.setitem(sys.modules, loader.name, module)
    patch.setattr(sys, "dont_write_bytecode", True)
    loader.exec_module(module)
    return module


def program(path: Path, text: str = "exit 0") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_key_follows_the_files(setup: ModuleType, tmp_path: Path) -> None:
    for name in setup.KEYED:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    before = setup.key(tmp_path)
    assert before == setup.key(ROOT)
    (tmp_path / "constraints.txt").write_text("jax==0.1\n")
    assert setup.key(tmp_path) != before


def test_choices_are_remembered_and_can_be_taken_back(setup: ModuleType) -> None:
    first = setup.wanted({"AXONN_EXTRAS": "aot, cuda13,dev", "AXONN_MPI": "wheel"}, None, "k")
    assert (first.extras, first.mpi) == ("aot,cuda13", "wheel")
    assert setup.wanted({}, first, "k") == first
    assert setup.wanted({"AXONN_EXTRAS": "none"}, first, "k").extras == ""
    with pytest.raises(ValueError, match="AXONN_MPI = 'mpich': must be one of auto, site, wheel, none"):
        setup.wanted({"AXONN_MPI": "mpich"}, None, "k")


@pytest.mark.parametrize("text", ["", "[]", '{"kee": 1}', "not json"])
def test_an_unreadable_stamp_is_none(setup: ModuleType, tmp_path: Path, text: str) -> None:
    (tmp_path / "s").write_text(text)
    assert setup.read_stamp(tmp_path / "s") is None
    assert setup.read_stamp(tmp_path / "none") is None


def test_a_copied_environment_is_recognised(setup: ModuleType, tmp_path: Path) -> None:
    here, there = tmp_path / "a b/.venv", tmp_path / "copy/.venv"
    for folder in (here, there):
        folder.mkdir(parents=True)
        (folder / "pyvenv.cfg").write_text(f"home = /x\ncommand = /x/python -m venv --clear {here}\n")
    assert setup.at_home(here)
    assert not setup.at_home(there)
    assert not setup.at_home(tmp_path)


def test_mpicc_of_the_environment_is_not_the_sites(setup: ModuleType, tmp_path: Path) -> None:
    own, site = program(tmp_path / ".venv/bin/mpicc"), program(tmp_path / "site/mpicc")
    path = os.pathsep.join([str(own.parent), str(site.parent)])
    find = setup.find_mpicc
    assert find({"PATH": path}, "auto", tmp_path / ".venv") == str(site)
    assert find({"PATH": path}, "wheel", tmp_path / ".venv") is None
    assert find({"PATH": str(own.parent)}, "auto", tmp_path / ".venv") is None
    with pytest.raises(ValueError, match="AXONN_MPI = 'site'"):
        find({"PATH": str(own.parent)}, "site", tmp_path / ".venv")


def test_cuda_is_a_folder_with_the_header_not_any_nvcc(setup: ModuleType, tmp_path: Path) -> None:
    wrapper = program(tmp_path / "bin/nvcc")
    env = {"PATH": str(wrapper.parent)}
    assert setup.find_cuda(env, usual=tmp_path) is None
    toolkit = tmp_path / "cuda-13.0"
    nvcc = program(toolkit / "bin/nvcc")
    (toolkit / "include").mkdir()
    (toolkit / "include/cuda_runtime.h").touch()
    assert setup.find_cuda(env, usual=tmp_path) == toolkit
    (tmp_path / "link").mkdir()
    (tmp_path / "link/nvcc").symlink_to(nvcc)
    assert setup.find_cuda({"PATH": str(tmp_path / "link")}, usual=tmp_path / "none") == toolkit
    assert setup.find_cuda({"PATH": "", "CUDA_HOME": str(toolkit)}, usual=tmp_path / "none") == toolkit


@pytest.mark.parametrize(
    ("settings", "uv", "asked"),
    [
        ("", "exit 0", "uv"),
        ("global.extra-index-url='/wheels'", "exit 0", "uv"),
        ("global.index-url='https://mirror'", "exit 0", "pip"),
        ("", "exit 1", "uv pip"),
    ],
)
def test_uv_installs_where_it_can(setup: ModuleType, tmp_path: Path, settings: str, uv: str, asked: str) -> None:
    log = tmp_path / "log"
    program(tmp_path / "bin/python", f'case "$*" in *config*) echo "{settings}";; *"-m uv"*) {uv};; esac')
    installer = setup.Installer(tmp_path, log, 0.0)
    installer.tools()
    log.write_text("")
    installer.pip("numpy")
    assert re.findall(r"-m (\w+) .*numpy", log.read_text()) == asked.split()


def run_setup(root: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(root / "scripts/setup"), *arguments]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("AXONN_")}
    return subprocess.run(command, env={**clean, **env}, capture_output=True, text=True, timeout=60, cwd="/")


def test_a_python_that_only_pretends_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts/setup")
    program(tmp_path / "bin/python3.14", "echo 'pyenv: python3.14: command not found' >&2; exit 127")
    program(tmp_path / "bin/python3.13", 'case "$*" in *ensurepip*) ;; *) echo "worker: $*" ;; esac')
    for tool in ("bash", "dirname"):  # all that PATH has besides: no Python of this machine
        (tmp_path / "bin" / tool).symlink_to(shutil.which(tool) or pytest.fail(tool))
    done = run_setup(tmp_path, "--again", PATH=f"{tmp_path}/bin")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"worker: -I {tmp_path}/scripts/_setup.py --again\n"
    assert done.stderr == ""


def test_a_useless_axonn_python_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/setup", tmp_path / "scripts/setup")
    done = run_setup(tmp_path, AXONN_PYTHON="/no/such/python")
    assert done.returncode == 2
    assert done.stderr.startswith("AXONN_PYTHON = '/no/such/python': must be")
    assert done.stderr.count("\n") == 1


def test_every_place_names_the_same_pythons(setup: ModuleType) -> None:
    oldest, newest = (tuple(map(int, name.split("."))) for name in (setup.PYTHONS[0], setup.PYTHONS[-1]))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["requires-python"] == f">={setup.PYTHONS[0]},<{newest[0]}.{newest[1] + 1}"
    prefix = "Programming Language :: Python :: "
    listed = [text.removeprefix(prefix) for text in project["classifiers"] if text.startswith(prefix)]
    assert listed == list(setup.PYTHONS)
    script = (ROOT / "scripts/setup").read_text()
    assert f"{oldest} <= sys.version_info[:2] <= {newest}" in script
    assert f"for name in {' '.join(f'python{name}' for name in reversed(setup.PYTHONS))} python3 python;" in script
    for name in ("scripts/setup", "README.md", "CONTRIBUTING.md"):
        texts = set(re.findall(r"3\.\d+ to 3\.\d+", (ROOT / name).read_text()))
        assert texts == {f"{setup.PYTHONS[0]} to {setup.PYTHONS[-1]}"}, name
    for name in ("test", "release"):
        rows = set(re.findall(r"python: \[(.*)\]", (ROOT / f".github/workflows/{name}.yml").read_text()))
        assert rows == {f'"{setup.PYTHONS[0]}", "{setup.PYTHONS[-1]}"'}, name


def test_every_constraint_is_exact_and_every_dependency_is_pinned_for_every_python() -> None:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    pins: dict[str, list[str]] = {}
    for line in lines:
        found = re.fullmatch(r'([a-z0-9-]+)==[\w.]+( ; python_version (<|>=) "3\.12")?', line)
        assert found, line
        pins.setdefault(found[1], []).append(found[3] or "all")
    assert all(sorted(kinds) in (["all"], ["<", ">="]) for kinds in pins.values())
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    needed = project["dependencies"] + [
        text for name in ("mpi", "mpi4jax", "data", "hf", "hub", "tensorboard", "dev", "docs") for text in extras[name]
    ]
    names = {re.split(r"[\[<>=~! ]", text)[0].lower().replace("_", "-") for text in needed}
    assert not names - set(pins)


def test_the_oldest_environment_has_the_lowest_version_of_all_that_pyproject_names(versions: ModuleType) -> None:
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = pyproject["project"]["optional-dependencies"]
    named = [*pyproject["build-system"]["requires"], *pyproject["project"]["dependencies"]]
    for extra in set(extras) - {"aot", "cuda12", "cuda13", "wandb", "mlflow"}:
        named += extras[extra]
    lowest = versions.lows(pyproject)
    assert {line.replace("==", ">=") for line in lowest} == {re.sub(r"\[.*\]", "", text) for text in named}
    linters = {line for line in (ROOT / "constraints.txt").read_text().splitlines() if re.match("(mypy|ruff)==", line)}
    assert len(linters) == 2
    oldest = set(versions.seeds("oldest", ROOT).split())
    assert oldest == linters | {line for line in lowest if not line.startswith(("mypy", "ruff"))}
    assert set(versions.seeds("newest", ROOT).split()) == linters


def test_what_is_installed_is_written_as_the_constraints_are(versions: ModuleType) -> None:
    assert versions.exact("PyYAML==6.0.4\nml_dtypes==0.6.0\nruamel.yaml==1.0\n") == (
        "pyyaml==6.0.4\nml-dtypes==0.6.0\nruamel-yaml==1.0\n"
    )


def test_a_machine_that_cannot_make_the_environments_says_so_and_fails(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/versions")]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert re.fullmatch(r"scripts/versions: not run, this machine lacks debootstrap, unshare, git.*\n", done.stderr)
