"""`plan` and `simulate` asked the same: one choice, the same seconds, on fifty jobs."""

import pytest
from commands import answer

from axonn_jax.cli.main import main

MACHINES = {
    "alps": ("llama3-8b", 16, 2, 1, 4),
    "dgx-h100": ("gpt-5b", 16, 4, 1, 4),
    "frontier": ("gpt-1.3b", 16, 1, 2, 8),
    "perlmutter": ("gpt-1.3b", 16, 2, 2, 4),
    "summit": ("gpt2-large", 24, 2, 1, 6),
}
"""By machine a model, devices, sizes of y and x that go with other axes, and stages of a longer pipeline."""


def fixed(pipe, data, z, y, x):
    sizes = {"pipe": pipe, "data": data, "z": z, "y": y, "x": x}
    return [word for axis, size in sizes.items() for word in (f"--grid.{axis}", str(size))]


def jobs():
    for machine, (model, devices, y, x, long) in MACHINES.items():
        rest = devices // (y * x)
        common = ["--model", model, "--machine", machine, "--devices", str(devices), "--model.seq_len", "1024"]
        common += ["--batch-tokens", str(1024 * 8 * devices)]
        flat, sharded = fixed(1, rest, 1, y, x), fixed(1, devices // 8, 8, 1, 1)
        two, more = fixed(2, rest // 2, 1, y, x), fixed(long, devices // long, 1, 1, 1)
        fast = ["--memory.reshard_after", "backward", "--memory.activations", "save_collectives"]
        of_two = ["--pipeline.virtual_stages", "2", "--pipeline.policy", "interleaved"]
        of_one = ["--pipeline.virtual_stages", "1", "--pipeline.policy", "zero-bubble"]
        for flags in (
            [*flat, "--memory.zero", "1"],
            [*flat, "--memory.offload", "optimizer", "--memory.activations", "full"],
            [*sharded, "--memory.reshard_after", "step", "--memory.activations", "full", "--microbatch", "1"],
            [*sharded, *fast, "--microbatch", "2"],
            [*sharded, "--memory.activations", "offload", "--microbatch", "2"],
            [*two, "--pipeline.virtual_stages", "1", "--memory.offload", "optimizer", "--memory.activations", "full"],
            [*two, "--pipeline.virtual_stages", "2", "--memory.activations", "save_collectives", "--microbatch", "1"],
            [*more, "--pipeline.virtual_stages", "1", "--memory.zero", "1", "--memory.offload", "optimizer"],
            [*more, *of_two, "--memory.zero", "1", "--memory.offload", "optimizer"],
            [*more, *of_one, "--memory.zero", "0", "--memory.offload", "optimizer"],
        ):
            yield [*common, *flags]


def asked(capsys, command, flags):
    return answer(capsys, command, *flags)


def test_the_same_flags_give_the_same_choice_and_seconds(capsys):
    compared = 0
    for flags in jobs():
        plan, step = asked(capsys, "plan", flags)["configs"][0], asked(capsys, "simulate", flags)
        assert step["fits"], flags
        counts = ("microbatch", "microbatches", "virtual_stages", "in_flight")
        for name in (*counts, "activations", "reshard_after", "offload"):
            assert step[name] == plan[name], flags
        assert step["zero"] == plan["zero"]
        assert step["grid"] == {axis: plan[axis] for axis in step["grid"]}
        assert step["memory_bytes"] == plan["memory_bytes"]
        assert step["command"] == plan["command"]
        assert step["step_s"] == pytest.approx(plan["step_s"], rel=1e-9), flags
        compared += 1
    assert compared == 50


def test_what_is_searched_is_the_same(capsys):
    flags = ["--model", "gpt-5b", "--machine", "perlmutter", "--devices", "8", "--batch-tokens", "65536"]
    plan, step = asked(capsys, "plan", flags)["configs"][0], asked(capsys, "simulate", flags)
    assert step["grid"] == {axis: plan[axis] for axis in step["grid"]}
    assert step["step_s"] == pytest.approx(plan["step_s"], rel=1e-9)
    assert step["command"] == plan["command"]


def test_a_pipeline_of_one_stage_takes_what_the_plan_says_also_where_nothing_fits(capsys):
    flags = ["--model", "gpt-80b", "--machine", "perlmutter", "--devices", "2", "--batch-tokens", "65536"]
    main(["simulate", *flags, "--grid.pipe", "1"])
    out = capsys.readouterr().out
    assert "does NOT fit" in out
    assert "and no other configuration does" in out
    assert "To run it" not in out
