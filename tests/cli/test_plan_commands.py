"""Commands that `plan` prints: their flags are those of the plan's first row, and `train` runs them."""

import json
import math
from collections import Counter

import pytest
from launched import AXONN, curves, finished

from axonn_jax.cli.main import main
from axonn_jax.core.grid import GRID_AXES
from axonn_jax.core.models.presets import preset, preset_names
from axonn_jax.pipe.schedule.policies import default_in_flight
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.planning.machines.machine_file import machine_names
from axonn_jax.run.config_file import loads, split_argv
from axonn_jax.run.validate import check

CASES = [  # machine, preset, devices, what else is asked for
    ("alps", "gpt2", 2, "--grid.z 2 --memory.activations full --memory.offload none"),
    ("perlmutter", "gpt-2.7b", 2, "--grid.pipe 2 --pipeline.policy 1f1b"),
    ("laptop", "gpt2", 8, ""),
    ("perlmutter", "gpt-80b", 16, ""),
    ("summit", "gpt-12b", 8, "--pipeline.policy 1f1b --memory.activations full"),
    ("laptop", "gpt2-medium", 8, ""),
    ("laptop", "gpt2-large", 8, "--grid.y 2 --memory.reshard_after step --memory.activations full"),
    ("laptop", "gpt2-xl", 8, ""),
    ("laptop", "gpt-1.3b", 16, "--pipeline.policy gpipe --grid.pipe 2"),
    ("summit", "gpt-24b", 16, ""),
    ("summit", "llama2-7b", 8, ""),
    ("summit", "gpt-2.7b", 8, "--memory.reshard_after backward --memory.offload none --microbatch 2"),
    ("summit", "gpt-100b", 128, "--grid.pipe 8 --grid.y 2 --grid.x 1 --pipeline.virtual_stages 2"),
    ("frontier", "gpt-6.7b", 8, "--grid.y 2 --tensor.residual_comm gather --grid.x 2"),
    ("frontier", "gpt-50b", 16, ""),
    ("frontier", "llama2-70b", 16, "--grid.y 4 --memory.sequence_parallel"),
    ("frontier", "gpt-60b", 16, ""),
    ("perlmutter", "gpt-5b", 8, "--memory.zero 1 --grid.data 4 --grid.pipe 1"),
    ("perlmutter", "gpt-40b", 8, ""),
    ("perlmutter", "gpt-1.3b", 8, "--memory.activations dots --memory.precision fp16 --microbatch 2"),
    ("perlmutter", "llama2-13b", 8, "--grid.pipe 2 --pipeline.policy interleaved --pipeline.virtual_stages 2"),
    ("perlmutter-80gb", "gpt-10b", 8, "--memory.zero 1 --grid.pipe 4"),
    ("perlmutter-80gb", "llama3-8b", 8, "--grid.y 2 --tensor.residual_comm auto"),
    ("perlmutter-80gb", "llama2-70b", 16, "--memory.reshard_after step --microbatch 1"),
    ("alps", "gpt-20b", 8, "--grid.pipe 2 --pipeline.policy zero-bubble"),
    ("alps", "gpt-160b", 16, ""),
    ("alps", "llama3-70b", 8, ""),
    ("alps", "gpt-320b", 64, "--grid.pipe 4 --grid.y 2 --grid.x 1"),
    ("dgx-h100", "gpt-13b", 8, "--memory.offload optimizer --memory.zero 1 --grid.data 2 --grid.pipe 2"),
    ("dgx-h100", "llama3-405b", 128, "--grid.pipe 2 --grid.y 4 --grid.x 1"),
    ("dgx-h100", "gpt-640b", 256, "--grid.pipe 1 --grid.y 4 --grid.x 2"),
    ("dgx-h100", "llama3-8b", 8, "--grid.pipe 4 --memory.activations offload --pipeline.virtual_stages 4"),
    ("perlmutter-80gb", "gemma2-2b", 4, "--grid.pipe 2"),
    ("dgx-h100", "gemma2-9b", 8, "--grid.y 2"),
    ("alps", "gemma2-27b", 8, ""),
]
QUICK = 2
"""So many of the first run by default."""
MODEL = ["vocab", "seq_len", "layers", "hidden", "heads", "kv_heads", "ffn"]


