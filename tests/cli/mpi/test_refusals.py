"""What only several processes together can find wrong: status 2, one line of one process, no run directory."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path

import pretrained
import pytest
from launched import UNDER_MPIRUN, command, errors, finished, flags, mpirun, write_config

pytestmark = UNDER_MPIRUN
slow = pytest.mark.slow
ON_ONE_CORE = pytest.mark.skipif(
    find_spec("mpi4jax") is None or shutil.which("taskset") is None, reason="no mpi4jax, or no taskset"
)
QWEN = pretrained.CONFIGS["qwen3"] | {"num_attention_heads": 4, "vocab_size": 515}


@pytest.fixture
def plain(prepared, tmp_path):
    return write_config(tmp_path / "plain.toml", prepared, 2)


def refused(words, run):
    done = finished(words, timeout=120)
    assert done.returncode == 2, done.stderr[-3000:]
    (line,) = errors(done.stderr)
    assert "compiling" not in done.stderr
    assert "Traceback" not in done.stderr
    assert not run.exists()
    return line


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"train_lr": 0.5}, "rank 1's train.lr = '0.5': the same on every rank; rank 0 has '0.003'"),
        pytest.param({"grid_x": 2}, "rank 1's grid = ", marks=slow),
        pytest.param({"model_seq_len": 16}, "rank 1's model.seq_len = '16': the same on every rank; rank 0 has '32'",
                     marks=slow),
    ],
    ids=["lr", "grid", "seq_len"],
)  # fmt: skip
def test_ranks_of_different_settings_are_refused_before_anything_compiles(other, said, plain, tmp_path):
    run = tmp_path / "run"
    one = command(plain, run, grid_pipe=2)
    line = refused(mpirun(1, *one, ":", "-n", "1", *one, *flags(other)), run)
    assert said in line


def test_a_run_directory_that_the_processes_do_not_share_is_refused(plain, tmp_path):
    hosts = [tmp_path / "a", tmp_path / "b"]
    for host in hosts:
        host.mkdir()
    one = command(plain, "out", grid_data=2)
    apart = ["--wdir", hosts[0], *one, ":", "-n", "1", "--wdir", hosts[1], *one]
    line = refused(mpirun(1, *apart), hosts[0] / "out")
    assert "log.dir = 'out': a directory shared by all processes; rank 1 does not see" in line
    assert not (hosts[1] / "out").exists()


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (3, {"grid_pipe": 2}, "grid.pipe = 2: a divisor of the 3 processes"),
        pytest.param(2, {"grid_pipe": 4}, "grid.pipe = 4: a divisor of the 2 processes", marks=slow),
        pytest.param(4, {"grid_pipe": 2}, "stages of a multiple of 2 devices, their number of processes", marks=slow),
        (4, {"grid_pipe": 2, "grid_x": 4}, "which has 2 cpu devices in 2 processes"),
        pytest.param(2, {"grid_pipe": 2, "pipeline_channel": "local"},
                     "pipeline.channel = 'local': mpi4py, mpi4jax or auto", marks=slow),
        (2, {}, "a product that 2 processes divide, such as with grid.data = 2"),
        (2, {"grid_x": 4}, "2 cpu devices in 2 processes"),
    ],
    ids=["three for two", "two for four", "too many", "too few of a stage", "local", "no grid", "too few devices"],
)  # fmt: skip
def test_what_does_not_fit_the_processes_is_one_line(ranks, options, said, plain, tmp_path):
    run = tmp_path / "run"
    line = refused(command(plain, run, ranks, **options), run)
    assert said in line
    assert "grid" in line or "pipeline.channel" in line


def with_mpi4jax_on_one_core(config, run):
    short = {"train_steps": 2, "train_warmup": 0, "train_eval_every": 0}
    core = str(min(os.sched_getaffinity(0)))
    return ["taskset", "-c", core, *command(config, run, 2, grid_pipe=2, pipeline_channel="mpi4jax", **short)]


@ON_ONE_CORE
def test_mpi4jax_trains_where_a_process_has_one_core(plain, tmp_path):
    done = finished(with_mpi4jax_on_one_core(plain, tmp_path / "run"))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "channel mpi4jax" in done.stderr
    assert "trained 2 steps" in done.stderr


@pytest.mark.skipif(find_spec("mpi4jax") is None, reason="no mpi4jax")
def test_mpi4jax_beside_one_thread_on_one_rank_is_refused_before_anything_compiles(plain, tmp_path):
    run = tmp_path / "run"
    one = command(plain, run, grid_pipe=3, model_layers=3, pipeline_channel="mpi4jax")
    line = refused(mpirun(1, *one, ":", "-n", "1", "-x", "NPROC=1", *one, ":", "-n", "1", *one), run)
    assert line.startswith("error: rank 1's pipeline.channel = 'mpi4jax': mpi4py where jax's CPU pool has one thread")
    assert "NPROC=2 in the environment" in line


def test_what_one_rank_alone_finds_missing_it_tells(plain, tmp_path):
    """No process knows of the others yet, and mpirun ends all when one has ended."""
    elsewhere, run = tmp_path / "elsewhere", tmp_path / "run"
    elsewhere.mkdir()
    one = command(plain.name, run, grid_pipe=3)
    here, there = ["-n", "1", "--wdir", tmp_path], ["-n", "1", "--wdir", elsewhere]
    line = refused(mpirun(1, *here[2:], *one, ":", *there, *one, ":", *here, *one), run)
    assert line.startswith("error: rank 1: CONFIG.toml = 'plain.toml': ")


def test_what_all_ranks_find_missing_one_tells(tmp_path):
    refused(command(tmp_path / "none.toml", tmp_path / "run", 3, grid_pipe=3), tmp_path / "run")


def test_what_one_process_finds_in_the_data_ends_all(config, prepared, tmp_path):
    data, run = Path(shutil.copytree(prepared, tmp_path / "data")), tmp_path / "run"
    shard = max(data.glob("train*"))  # one process alone reads it to its end before training begins
    shard.write_bytes(bytes(shard.stat().st_size))
    line = refused(command(config, run, 2, data_path=data, grid_x=2, train_steps=2), run)
    assert f"{shard.name} is corrupt: checksum " in line


def test_a_missing_shard_of_a_pretrained_model_ends_all(config, tmp_path):
    model = pretrained.write_model(tmp_path / "hf", QWEN, pretrained.weights(QWEN), files=3)
    (model / "model-00002-of-00003.safetensors").unlink()
    options = {"checkpoint_weights": model, "train_steps": 2, "grid_x": 2}
    sizes = {"model_hidden": 48, "model_ffn": 40, "model_head_dim": 16, "model_vocab": 515, "model_kv_heads": 2}
    kinds = {"model_positions": "rope", "model_norm": "rmsnorm", "model_mlp": "swiglu", "model_bias": "none"}
    rest = {"model_qk_norm": "true", "model_norm_eps": 1e-5, "model_rope_theta": 1e6}
    run = tmp_path / "run"
    line = refused(command(config, run, 2, **options, **sizes, **kinds, **rest), run)
    assert "model-00002-of-00003.safetensors': a file that is there; it is missing" in line
