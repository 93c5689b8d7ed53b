"""Flags for which there is no grid: the message names the flag that is wrong, and what it may be."""

import re

import pytest
from commands import PLAN, answer
from launched import AXONN, finished, write_config

from axonn_jax.core.errors import UserError
from axonn_jax.run.config_file import read, split_argv
from axonn_jax.run.main import check_room
from axonn_jax.run.validate import check

WRONG = [
    (["--microbatch", "3"], "--microbatch = 3: one of 1, 2, 4, 8, 16, 32, 64, 128, which 16 devices, the model"),
    (["--grid.y", "6"], "--grid.y = 6: one of 1, 2, 4, 8, 16, which 16 devices"),
    (["--grid.data", "32"], "--grid.data = 32: one of 1, 2, 4, 8, 16, which"),
    (["--grid.pipe", "8", "--grid.data", "4"], "--grid.pipe = 8: one of 1, 2, 4, which"),
    (["--grid.data", "2", "--microbatch", "128"], "--grid.data = 2: 1, which"),
    (["--grid.pipe", "1", "--pipeline.virtual_stages", "2"], "--pipeline.virtual_stages = 2: 1 without a pipeline"),
    (["--grid.z", "16", "--pipeline.virtual_stages", "2"], "--pipeline.virtual_stages = 2: 1 without a pipeline"),
    (["--pipeline.virtual_stages", "30"], "--pipeline.virtual_stages = 30: such as "),
    (
        ["--pipeline.policy", "1f1b", "--pipeline.virtual_stages", "2"],
        "--pipeline.virtual_stages = 2: 1 with --pipeline.policy 1f1b",
    ),
    (
        ["--memory.reshard_after", "backward", "--pipeline.virtual_stages", "2"],
        "--memory.reshard_after = 'backward': auto or forward",
    ),
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
    found = answer(capsys, *PLAN, "--pipeline.virtual_stages", "2")
    assert {one["virtual_stages"] for one in found["configs"]} == {2}
    assert all(one["pipe"] > 1 for one in found["configs"])
    assert any("no pipeline for virtual stages" in one["why"] for one in found["rejected"])


def test_one_grid_is_not_said_as_many(capsys):
    few = ["plan", "--model", "gpt-1.3b", "--machine", "perlmutter", "--devices", "2", "--batch-tokens", "2048"]
    counts = [
        one["grid"] for one in answer(capsys, *few, "--grid.data", "1", "--memory.offload", "optimizer")["rejected"]
    ]
    assert "1 grid" in counts
    assert "1 grids" not in counts


def test_virtual_devices_beyond_the_machines_memory_end_in_a_line(tmp_path, prepared):
    large = ["--model.hidden", "4096", "--model.heads", "64", "--train.global_batch", "65536", "--grid.x", "128"]
    config = write_config(tmp_path / "c.toml", prepared)
    done = finished([*AXONN, "train", config, "--log.dir", tmp_path / "run", *large])
    assert done.returncode == 2
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert re.search(
        r"grid = .* x 128: fewer devices: 128 virtual ones take up to [\d,]+ GB of this machine's memory", line
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "words",
    [
        "--grid.x 32",
        "--grid.pipe 2 --grid.x 32",
        "--grid.z 32 --memory.offload optimizer",
        "--grid.data 16 --grid.y 4 --memory.zero 1",
        "--grid.x 32 --prune.density 0.5",
        "--grid.x 32 --model.experts 4 --memory.precision bf16",
    ],
)
def test_memory_of_virtual_devices_is_known_whatever_is_trained(tmp_path, prepared, monkeypatch, words):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    flags = split_argv([*words.split(), "--train.global_batch", "128"])[1]
    config = check(read(write_config(tmp_path / "c.toml", prepared, layers=2), flags))
    shape = config.model.shape()
    check_room(config, shape, 1 << 40)
    check_room(config, shape, 0)  # unknown
    with pytest.raises(UserError, match=f"fewer devices: {config.grid.devices} virtual ones take up to"):
        check_room(config, shape, 1000)


def test_virtual_devices_with_adapters_are_not_taken_for_full_training(tmp_path, prepared):
    """Of a model whose state is most of the memory: adapters fit where Adam's moments of all weights do not."""
    sizes = [
        "--model.vocab", "512", "--model.hidden", "1024", "--grid.data", "64", "--train.global_batch", "64",
        "--train.microbatches", "1",
    ]  # fmt: skip
    file = write_config(tmp_path / "c.toml", prepared, layers=8)
    whole, adapters = (read(file, split_argv([*sizes, *more])[1]) for more in ((), ("--lora.rank", "2")))
    free = 1 << 30
    check_room(adapters, adapters.model.shape(), free)
    with pytest.raises(UserError, match="fewer devices: 64 virtual ones take up to"):
        check_room(whole, whole.model.shape(), free)