@pytest.mark.parametrize(
    ("machine", "model", "devices", "asked"),
    [pytest.param(*case, marks=[] if at < QUICK else pytest.mark.slow) for at, case in enumerate(CASES)],
)
def test_the_command_is_the_first_row_and_runs(machine, model, devices, asked, capsys, prepared, tmp_path):
    sequences = 8 if devices < 8 else 64 * max(1, devices // 64)
    tokens = sequences * preset(model).seq_len
    place = ["--model", model, "--machine", machine, "--devices", str(devices), "--batch-tokens", str(tokens)]
    assert main(["plan", *place, *asked.split(), "--json", "--top", "1"]) == 0
    found = json.loads(capsys.readouterr().out)
    (row,) = found["configs"]
    launcher, _, rest = row["command"].partition("axonn-jax train CONFIG.toml ")
    assert launcher.split()[0] == "mpirun"
    assert launcher.split()[-2:] == ["-n", str(devices)]
    words = rest.split()
    assert_same(row, found, asked, words, prepared)

    config, run = tmp_path / "c.toml", tmp_path / "run"
    config.write_text(f"[data]\npath = '{prepared}'\n[train]\nsteps = 1\neval_batches = 1\n")
    train = ["train", str(config), *words, *shrunk(row, found), "--log.dir", str(run)]
    if devices < 8:
        assert main(train) == 0  # what takes longest is to start a process
    else:
        done = finished([*AXONN, *train], timeout=300)
        assert done.returncode == 0, (train, done.stderr[-3000:])
    losses, _, _ = curves(run)
    assert losses == pytest.approx([math.log(300)], abs=0.5)  # of weights that know nothing yet
    print(f"\nRAN {machine} {model} {devices} {asked!r}: {rest} | {' '.join(shrunk(row, found))} | {losses[0]:.3f}")


def assert_same(row, found, asked, words, data):
    """The command's flags give what the row says, and nothing is said twice or beside it."""
    files, flags = split_argv(words)
    assert files == []
    assert max(Counter(name for name, _ in flags).values()) == 1
    config = check(loads(f"[data]\npath = '{data}'", [*flags, ("model.seq_len", 128)]))
    memory, pipeline, layout, train = config.memory, config.pipeline, config.tensor, config.train
    pipe, chosen = config.grid.pipe, dict(zip(words[::2], words[1::2], strict=True))
    default = default_in_flight(PipelineShape(pipe, train.microbatches, pipeline.virtual_stages)) if pipe > 1 else 0
    said = {axis: getattr(config.grid, axis) for axis in GRID_AXES} | {
        "microbatches": train.microbatches,
        "microbatch": train.global_batch // train.microbatches // config.grid.batch_shards,
        "virtual_stages": pipeline.virtual_stages,
        "in_flight": (pipeline.in_flight or default) if pipeline.policy == "message" else 0,
        "activations": memory.activations,
        "reshard_after": memory.reshard_after,
        "offload": memory.offload,
        "zero": memory.zero,
    }
    assert said == {name: row[name] for name in said}
    assert memory.precision == found["precision"]
    assert memory.sequence_parallel == found["sequence_parallel"] == ("--memory.sequence_parallel" in asked)
    assert layout.residual_comm == found["residual_comm"]
    assert train.global_batch == found["batch_sequences"]
    if pipe > 1:
        wanted = [*asked.split(), "--pipeline.policy", "message"]
        assert pipeline.policy == wanted[wanted.index("--pipeline.policy") + 1]
    tables = {name.partition(".")[0].removeprefix("--") for name in chosen}
    assert tables <= {"model", "grid", "train", "memory"} | ({"pipeline"} if pipe > 1 else set())
    assert {name for name in chosen if name.startswith("--model")} == {"--model.preset"}


def shrunk(row, found):
    """Flags for a tiny model of the same kind, and for so few replicas and shards of `z` that 16 devices do."""
    full, grid = preset(found["model"]), {axis: row[axis] for axis in GRID_AXES}
    while math.prod(grid.values()) > (8 if grid["data"] * grid["z"] > 1 else 16):
        larger = "data" if grid["data"] >= grid["z"] else "z"
        grid[larger] //= 2
    heads = 4 * math.lcm(grid["y"], grid["x"])
    kv_heads = heads // 2 if full.kv_heads < full.heads else heads
    hidden, layers = 8 * heads * grid["z"], max(2, row["pipe"] * row["virtual_stages"])
    sizes = (300, 16, layers, hidden, heads, kv_heads, 4 * hidden)
    batch = grid["data"] * grid["z"] * row["microbatches"] * row["microbatch"]
    model = [word for key, size in zip(MODEL, sizes, strict=True) for word in (f"--model.{key}", str(size))]
    axes = [word for axis in ("data", "z") for word in (f"--grid.{axis}", str(grid[axis]))]
    return [*model, *axes, "--train.global_batch", str(batch)]


def test_every_machine_and_preset_is_among_the_cases():
    assert {machine for machine, *_ in CASES} == set(machine_names())
    assert {model for _, model, *_ in CASES} == {name for name in preset_names() if not preset(name).experts}
    assert len(CASES) == len(set(CASES)) == 35
