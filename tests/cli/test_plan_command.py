"""`axonn-jax plan`: its JSON, its picture, and one clear line for nonsense."""

import json
from types import SimpleNamespace
from typing import get_args

import pytest
from commands import PLAN, SIMULATE, output
from hlo.collectives import totals

from axonn_jax.cli.plan.model import sequences
from axonn_jax.core.distributed.gpu_limits import FRACTION
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GRID_AXES, GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.costs import Phase, StepPolicy
from axonn_jax.planning.communication import StepSpec, predict
from axonn_jax.planning.machines.machine_file import load_machine, machine_names
from axonn_jax.run.validate import check


def test_plan_as_json(capsys):
    found = json.loads(output(capsys, [*PLAN, "--json", "--top", "3"]))
    assert {"model", "machine", "devices", "configs", "rejected"} <= set(found)
    assert len(found["configs"]) == 3
    assert [one["step_s"] for one in found["configs"]] == sorted(one["step_s"] for one in found["configs"])
    for one in found["configs"]:
        assert one["pipe"] * one["data"] * one["z"] * one["y"] * one["x"] == 16
        assert one["microbatch"] * one["microbatches"] * one["data"] * one["z"] == 128
        assert set(one["comm_s"]) == {"x", "y", "z", "expert", "data", "pipe"}
        assert 0 < one["mfu"] < 1
        assert one["memory_bytes"] < found["memory_limit_bytes"]
        assert one["exposed_comm_s"] == pytest.approx(sum(one["exposed_by_axis_s"].values()))
        assert one["exposed_comm_s"] <= sum(one["comm_s"].values()) * (1 + 1e-9)
        assert 0 <= one["bubble"] < 1
        assert one["command"].startswith("mpirun -n 16 axonn-jax train CONFIG.toml --model.preset gpt-5b")


TIGHT = [("llama3-8b", "dgx-h100", 4), ("gpt-20b", "dgx-h100", 8), ("llama3-8b", "perlmutter-80gb", 8)]
"""Their best once took 79.5, 81.5 and 81.3 of 85.9 GB, of which a run gets 79.0 at most."""


@pytest.mark.parametrize(
    ("model", "machine", "devices"),
    [*TIGHT, *(("gpt2" if name == "laptop" else "gpt-5b", name, 8) for name in machine_names())],
)
def test_a_plan_fits_what_its_command_gets_even_where_prediction_is_at_its_worst(capsys, model, machine, devices):
    argv = ["plan", "--model", model, "--machine", machine, "--devices", str(devices), "--batch-tokens", "1048576"]
    found, device = json.loads(output(capsys, [*argv, "--json"])), load_machine(machine).device
    got = device.memory_bytes * (1.0 if machine == "laptop" else FRACTION)
    assert found["memory_limit_bytes"] <= 0.9 * got
    for one in found["configs"]:
        assert one["memory_bytes"] / (1 - 0.17) <= got  # docs/results.md: 17 % too little


def sent_in(rows):
    return totals(SimpleNamespace(kind=one["kind"], over=one["axes"], bytes=one["bytes"]) for one in rows)


def test_explain_lists_the_collectives_of_the_first(capsys):
    argv = [*PLAN, "--grid.z", "2", "--grid.y", "2", "--grid.x", "2", "--memory.zero", "1", "--explain"]
    found = json.loads(output(capsys, [*argv, "--json", "--top", "1"]))
    (best,) = found["configs"]
    grid = GridShape(**{axis: best[axis] for axis in GRID_AXES})
    policy = StepPolicy(best["microbatches"], best["activations"], best["reshard_after"])
    work = StepSpec(preset("gpt-5b"), grid, found["batch_sequences"], policy, 2)
    assert sent_in(found["collectives"]) == totals(predict(work))
    phases = [one["phase"] for one in found["collectives"]]
    assert phases == sorted(phases, key=get_args(Phase).index)
    text = output(capsys, argv)
    assert f"{float(sum(one.bytes for one in predict(work))) / 1e6:,.3f}" in text
    assert "ZeRO-1 makes a reduce-scatter and an all-gather" in text


def test_stages_of_a_pipeline_communicate_for_every_microbatch_as_scanned_layers_do(capsys):
    argv = [*PLAN, "--grid.pipe", "2", "--grid.z", "4", "--grid.x", "2", "--explain"]
    found = json.loads(output(capsys, [*argv, "--json", "--top", "1"]))
    (best,) = found["configs"]
    policy = StepPolicy(best["microbatches"], best["activations"], scanned=True)
    work = StepSpec(preset("gpt-5b"), GridShape(z=4, x=2), found["batch_sequences"], policy, 2)
    blocks = [one for one in predict(work) if one.name.startswith("blocks")]
    assert sent_in(one for one in found["collectives"] if one["layer"].startswith("blocks")) == totals(blocks)
    assert "on all 2 stages together" in output(capsys, argv)


