"""`mpirun -n N axonn-jax train` over a pipeline gives the curve of one process and one stage; refusals are one line."""

import json
import math
from importlib.util import find_spec

import numpy as np
import pytest
from launched import AXONN, CONFIG, MPIRUN, UNDER_MPIRUN, command, curves, errors, finished, flags

from axonn_jax.timeline.spans import last_whole_step
from axonn_jax.timeline.trace import read_trace

pytestmark = UNDER_MPIRUN

# fp32, sums in another order: as between grids of one process, see tests/train/test_pipelined.py.
TOLERANCE, NORM_TOLERANCE = 2e-6, 1e-5

UNTIED = {"model_tied": "false", "model_norm": "rmsnorm", "model_positions": "rope", "model_mlp": "swiglu"}
MODELS = {"gpt": {"layers": 3}, "llama": {"layers": 4, **UNTIED}, "dropout": {"layers": 2, "model_dropout": 0.1}}
MPI4JAX = {"pipeline_channel": "mpi4jax"}

# Name: ranks, model, options.
CASES = {
    "mpi4py": (2, "gpt", {"grid_pipe": 2, "pipeline_channel": "mpi4py"}),
    "mpi4jax": (2, "gpt", {"grid_pipe": 2, **MPI4JAX}),
    "pipe 4": (4, "gpt", {"grid_pipe": 4}),
    "two processes a stage": (4, "gpt", {"grid_pipe": 2, "grid_x": 2}),
    "virtual stages": (2, "gpt", {"grid_pipe": 2, "pipeline_virtual_stages": 2}),
    "untied zero-bubble": (2, "llama", {"grid_pipe": 2, "pipeline_policy": "zero-bubble"}),
    "1f1b": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "1f1b"}),
}
SLOW_CASES = {
    "gpipe": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "gpipe"}),
    "gpipe mpi4jax": (2, "gpt", {"grid_pipe": 2, "pipeline_policy": "gpipe", **MPI4JAX}),
    "1f1b mpi4jax pipe 4": (4, "gpt", {"grid_pipe": 4, "pipeline_policy": "1f1b", **MPI4JAX}),
    "interleaved": (2, "llama", {"grid_pipe": 2, "pipeline_policy": "interleaved", "pipeline_virtual_stages": 2}),
    "zero-bubble pipe 4": (4, "llama", {"grid_pipe": 4, "pipeline_policy": "zero-bubble"}),
    "message mpi4jax pipe 4": (4, "llama", {"grid_pipe": 4, **MPI4JAX}),
    "virtual stages mpi4jax": (2, "llama", {"grid_pipe": 2, "pipeline_virtual_stages": 2, **MPI4JAX}),
    "pipe 4 in flight 2": (4, "gpt", {"grid_pipe": 4, "pipeline_in_flight": 2}),
    "fused backward": (2, "gpt", {"grid_pipe": 2, "pipeline_split_backward": "false"}),
    "dropout": (2, "dropout", {"grid_pipe": 2}),
    "dropout, two processes a stage": (4, "dropout", {"grid_pipe": 2, "grid_data": 2}),
    "two devices a process": (2, "gpt", {"grid_pipe": 2, "grid_x": 2}),
    "four devices a process": (2, "llama", {"grid_pipe": 2, "grid_z": 2, "grid_y": 2}),
    "two devices a process mpi4jax": (2, "gpt", {"grid_pipe": 2, "grid_data": 2, **MPI4JAX}),
    "data in a stage": (4, "llama", {"grid_pipe": 2, "grid_data": 2}),
    "z in a stage": (4, "llama", {"grid_pipe": 2, "grid_z": 2}),
    "y in a stage, mpi4jax": (4, "gpt", {"grid_pipe": 2, "grid_y": 2, **MPI4JAX}),
    "1f1b in stages of two": (4, "gpt", {"grid_pipe": 2, "grid_x": 2, "pipeline_policy": "1f1b"}),
    "virtual in stages of two": (4, "llama", {"grid_pipe": 2, "grid_x": 2, "pipeline_virtual_stages": 2}),
    "four processes a stage": (8, "gpt", {"grid_pipe": 2, "grid_z": 2, "grid_x": 2}),
    "recomputed": (2, "gpt", {"grid_pipe": 2, "memory_activations": "full"}),
}
EVERY_CASE = {**CASES, **SLOW_CASES}


@pytest.fixture(scope="module")
def run_of(prepared, tmp_path_factory):
    """Runs a case once; returns its directory and what it said."""
    folder, done = tmp_path_factory.mktemp("runs"), {}

    def run(name, model, ranks=1, options=None):
        if name not in done:
            sizes = dict(MODELS[model])
            config = folder / f"{model}.toml"
            config.write_text(CONFIG.format(data=prepared, layers=sizes.pop("layers")))
            directory = folder / name.replace(" ", "_").replace(",", "")
            result = finished(command(config, directory, ranks, **sizes, **(options or {})))
            assert result.returncode == 0, result.stderr[-3000:]
            done[name] = directory, result.stderr
        return done[name]

    return run


def case(run_of, name):
    ranks, model, options = EVERY_CASE[name]
    return run_of(name, model, ranks, options)


