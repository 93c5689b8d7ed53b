"""What `init` does for each of several processes; commands that print once what one process prints."""

import json
import os
import platform
import shutil
import sys

import pretrained
import pytest
from launched import AXONN, UNDER_MPIRUN, mpirun, succeeded

from axonn_jax.cli.main import main

pytestmark = UNDER_MPIRUN


@pytest.fixture(scope="module")
def model(prepared, tmp_path_factory):
    config = pretrained.generating("llama") | {"vocab_size": 512}
    path = pretrained.write_model(tmp_path_factory.mktemp("models") / "llama", config, pretrained.weights(config))
    shutil.copyfile(prepared / "tokenizer.json", path / "tokenizer.json")
    return path


def of_two(*words):
    done = succeeded(mpirun(2, *AXONN, *words))
    return done.stdout, done.stderr


@pytest.fixture
def of_one(capsys):
    def printed(*words):
        capsys.readouterr()
        assert main([*map(str, words)]) == 0
        return capsys.readouterr().out

    return printed


@pytest.mark.parametrize("axis", ["y", pytest.param("data", marks=pytest.mark.slow)])
def test_two_processes_print_the_texts_of_one_once(axis, model, of_one, tmp_path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in ("import ", "def main(", "x")))
    words = ["generate", model, "--prompts", prompts, "--tokens", "20", "--json"]
    one = of_one(*words)
    two, said = of_two(*words, f"--grid.{axis}", "2")
    assert two == one
    assert one.count("\n") == 3
    assert said.count("60 tokens in") == 1


@pytest.mark.slow
def test_two_processes_calibrate_as_one(model, prepared, of_one):
    words = ["loki", model, "--data", prepared, "--tokens", "2000", "--seq-len", "32", "--json"]
    one = of_one(*words)
    assert of_two(*words, "--grid.y", "2")[0] == one
    words = ["generate", model, "--prompt", "import ", "--tokens", "20", "--temperature", "0"]
    full = of_one(*words)
    loki = ["--attention", "loki", "--loki.features", "1", "--loki.keys", "1"]
    assert of_two(*words, *loki, "--grid.y", "2")[0] == full


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