def test_plan_says_what_the_memory_limit_is_made_of(capsys):
    assert "31.7 GB a device (83% of the 38.1 that a run gets of 42.9)" in output(capsys, PLAN)


@pytest.mark.parametrize(
    ("model", "machine", "precision", "why"),
    [
        (
            "llama3-8b",
            "dgx-h100",
            "fp32",
            ["Attention is blocked (not cudnn: it needs bf16 or fp16, this is float32)."],
        ),
        ("llama3-8b", "dgx-h100", "bf16", []),
        ("llama3-8b", "frontier", "bf16", ["Attention is blocked (not cudnn: it needs an NVIDIA GPU)."]),
    ],
)
def test_plan_says_why_attention_is_not_fused(capsys, model, machine, precision, why):
    argv = ["plan", "--model", model, "--machine", machine, "--devices", "8", "--batch-tokens", "65536"]
    found = json.loads(output(capsys, [*argv, "--memory.precision", precision, "--grid.z", "8", "--json"]))
    assert [said for said in found["configs"][0]["why"] if said.startswith("Attention")] == why


def test_plan_as_text_says_what_to_run_and_what_does_not_fit(capsys):
    out = output(capsys, [*PLAN, "--memory-limit", "20GB"])
    assert "20.0 GB are there" in out
    assert "Why the first:" in out
    assert "mpirun -n 16 axonn-jax train CONFIG.toml" in out


@pytest.mark.parametrize(("model", "raised"), [("gpt-10b", False), ("gpt-13b", True)])
def test_plan_says_what_a_process_keeps_on_the_host_and_that_xlas_limit_is_raised(capsys, model, raised):
    asked = ["plan", "--model", model, "--machine", "dgx-h100", "--devices", "2", "--batch-tokens", "131072"]
    out = output(capsys, [*asked, "--memory.offload", "optimizer"])
    assert "GB on the host for each device, one a process" in out
    assert ("the run raises XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB" in out) is raised


@pytest.mark.parametrize(
    "chosen",
    [
        ["--memory.offload", "none", "--memory.zero", "0", "--memory.activations", "full"],
        ["--memory.offload", "optimizer", "--memory.zero", "0", "--memory.activations", "none"],
        ["--memory.offload", "none", "--memory.zero", "1", "--grid.data", "4", "--memory.precision", "fp16"],
        ["--memory.activations", "offload", "--grid.pipe", "4", "--pipeline.virtual_stages", "2"],
        ["--memory.activations", "full", "--grid.z", "8", "--memory.reshard_after", "step"],
    ],
)
def test_the_command_is_one_that_train_accepts(capsys, prepared, chosen):
    from axonn_jax.run.config_file import loads, split_argv

    argv = [*PLAN[:-1], "2048", "--model.seq_len", "16", "--json", *chosen]
    found = json.loads(output(capsys, argv))["configs"][0]
    words = found["command"].split()
    rest, flags = split_argv(words[words.index("CONFIG.toml") + 1 :])
    config = check(loads(f"[data]\npath = '{prepared}'", flags))
    assert rest == []
    assert config.grid.devices == 16
    assert config.train.global_batch == 128
    assert config.memory.activations == found["activations"]
    asked = dict(zip(chosen[::2], chosen[1::2], strict=True))
    assert config.memory.offload == asked.get("--memory.offload", config.memory.offload)
    assert str(config.memory.zero) == asked.get("--memory.zero", str(config.memory.zero))


def test_pictures(capsys, tmp_path):
    output(capsys, [*PLAN, "--png", str(tmp_path / "plan.png")])
    argv = [*SIMULATE, "--grid.pipe", "4", "--jitter", "0.2", "--png", str(tmp_path / "line.png")]
    output(capsys, argv)
    for name in ("plan.png", "line.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "seq", "expected"),
    [
        ("16777216", 2048, 8192),
        ("16.8M", 2048, 8192),
        ("4Mi", 2048, 2048),
        ("8_388_608", 512, 16384),
        ("1M", 1024, 1024),
        ("512K", 2048, 256),
        ("500K", 2048, 244),
    ],
)
def test_amounts_of_tokens(text, seq, expected):
    assert sequences(text, seq) == expected


def test_rounded_amounts_stay_within_their_rounding():
    for text, tokens, slack in (("16.8M", 16.8e6, 0.05e6), ("3.1M", 3.1e6, 0.05e6), ("700k", 7e5, 5e2)):
        assert abs(sequences(text, 128) * 128 - tokens) <= slack


