"""What `init` does for each process of several."""

import os
import platform
import sys

import pytest
from launched import UNDER_MPIRUN, mpirun, succeeded

pytestmark = UNDER_MPIRUN


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="arenas are glibc's")
def test_the_heap_is_one_arena(tmp_path):
    # In an arena that MPI's threads bring, large blocks would be mapped and unmapped each time.
    script = tmp_path / "arenas.py"
    script.write_text(
        "import ctypes, os, re, sys\n"
        "import jax.numpy as jnp\n"
        "import axonn_jax\n"
        "axonn_jax.init(pipe=2)\n"
        "(jnp.ones((512, 512)) @ jnp.ones((512, 512))).block_until_ready()\n"
        "libc = ctypes.CDLL(None)\n"
        "libc.fopen.restype, libc.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]\n"
        "libc.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]\n"
        "path = sys.argv[1] + os.environ['OMPI_COMM_WORLD_RANK']\n"
        "file = libc.fopen(path.encode(), b'w')\n"
        "libc.malloc_info(0, file)\n"
        "libc.fclose(file)\n"
    )
    succeeded(mpirun(2, sys.executable, script, tmp_path / "arenas-"))
    for rank in range(2):
        assert (tmp_path / f"arenas-{rank}").read_text().count("<heap nr=") == 1


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores, of which one stays idle")
def test_processes_bound_to_too_few_cores_are_told():
    core = min(os.sched_getaffinity(0))
    code = "import axonn_jax as ax; ax.init(pipe=2)"
    done = succeeded(mpirun(2, "taskset", "-c", core, sys.executable, "-c", code))
    assert done.stderr.count("`mpirun --bind-to none`") == 1, done.stderr
