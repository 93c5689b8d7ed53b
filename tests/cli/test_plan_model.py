"""`plan` for models of one's own: a configuration, a run, a directory in Hugging Face's layout."""

import dataclasses
import json
import shlex

import instruction_data
import pytest

from axonn_jax.cli.arguments import parse
from axonn_jax.cli.main import main
from axonn_jax.cli.plan import Plan
from axonn_jax.cli.plan.flags import ask
from axonn_jax.core.models.presets import preset
from axonn_jax.files.huggingface.families import config_from_shape
from axonn_jax.run.config_file import read, split_argv

MACHINE = ("--machine", "perlmutter", "--devices", "16", "--json")
OWN = """
[model]
layers = 12
hidden = 1024
heads = 16
vocab = 32000
seq_len = 1024
positions = "rope"
norm = "rmsnorm"
mlp = "swiglu"
bias = "none"
[data]
path = "not/there"
[train]
global_batch = 64
"""


def planned(capsys, *words):
    assert main(["plan", *words, *MACHINE]) == 0
    return json.loads(capsys.readouterr().out)


def settled(command):
    """The configuration of a command that a plan prints."""
    words = shlex.split(command)
    (path, *_), flags = split_argv(words[words.index("train") + 1 :])
    return read(path, flags)


def test_a_configuration_is_planned_as_the_preset_of_its_sizes(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text('[model]\npreset = "gpt-5b"\n[data]\npath = "x"\n[train]\nglobal_batch = 32\n')
    own = planned(capsys, "--model", str(file))
    known = planned(capsys, "--model", "gpt-5b", "--batch-tokens", str(32 * preset("gpt-5b").seq_len))
    for found in (own, known):
        for one in found["configs"]:
            one.pop("command")
        found.pop("model")
    assert own == known


def test_the_command_for_ones_own_sizes_trains_what_was_planned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    found = planned(capsys, "--model", str(file), "--grid.pipe", "2")
    assert found["batch_sequences"] == 64
    best = found["configs"][0]
    config = settled(best["command"])
    assert config.model.shape() == read(file).model.shape()
    assert dataclasses.asdict(config.grid).items() >= {"pipe": 2, "data": best["data"], "z": best["z"]}.items()
    assert config.train.microbatches == best["microbatches"]


def test_a_run_and_a_hugging_face_model_are_planned_alike(tmp_path, capsys):
    run, model = tmp_path / "run", tmp_path / "model"
    (run / "checkpoints").mkdir(parents=True)
    (run / "config.toml").write_text(OWN)
    model.mkdir()
    shape = read(run / "config.toml").model.shape()
    (model / "config.json").write_text(json.dumps(config_from_shape(shape, "float32", None)))
    plans = [planned(capsys, "--model", str(path), "--batch-tokens", "65536") for path in (run, model)]
    same = [{key: value for key, value in plan["configs"][0].items() if key != "command"} for plan in plans]
    assert same[0] == same[1]
    (tmp_path / "CONFIG.toml").write_text('[data]\npath = "x"\n')
    command = plans[1]["configs"][0]["command"].replace("CONFIG.toml", str(tmp_path / "CONFIG.toml"))
    assert settled(command).model.shape() == shape
    assert settled(command).checkpoint.weights == str(model)


def test_a_pruned_configuration_is_planned_pruned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN + "[prune]\ndensity = 0.1\n")
    assert planned(capsys, "--model", str(file))["density"] == 0.1
    assert planned(capsys, "--model", str(file), "--prune.density", "0.5")["density"] == 0.5


def memory(found, kind="optimizer"):
    return found["configs"][0]["memory"][kind]


@pytest.mark.parametrize(
    ("settings", "item"),
    [
        ("adamw", 8),
        ("lion", 4),
        ("sgd", 4),
        ("adamw_bf16", 6),
        ("lion --train.ema 0.99", 8),
        ("sgd --train.beta1 0", 0),
    ],
)
def test_an_optimizers_own_state_is_counted(capsys, settings, item):
    where = ("--model", "gpt-5b", "--memory.precision", "fp32", "--grid.x", "16", "--memory.offload", "none")
    found = planned(capsys, *where, "--train.optimizer", *settings.split())
    assert memory(found) / memory(found, "weights") == pytest.approx(item / 4)