@pytest.mark.parametrize("name", [*CASES, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_CASES)])
def test_the_curve_is_that_of_one_process_and_one_stage(name, run_of):
    ranks, model, options = EVERY_CASE[name]
    if options.get("pipeline_channel") == "mpi4jax" and find_spec("mpi4jax") is None:
        pytest.skip("no mpi4jax; scripts/setup builds it where it finds an MPI")
    want = curves(run_of(f"one stage {model}", model)[0])
    run, err = case(run_of, name)
    losses, norms, held_out = curves(run)
    np.testing.assert_allclose(losses, want[0], rtol=TOLERANCE)
    np.testing.assert_allclose(norms, want[1], rtol=NORM_TOLERANCE)
    np.testing.assert_allclose(held_out, want[2], rtol=TOLERANCE)
    assert (len(losses), len(held_out)) == (20, 2)
    assert losses[-1] < losses[0] - 0.3
    assert f"{ranks} processes on 1 host(s), by MPI" in err
    assert f"channel {options.get('pipeline_channel', 'mpi4py')}" in err
    assert err.count("step 20/20") == 1  # only rank 0 speaks
    assert not errors(err)


@pytest.mark.parametrize("name", ["pipe 4", "two processes a stage"])
def test_the_run_directory_is_complete(name, run_of):
    run, _ = case(run_of, name)
    names = {path.name for path in run.iterdir()}
    wanted = {"config.toml", "metrics.jsonl", "loss.png", "timeline.json", "timeline.png", "tokenizer.json"}
    assert names >= {*wanted, "checkpoints"}
    pipe = EVERY_CASE[name][2]["grid_pipe"]
    spans = read_trace(run / "timeline.json")
    assert {span.rank for span in spans} == set(range(pipe))
    step = last_whole_step(spans)
    tasks = [span.name for span in spans if span.step == step and span.kind != "optimizer"]
    kinds = {f"{place}.{m}": "" for place in range(pipe) for m in range(4)}
    for name in sorted(tasks):
        kinds[name.lstrip("FBIW")] += "".join(sorted(name.rstrip(".0123456789")))
    assert set(kinds.values()) <= {"FIW", "BF"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000020"]
    parts = {path.name for path in (run / "checkpoints" / "step_00000020").iterdir()}
    assert parts == {"manifest.json", *(f"part_{stage:03d}" for stage in range(pipe))}


@pytest.mark.parametrize("name", ["pipe 4", "two processes a stage"])
def test_generate_reads_the_checkpoint_of_a_pipeline(name, run_of):
    run, _ = case(run_of, name)
    # The weights are those of the one-stage run up to rounding, and so is the likeliest continuation.
    texts = []
    for directory in (run, run_of("one stage gpt", "gpt")[0]):
        done = finished([*AXONN, "generate", str(directory), "--prompt", "import", "--tokens", "8", "--temperature",
                         "0", "--json"])  # fmt: skip
        assert done.returncode == 0, done.stderr[-3000:]
        texts.append(json.loads(done.stdout)["text"])
    assert texts[0] == texts[1]
    assert texts[0]


def test_a_new_run_sets_aside_what_a_first_one_left(prepared, tmp_path):
    config, folder = tmp_path / "c.toml", tmp_path / "run" / "checkpoints"
    config.write_text(CONFIG.format(data=prepared, layers=2))
    new = {"train_steps": 1, "train_warmup": 0, "checkpoint_resume": "never"}
    for pipe in (4, 2, 2):  # the same step each time, from more stages first
        (folder / "unfinished_step_00000001" / "part_003").mkdir(parents=True)
        done = finished(command(config, tmp_path / "run", pipe, grid_pipe=pipe, **new))
        assert done.returncode == 0, done.stderr[-3000:]
        parts = {path.name for path in (folder / "step_00000001").iterdir()}
        assert parts == {"manifest.json", *(f"part_{stage:03d}" for stage in range(pipe))}
    assert {path.name for path in folder.iterdir()} == {
        "step_00000001", "aside_step_00000001", "aside_step_00000001.2",
    }  # fmt: skip


def refused(words, run):
    done = finished(words, timeout=60)
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
        ({"grid_x": 2}, "rank 1's grid = "),
        ({"model_seq_len": 16}, "rank 1's model.seq_len = '16': the same on every rank; rank 0 has '32'"),
    ],
    ids=["lr", "grid", "seq_len"],
)
def test_ranks_of_different_settings_are_refused_before_anything_compiles(other, said, prepared, tmp_path):
    config, run = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(CONFIG.format(data=prepared, layers=2))
    one = command(config, run, grid_pipe=2)
    line = refused([MPIRUN, "--oversubscribe", "-n", "1", *one, ":", "-n", "1", *one, *flags(other)], run)
    assert said in line


@pytest.mark.parametrize(
    ("ranks", "options", "said"),
    [
        (3, {"grid_pipe": 2}, "grid.pipe = 2: a divisor of the 3 processes"),
        (2, {"grid_pipe": 4}, "grid.pipe = 4: a divisor of the 2 processes"),
        (4, {"grid_pipe": 2}, "stages of a multiple of 2 devices, their number of processes"),
        (4, {"grid_pipe": 2, "grid_x": 4}, "which has 2 cpu device(s) in 2 processes"),
        (2, {"grid_pipe": 2, "pipeline_channel": "local"}, "pipeline.channel = 'local': mpi4py, mpi4jax or auto"),
    ],
    ids=["three for two", "two for four", "too many", "too few devices", "local"],
)
def test_what_does_not_fit_the_processes_is_one_line_and_status_2(ranks, options, said, prepared, tmp_path):
    config, run = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(CONFIG.format(data=prepared, layers=2))
    assert said in refused(command(config, run, ranks, **options), run)


def test_the_tolerance_would_notice_another_learning_rate(prepared, run_of, tmp_path):
    config = tmp_path / "c.toml"
    config.write_text(CONFIG.format(data=prepared, layers=3))
    done = finished(command(config, tmp_path / "run", train_lr=3.001e-3))
    assert done.returncode == 0
    losses, want = curves(tmp_path / "run")[0], curves(run_of("one stage gpt", "gpt")[0])[0]
    assert not math.isclose(losses[-1], want[-1], rel_tol=TOLERANCE)