@pytest.mark.parametrize("text", ["0", "lots", "-5", "1.5", "16.8G", "100", ""])
def test_amounts_that_mean_nothing(text):
    with pytest.raises(UserError, match="--batch-tokens"):
        sequences(text, 2048)


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (["--machine", "perlmuter"], ["--machine = 'perlmuter'", "did you mean 'perlmutter'?"]),
        (["--machine", "nowhere.toml"], ["--machine = 'nowhere.toml'", "can be read"]),
        (["--batch", "8"], ["--batch", "did you mean '--batch-tokens'?"]),
        (["--model", "gpt-5"], ["--model = 'gpt-5'", "did you mean 'gpt-5b'?"]),
        (["--devices", "0"], ["--devices = 0: an integer of at least 1"]),
        (["--devices", "many"], ["--devices", "an integer"]),
        (
            ["--batch-tokens", "1000"],
            ["--batch-tokens = '1000': a multiple of the sequence length, 2048; nearest: 2048"],
        ),
        (
            ["--batch-tokens", "2048", "--grid.data", "16"],
            ["--grid.data = 16: 1, which 16 devices", "a batch of 1 sequence "],
        ),
        (["--grid.pipe", "0"], ["--grid.pipe = 0: an integer of at least 1"]),
        (["--grid.x", "3"], ["--grid.x = 3: one of 1, 2, 4, 8, 16, which 16 devices, the model"]),
        (["--memory-limit", "-5GB"], ["--memory-limit = '-5GB'"]),
        (["--memory-limit", "43GB"], ["--memory-limit = '43GB': at most 42.95GB, the memory of A100 40 GB"]),
        (["--memory-limit", "1MB"], ["--memory-limit = '0.001GB': an amount that fits; pipe", "GB a device"]),
        (["--overlap", "gather"], ["--overlap = 'gather'", "did you mean 'gathers'?"]),
        (["--memory.sequence_parallel", "maybe"], ["--memory.sequence_parallel = 'maybe': true or false"]),
        (["--data.path", "/nope"], ["data.path = '/nope': no such directory"]),
        (["--data.mix", "/nope=1"], ["data.path = '/nope': no such directory"]),
        (["--memory.precision", "fp8"], ["--memory.precision", "fp8"]),
        (["--model.seq_len", "-1"], ["model.seq_len = -1"]),
        (["--top", "0"], ["--top = 0"]),
        (["--polcy", "message"], ["--polcy", "did you mean '--pipeline.policy'?"]),
        (
            ["--machine", "laptop", "--memory.precision", "bf16"],
            ["--memory.precision = 'bf16': one that a CPU core has: fp32"],
        ),
        (
            ["--memory.reshard_after", "step", "--grid.pipe", "4"],
            ["--memory.reshard_after = 'step'", "auto or forward"],
        ),
    ],
)
def test_nonsense_is_one_line(refused, change, parts):
    argv = list(PLAN)
    for flag, value in zip(change[::2], change[1::2], strict=True):
        if flag in argv:
            argv[argv.index(flag) + 1] = value
        else:
            argv += [flag, value]
    refused(argv, *parts)


def test_a_picture_costs_no_further_search_of_all_grids(capsys, tmp_path, monkeypatch):
    from axonn_jax.planning import search

    searches = []
    legal_grids = search.legal_grids
    monkeypatch.setattr(search, "legal_grids", lambda *args: searches.append(args) or legal_grids(*args))
    output(capsys, [*PLAN, "--png", str(tmp_path / "plan.png")])
    assert [space.grids is None for _, _, space, _ in searches] == [True] + [False] * (len(searches) - 1)


def test_the_picture_has_the_tables_order_and_one_batch_on_all_numbers_of_devices(capsys, tmp_path, monkeypatch):
    from axonn_jax.planning import picture

    axes, drawn = [], picture._draw_panels
    monkeypatch.setattr(picture, "_draw_panels", lambda panels, *told: axes.append(panels) or drawn(panels, *told))
    argv = ["plan", "--model", "gpt-5b", "--machine", "perlmutter", "--devices", "64", "--png", str(tmp_path / "p.png")]
    table = json.loads(output(capsys, [*argv, "--json"]))["configs"]
    ((times, _), (_, scaling)) = axes[0]
    names = [label.get_text().splitlines()[0] for label in times.get_yticklabels()]
    shown = [" ".join(f"{axis}{one[axis]}" for axis in GRID_AXES if one[axis] > 1) for one in table]
    assert names[: len(shown)] == shown
    devices, seconds = scaling.get_lines()[0].get_data()
    assert [count * second for count, second in zip(devices, seconds, strict=True)] == pytest.approx(
        [devices[0] * seconds[0]] * len(devices), rel=0.3
    )


def test_residual_comm_are_priced_and_in_the_command(capsys):
    grids = ["--grid.x", "16", "--memory.activations", "full", "--json"]
    found = {}
    for wanted in ("all_reduce", "auto"):
        found[wanted] = json.loads(output(capsys, [*PLAN, *grids, "--tensor.residual_comm", wanted]))
    papers, auto = (found[wanted]["configs"][0] for wanted in ("all_reduce", "auto"))
    assert auto["step_s"] < papers["step_s"]
    assert auto["command"].endswith("--tensor.residual_comm auto")
    assert "residual_comm" not in papers["command"]


def test_residual_comm_that_cannot_be(refused):
    refused(
        [*PLAN, "--tensor.residual_comm", "gather", "--memory.sequence_parallel"],
        "--tensor.residual_comm = 'gather': all_reduce or auto with",
    )