def test_sizes_by_flag_are_those_of_a_file(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN)
    sizes = ("--model.layers", "24", "--model.hidden=2048", "--model.seq_len", "512", "--train.global_batch", "128")
    by_flag = planned(capsys, "--model", str(file), *sizes)
    assert (by_flag["seq_len"], by_flag["batch_sequences"]) == (512, 128)
    config = settled(by_flag["configs"][0]["command"])
    assert (config.model.shape().layers, config.model.shape().hidden, config.train.global_batch) == (24, 2048, 128)
    file.write_text(OWN.replace("= 12", "= 24").replace("hidden = 1024", "hidden = 2048").replace("1024", "512"))
    in_file = planned(capsys, "--model", str(file), "--train.global_batch", "128")
    for one in (*by_flag["configs"], *in_file["configs"]):
        one.pop("command")
    assert by_flag == in_file


def test_adapters_take_the_memory_of_the_frozen_model_and_little_else(tmp_path, capsys):
    own = tmp_path / "own.toml"
    own.write_text('[data]\npath = "x"\n')
    where = ("plan", "--model", "llama3-8b", "--machine", "perlmutter", "--devices", "4", "--train.global_batch", "16")
    whole = ("--memory.offload", "none", "--memory.zero", "0")
    assert main([*where, *whole]) == 2  # all weights trained: 16 bytes a parameter do not fit
    assert "GB a device" in capsys.readouterr().err
    assert main([*where, *whole, "--lora.rank", "16", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    best = found["configs"][0]
    assert found["lora_rank"] == 16
    shards = best["pipe"] * best["z"] * best["y"] * best["x"]
    assert best["memory"]["weights"] == pytest.approx(2 * 8.03e9 / shards, rel=0.03)
    assert best["memory"]["optimizer"] < 0.03 * best["memory"]["weights"]
    assert settled(best["command"].replace("CONFIG.toml", str(own))).lora.rank == 16


def test_packed_rows_take_the_kernel_that_a_run_takes(tmp_path):
    """No fused kernel takes masks of packed rows; cuDNN's does windows of other rows."""
    rows, _ = instruction_data.prepared(
        tmp_path, instruction_data.rows(60), instruction_data.tokenizer(tmp_path / "tokenizer"), 256
    )
    flags = ("--model", "gpt2", *MACHINE[:-1], "--model.seq_len", "256")
    kernels = [
        ask(parse(Plan, [*flags, *data], "plan")).request.attention_form.kernel
        for data in ((), ("--data.path", str(rows.path)))
    ]
    assert kernels == ["cudnn", "blocked"]


def test_the_command_leaves_no_setting_of_the_file_that_was_not_planned(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN + 'ema = 0.9\n[grid]\ndata = 3\n[memory]\noffload = "optimizer"\nzero = 1\n')
    found = planned(capsys, "--model", str(file), "--memory.offload", "none", "--memory.zero", "0")
    for best in found["configs"]:
        config = settled(best["command"])
        assert config.grid.devices == 16
        assert (config.grid.pipe, config.memory.offload, config.memory.zero) == (1, "none", 0)  # as ema asks


def test_a_files_pipeline_and_offloaded_state_are_as_planned_and_no_flag_is_said_twice(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(
        OWN + '[pipeline]\nvirtual_stages = 4\nin_flight = 3\nsplit = "2,3"\n'
        '[memory]\nresident = "8GB"\noffload = "optimizer"\n'
    )
    for best in planned(capsys, "--model", str(file), "--grid.pipe", "2", "--train.global-batch=128")["configs"]:
        pipeline = settled(best["command"]).pipeline
        assert pipeline.virtual_stages == best["virtual_stages"]
        assert (pipeline.in_flight in (0, best["in_flight"]), pipeline.split) == (True, "")
        assert best["offload"] == "optimizer"  # as resident asks
        assert best["command"].replace("-batch", "_batch").count("--train.global_batch") == 1


def test_microbatches_divide_into_a_files_sub_batches_without_a_pipeline(tmp_path, capsys):
    file = tmp_path / "own.toml"
    file.write_text(OWN + "[tensor]\nsub_batches = 2\n")
    best = planned(capsys, "--model", str(file), "--batch-tokens", str(64 * 2048))["configs"]
    assert all(one["microbatch"] % 2 == 0 and one["pipe"] == 1 for one in best)
    for axes, said in (
        (("--grid.pipe", "1", "--microbatch", "1"), "--grid.pipe = 1: one of 2, 4, 8, 16, which"),
        (("--grid.pipe", "2"), "tensor.sub_batches = 2: 0 or 1 where grid.pipe is above 1"),
    ):
        assert main(["plan", "--model", str(file), *MACHINE, *axes]) == 2
        assert said in capsys.readouterr().err


def test_gradients_of_adapters_are_float32_in_every_precision():
    words = "--model gpt2 --machine perlmutter --devices 8 --memory.accumulate compute"
    items = [ask(parse(Plan, [*words.split(), "--lora.rank", rank], "plan")).request.gradient_item for rank in "04"]
    assert items == [2, 4]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "--model = '{file}': "),
        (OWN + '[lora]\nrank = 8\ntargets = ["w"]\n', "lora.targets = 'w': one of q, k, v"),
        (OWN.replace("vocab = 32000\n", ""), "model.vocab = (not given): given in {file}, or its data prepared"),
        ("[model", "CONFIG.toml = '{file}': valid TOML"),
        (OWN.replace("layers", "layer"), "did you mean"),
    ],
)
def test_what_cannot_be_planned_is_one_line(tmp_path, capsys, text, words):
    file = tmp_path / ("own.toml" if text else "nothing")
    if text:
        file.write_text(text)
    assert main(["plan", "--model", str(file), *MACHINE]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words.format(file=file) in line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--lora.rank", "x"], "lora.rank = 'x': "),
        (["--lora.rnk", "8"], "lora.rnk = 8: not a known key; did you mean 'rank'?"),
        (["--train.microbatches", "4"], "--train.microbatches = 4: left out, as a plan chooses it: --microbatch fixes"),
        (["--pipeline.split", "2,3"], "--pipeline.split = '2,3': left out, as a plan chooses it: stages are balanced"),
        (["--train.global_batch", "64", "--batch-tokens", "4Mi"], "--batch-tokens = '4Mi': left out beside"),
        (["--model.heads", "7"], "model.heads = 7: "),
        (["--zero", "1"], "--zero = '1': not a flag of axonn-jax plan; did you mean '--memory.zero'?"),
        (["--lora.rank"], "lora.rank = (not given): "),
        (["--train.global-batch", "64", "--batch-tokens", "4Mi"], "--batch-tokens = '4Mi': left out beside"),
        (["--model.preset", "gpt2"], "--model.preset = 'gpt2': left out, as --model names a preset"),
        (["--train.ema", "0.9", "--grid.pipe", "2"], "train.ema = 0.9: 0 where grid.pipe is above 1"),
        (["--train.ema", "0.9", "--pipeline.virtual_stages", "2"], "train.ema = 0.9: 0 where grid.pipe is above 1"),
        (["--lora.rank", "8", "--prune.density", "0.5"], "lora.rank = 8: 0 where weights are pruned"),
        (
            ["--train.optimizer", "muon", "--prune.density", "0.5"],
            "train.optimizer = 'muon': adamw or adam or sgd or lion",
        ),
        (["--moe.dispatch", "capacity"], "moe.dispatch = 'capacity': gather in a model without model.experts"),
        (
            ["--memory.resident", "8GB", "--memory.offload", "none"],
            "memory.resident = '8GB': auto where memory.offload",
        ),
    ],
)
def test_a_wrong_setting_is_one_line(capsys, flags, words):
    assert main(["plan", "--model", "gpt-5b", *MACHINE, *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line
