"""`axonn-jax simulate`: its JSON, disturbed steps, what runs beside it, and one clear line for nonsense."""

import json

import pytest
from commands import SIMULATE, output

from axonn_jax.cli.arguments import parse
from axonn_jax.cli.simulate import Simulate


def test_simulate_as_json(capsys):
    argv = [*SIMULATE, "--grid.pipe", "4", "--grid.data", "4", "--pipeline.virtual_stages", "1"]
    argv += ["--baselines", "--json"]
    found = json.loads(output(capsys, argv))
    assert found["grid"] == {"pipe": 4, "data": 4, "expert": 1, "z": 1, "y": 1, "x": 1}
    assert found["finished"] is True
    assert found["step_s"] == pytest.approx(found["pipeline_s"] + found["update_s"])
    assert found["pipeline_s"] >= found["no_bubble_s"] == max(rank["busy_s"] for rank in found["ranks"])
    assert {"gpipe", "1f1b (Megatron-LM)", "zero-bubble", "1-D tensor parallelism"} == set(found["baselines_s"])
    assert found["step_s"] <= found["baselines_s"]["1f1b (Megatron-LM)"]
    assert 0 < found["idle"] < 1
    assert "bubble" not in found  # which in a plan is the wait of one stage


def test_simulate_a_failure(capsys):
    out = output(capsys, [*SIMULATE, "--grid.pipe", "4", "--fail", "2:0.5"], status=1)
    assert "The step does not end" in out


def test_simulate_slow_rank_and_jitter(capsys):
    argv = [*SIMULATE, "--grid.pipe", "4", "--grid.data", "4", "--memory.activations", "full", "--microbatch", "1"]
    argv.append("--json")
    calm = json.loads(output(capsys, argv))
    rough = json.loads(output(capsys, [*argv, "--jitter", "0.3", "--slow", "1:1.5"]))
    assert rough["step_s"] > 1.3 * calm["step_s"]
    assert len(rough["replicas_s"]) == 4
    assert max(rough["replicas_s"]) == rough["pipeline_s"]


@pytest.mark.parametrize(
    ("change", "part"),
    [
        (["--slow", "fast"], "--slow = 'fast': RANK:AMOUNT"),
        (["--slow", "99:2"], "--slow = 99: a rank of the pipeline"),
        (["--jitter", "-1"], "--jitter = -1.0"),
        (["--replicas", "0"], "--replicas = 0"),
        (["--grid.pipe", "1024"], "--grid.pipe = 1024: one of 1, 2, 4, 8, 16"),
    ],
)
def test_nonsense_for_simulate_is_one_line(refused, change, part):
    refused([*SIMULATE, *change], part)


BESIDE = [*SIMULATE, "--grid.pipe", "4", "--grid.data", "4", "--microbatch", "2", "--memory.activations", "none"]


def test_baselines_have_the_same_memory(capsys):
    static = [*BESIDE, "--pipeline.virtual_stages", "1", "--memory-limit", "32GB", "--baselines"]
    found = json.loads(output(capsys, [*static, "--json"]))
    assert found["memory_limit_bytes"] == 32e9
    for name, need in found["baselines_memory_bytes"].items():
        assert (found["baselines_s"][name] is not None) == (need is not None and need <= 32e9)
    assert found["baselines_memory_bytes"]["gpipe"] > 2 * found["memory_bytes"]
    (line,) = [line for line in output(capsys, static).splitlines() if line.startswith("gpipe")]
    assert line.endswith(f"does not fit: needs {found['baselines_memory_bytes']['gpipe'] / 1e9:,.0f} GB a device")


@pytest.mark.parametrize("policy", ["interleaved", "zero-bubble"])
def test_a_baseline_is_once_itself_also_where_the_slowest_of_replicas_counts(capsys, policy):
    steady = ["--memory.offload", "optimizer", "--pipeline.policy", policy, "--pipeline.virtual_stages", "2"]
    rough = ["--jitter", "0.2", "--slow", "1:1.2", *steady]
    found = json.loads(output(capsys, [*BESIDE, *rough, "--baselines", "--json"]))
    assert len(found["replicas_s"]) == 4
    assert found["baselines_s"][policy] == found["step_s"]
    calm = json.loads(output(capsys, [*BESIDE, *steady, "--baselines", "--json"]))
    assert calm["baselines_s"]["1-D tensor parallelism"] < found["baselines_s"]["1-D tensor parallelism"]


def test_where_nothing_fits_the_baselines_have_no_limit_either(capsys):
    argv = [*SIMULATE, "--model", "gpt-80b", "--grid.pipe", "4", "--microbatch", "2", "--memory.activations", "none"]
    argv += ["--memory.offload", "none", "--baselines"]
    found = json.loads(output(capsys, [*argv, "--json"]))
    assert found["fits"] is False
    assert found["memory_bytes"] > found["memory_limit_bytes"]
    assert None not in found["baselines_s"].values()
    assert "does NOT fit" in output(capsys, argv)


def test_every_option_of_the_row_is_said(capsys):
    options = ["--memory.reshard_after", "step", "--memory.offload", "optimizer", "--memory.zero", "1"]
    options += ["--memory.activations", "full"]
    out = output(capsys, [*SIMULATE, *options, "--model", "gpt-1.3b", "--grid.z", "8", "--grid.data", "2"])
    for said in ("activations full", "reshard_after step", "offload optimizer", "zero 1", "GB a device (fits "):
        assert said in out
    for said in ("--memory.reshard_after step", "--memory.offload optimizer", "--memory.zero 1"):
        assert said in out


def test_the_command_has_what_only_a_simulation_is_asked(capsys):
    argv = [*SIMULATE, "--grid.pipe", "4", "--model.layers", "16", "--pipeline.split_backward", "false", "--json"]
    words = json.loads(output(capsys, argv))["command"].split()
    assert words[words.index("--model.layers") + 1] == "16"
    assert words[words.index("--pipeline.split_backward") + 1] == "false"


def test_the_batch_where_none_is_given_is_what_help_says(capsys):
    found = json.loads(output(capsys, [*SIMULATE[:-2], "--grid.pipe", "4", "--json"]))
    assert found["batch_sequences"] == 8 * 16
    with pytest.raises(SystemExit):
        parse(Simulate, ["--help"], "simulate")
    assert "8 sequences a device" in capsys.readouterr().out


def test_one_is_not_said_as_many(capsys):
    argv = [*SIMULATE[:-1], "32768", "--grid.z", "16", "--microbatch", "1"]
    out = output(capsys, argv)
    assert "1 microbatch of 1 sequence a device, 1 virtual stage," in out
    assert "after the last microbatch" in out
    assert "after the pipeline" not in out
