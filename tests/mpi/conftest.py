import subprocess
import sys
import sysconfig

import pytest
from launched import CONFIG


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The interpreter's own json, email and logging packages as training text."""
    out = tmp_path_factory.mktemp("mpi") / "data"
    stdlib = sysconfig.get_paths()["stdlib"]
    include = [word for name in ("json", "email", "logging") for word in ("--include", f"{name}/*.py")]
    command = [sys.executable, "-m", "axonn_jax.cli.main", "prepare", stdlib, str(out), "--vocab", "512", *include]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return out


@pytest.fixture
def config(prepared, tmp_path):
    """A run's file that saves every second step."""
    path = tmp_path / "c.toml"
    path.write_text(CONFIG.format(data=prepared, layers=2) + "\n[checkpoint]\nevery = 2\n")
    return path
