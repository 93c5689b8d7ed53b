"""Flags for which there is no grid: the message names the flag that is wrong, and what it may be."""

import pytest
from commands import PLAN, answer

WRONG = [
    (["--microbatch", "3"], "--microbatch = 3: one of 1, 2, 4, 8, 16, 32, 64, 128, which 16 devices, the model"),
    (["--grid.y", "6"], "--grid.y = 6: one of 1, 2, 4, 8, 16, which 16 devices"),
    (["--grid.data", "32"], "--grid.data = 32: one of 1, 2, 4, 8, 16, which"),
    (["--grid.pipe", "8", "--grid.data", "4"], "--grid.pipe = 8: one of 1, 2, 4, which"),
    (["--grid.data", "2", "--microbatch", "128"], "--grid.data = 2: 1, which"),
    (["--grid.pipe", "1", "--virtual-stages", "2"], "--virtual-stages = 2: 1 without a pipeline"),
    (["--grid.z", "16", "--virtual-stages", "2"], "--virtual-stages = 2: 1 without a pipeline"),
    (["--virtual-stages", "30"], "--virtual-stages = 30: such as "),
    (["--policy", "1f1b", "--virtual-stages", "2"], "--virtual-stages = 2: 1 with --policy 1f1b"),
    (["--reshard-after", "backward", "--virtual-stages", "2"], "--reshard-after = 'backward': auto or forward"),
    (["--grid.tp", "2"], "--grid.tp = '2': not a flag of axonn-jax plan; did you mean '--grid.y'?"),
    (["--grid.foo", "2"], "which has --grid.pipe, --grid.data, --grid.expert, --grid.z, --grid.y, --grid.x\n"),
    (["--grid.x", "2", "--grid.y", "16", "--grid.z", "16"], "--grid.z, --grid.y, --grid.x = '16, 16, 2': values"),
]


@pytest.mark.parametrize(
    ("command", "flags", "part"),
    [*(("plan", *one) for one in WRONG), *(("simulate", *one) for one in WRONG[:2])],
)
def test_the_wrong_flag_is_named(refused, command, flags, part):
    refused([command, *PLAN[1:], *flags], part)


def test_devices_are_named_where_nothing_else_is_given(refused):
    refused([*PLAN[:-3], "7", *PLAN[-2:-1], "2048"], "--devices = 7: a number for which a grid is legal;")


def test_virtual_stages_mean_a_pipeline(capsys):
    found = answer(capsys, *PLAN, "--virtual-stages", "2")
    assert {one["virtual_stages"] for one in found["configs"]} == {2}
    assert all(one["pipe"] > 1 for one in found["configs"])
    assert any("no pipeline for virtual stages" in one["why"] for one in found["rejected"])


def test_one_grid_is_not_said_as_many(capsys):
    few = ["plan", "--model", "gpt-1.3b", "--machine", "perlmutter", "--devices", "2", "--batch-tokens", "2048"]
    counts = [one["grid"] for one in answer(capsys, *few, "--grid.data", "1", "--offload", "optimizer")["rejected"]]
    assert "1 grid" in counts
    assert "1 grids" not in counts
