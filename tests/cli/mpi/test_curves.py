"""Runs of several processes under mpirun give the curve of one process and one stage; what else such a run leaves."""

import json
import math
from importlib.util import find_spec

import numpy as np
import pytest
from launched import UNDER_MPIRUN, curves, errors
from mpi_runs import EVERY_CASE, MODELS, SLOW_CASES, start_of, words

from axonn_jax.cli.main import main
from axonn_jax.pipe.timeline.spans import last_complete_step
from axonn_jax.pipe.timeline.trace import read_trace

pytestmark = UNDER_MPIRUN

# fp32, sums in another order: as between grids of one process, see test_pipelined.py. Of fp16 roundings
# (5e-4) of gradients.
TOLERANCE, NORM_TOLERANCE, FP16_TOLERANCE = 2e-6, 1e-5, 3e-3
FALLS = {"gpt": 0.3, "llama": 0.3, "dropout": 0.3, "wide": 0.5}
EXAMPLES = ("experts", "pruned")
PIPELINES = ["pipe 4 1f1b", "two processes a stage"]


def slow_where(names):
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_CASES)) for name in names]


# The first case of a start waits for all of them: up to four runs in up to four processes.
COMPARED = [name for name in EVERY_CASE if EVERY_CASE[name][1] != "early bird"]


@pytest.mark.parametrize("name", slow_where(COMPARED))
def test_the_curve_is_that_of_one_process_and_one_stage(name, run_of, one_process):
    ranks, model, options = EVERY_CASE[name]
    if options.get("pipeline_channel") == "mpi4jax" and find_spec("mpi4jax") is None:
        pytest.skip("no mpi4jax; scripts/setup builds it where it finds an MPI")
    run, err = run_of(name)
    losses, norms, held_out = curves(run)
    want = curves(one_process(model))
    if options.get("memory_precision") == "fp16":
        np.testing.assert_allclose(losses, want[0], rtol=FP16_TOLERANCE)
    else:
        np.testing.assert_allclose(losses, want[0], rtol=TOLERANCE)
        np.testing.assert_allclose(norms, want[1], rtol=TOLERANCE if model in EXAMPLES else NORM_TOLERANCE)
        np.testing.assert_allclose(held_out, want[2], rtol=TOLERANCE)
    assert losses[-1] < losses[0] - FALLS.get(model, 0.0)
    steps = len(losses)
    assert steps == MODELS[model][1].get("train_steps", 20)
    assert f"{ranks} processes on 1 host, by MPI" in err
    assert ("grid_pipe" in options) == (f"channel {options.get('pipeline_channel', 'mpi4py')}" in err)
    assert err.count(f"step {steps}/{steps}") == 1  # only rank 0 speaks
    assert not errors(err)


@pytest.mark.parametrize("name", slow_where({start_of(name): name for name in EVERY_CASE}.values()))
def test_its_processes_end_well(name, run_of):
    assert run_of.status(name) == 0


def records(run, key):
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if key in record]


@pytest.mark.parametrize("name", ["experts"])
def test_experts_get_the_tokens_that_they_get_in_one_process(name, run_of, one_process):
    loads = [records(run, "largest_load") for run in (run_of(name)[0], one_process(name))]
    assert len(loads[0]) == 6
    np.testing.assert_allclose(*loads, rtol=TOLERANCE)


@pytest.mark.parametrize("name", ["early bird, data, goes on"])
def test_an_early_bird_over_processes_goes_on(name, run_of):
    assert "step 5: pruned 8 kernels to 0.1" in run_of("early bird, data")[1]
    run, said = run_of(name)
    assert "resumed at step 6" in said
    assert "entries of 8 kernels are trained" in said
    assert len(curves(run)[0]) == 8


@pytest.mark.parametrize("name", slow_where([n for n in EVERY_CASE if "offload" in n or "all" in n]))
def test_a_move_between_host_and_devices_is_no_program_among_the_others(name, run_of):
    _, err = run_of(name)
    assert "Compiling jit(" in err
    assert "device_put" not in err


@pytest.mark.parametrize("name", PIPELINES)
def test_the_run_directory_is_complete(name, run_of):
    run, _ = run_of(name)
    names = {path.name for path in run.iterdir()}
    wanted = {"config.toml", "metrics.jsonl", "loss.png", "timeline.json", "timeline.png", "tokenizer.json"}
    wanted |= {"tokenizer_config.json"}
    assert names >= {*wanted, "checkpoints"}
    pipe = EVERY_CASE[name][2]["grid_pipe"]
    spans = read_trace(run / "timeline.json")
    assert {span.rank for span in spans} == set(range(pipe))
    step = last_complete_step(spans)
    tasks = [span.name for span in spans if span.step == step and span.kind != "optimizer"]
    kinds = {f"{place}.{m}": "" for place in range(pipe) for m in range(4)}
    for name in sorted(tasks):
        kinds[name.lstrip("FBIW")] += "".join(sorted(name.rstrip(".0123456789")))
    assert set(kinds.values()) <= {"FIW", "BF"}
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step_00000020"]
    parts = {path.name for path in (run / "checkpoints" / "step_00000020").iterdir()}
    assert parts == {"manifest.json", *(f"part_{stage:03d}" for stage in range(pipe))}


@pytest.mark.parametrize("name", ["z"])
def test_the_run_directory_of_a_mesh_is_complete(name, run_of):
    run, _ = run_of(name)
    assert {path.name for path in run.iterdir()} >= {"config.toml", "metrics.jsonl", "loss.png", "checkpoints"}


@pytest.mark.parametrize("name", PIPELINES)
def test_generate_reads_the_checkpoint_of_a_pipeline(name, run_of, one_process, capsys):
    # The weights are those of the one-stage run up to rounding, and so is the likeliest continuation.
    texts = []
    for directory in (run_of(name)[0], one_process("gpt")):
        capsys.readouterr()
        assert main(["generate", str(directory), "--prompt", "import", "--tokens", "8", "--temperature", "0",
                     "--json"]) == 0  # fmt: skip
        texts.append(json.loads(capsys.readouterr().out)["text"])
    assert texts[0] == texts[1]
    assert texts[0]


@pytest.mark.slow
def test_the_tolerance_would_notice_another_learning_rate(prepared, one_process, tmp_path):
    run = tmp_path / "run"
    assert main(["train", *words("gpt", tmp_path, prepared, run, train_lr=3.001e-3)]) == 0
    losses, want = curves(run)[0], curves(one_process("gpt"))[0]
    assert not math.isclose(losses[-1], want[-1], rel_tol=TOLERANCE)
