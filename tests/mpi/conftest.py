import subprocess
import sys
import sysconfig

import pytest


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The interpreter's own json, email and logging packages as training text."""
    out = tmp_path_factory.mktemp("mpi") / "data"
    stdlib = sysconfig.get_paths()["stdlib"]
    include = [word for name in ("json", "email", "logging") for word in ("--include", f"{name}/*.py")]
    command = [sys.executable, "-m", "axonn_jax.cli.main", "prepare", stdlib, str(out), "--vocab", "512", *include]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    return out
