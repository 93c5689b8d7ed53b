"""Runs that train adapters: small checkpoints, resumed on another grid, generated from, exported to PEFT and merged."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pretrained
import pytest
from commands import answer, refusal
from damage import edit_json, forge
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from axonn_jax.cli.main import main
from axonn_jax.core.adapters.checksum import checksum, checksum_of_files, number_of, read_numbered
from axonn_jax.core.checkpoint.manifest import read
from axonn_jax.core.distributed.host_sync import LocalSync
from axonn_jax.run import metrics

CONFIG = pretrained.CONFIGS["llama"]
SHORT = ["--train.global_batch", "4", "--train.microbatches", "2", "--train.eval_batches", "1", "--model.seq_len", "16"]
LORA = ["--lora.rank", "4", "--lora.alpha", "8", "--train.lr", "0.01", "--train.eps", "0.001"]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """A pretrained model, its converted directory, data, and a LoRA run of two steps on `pipe` and `y`."""
    root = pretrained.converted(tmp_path_factory.mktemp("lora"))
    assert train(root, "run", "--grid.pipe", "2", "--grid.y", "2", "--train.steps", "2", "--checkpoint.every", "1") == 0
    return root


def train(root: Path, run: str, *flags: str) -> int:
    config = str(root / "base" / "config.toml")
    return main(
        ["train", config, "--data.path", str(root / "data"), "--log.dir", str(root / run), *SHORT, *LORA, *flags]
    )


def params(step: Path) -> dict[str, np.ndarray]:
    from axonn_jax.core.checkpoint.orbax import stored_array

    arrays = read(step).arrays
    names = [name for name in arrays if name.startswith("params.")]
    return {name: np.asarray(stored_array(step / arrays[name].part, name, 1 << 20).read().result()) for name in names}


def refused(capsys, argv: list[str], *says: str) -> None:
    line = refusal(capsys, *argv)
    for text in says:
        assert text in line


def test_a_checkpoint_has_adapters_alone_and_names_its_base(root):
    manifest = read(root / "run" / "checkpoints" / "step_00000002")
    assert all(".adapter." in name for name in manifest.arrays if name.startswith(("params.", "optimizer.0.mu.")))
    facts = manifest.run["lora"]
    assert (facts["rank"], facts["alpha"], facts["rslora"]) == (4, 8.0, False)
    assert facts["base"] == str(root / "base")
    assert len(facts["checksum"]) == 64


def resumed(root: Path, folder: Path, *flags: str) -> dict[str, np.ndarray]:
    """The adapters of a run that went on from its first step to the second."""
    run = shutil.copytree(root / "run", folder / "run")
    shutil.rmtree(run / "checkpoints" / "step_00000002")
    assert train(root, str(run), "--train.steps", "2", *flags) == 0
    return params(run / "checkpoints" / "step_00000002")


def test_a_run_goes_on_on_another_grid(root, tmp_path, monkeypatch):
    """As the run that was not interrupted, which the checkpoint of its first step goes on to."""
    monkeypatch.setattr(metrics, "peak_flops", lambda kind: 1e12)
    got = resumed(root, tmp_path, "--grid.data", "2", "--grid.z", "2", "--train.microbatches", "1")
    want = params(root / "run" / "checkpoints" / "step_00000002")
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert np.abs(got[name] - value).max() < 1e-5 * np.abs(value).max(), name

    line = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-2])
    state = pretrained.weights(CONFIG)
    tokens, kernels = 4 * 16, sum(v.size for n, v in state.items() if v.ndim == 2 and "embed" not in n)
    adapters = sum(value.size for name, value in want.items() if name.endswith((".adapter.a", ".adapter.b")))
    attention = 12 * 16 * CONFIG["hidden_size"] * CONFIG["num_hidden_layers"]
    flops = tokens * (4 * kernels + attention + 6 * adapters)  # frozen kernels have no gradients
    assert line["mfu"] * line["step_s"] * 4 * 1e12 == pytest.approx(flops)


def test_a_pipeline_knows_the_base_of_one_mesh(root, tmp_path):
    """Each stage has a part of the weights, and a text longer than `HostSync.gather` takes would name them all."""
    got = resumed(root, tmp_path, "--grid.pipe", "2", "--grid.y", "2")
    for name, value in params(root / "run" / "checkpoints" / "step_00000002").items():
        assert np.abs(got[name] - value).max() < 1e-5 * np.abs(value).max(), name


def test_weights_in_float16_have_the_number_of_those_that_were_read():
    weight = np.random.default_rng(0).normal(0, 1e-5, (64, 32)).astype(np.float32)  # float16 has 8 bits of it at best

    def read_weights(wanted):
        (want,) = wanted.values()
        return {"kernel": jax.device_put(weight.astype(want.dtype), want.sharding)}

    here = SingleDeviceSharding(jax.devices()[0])
    made, numbers = read_numbered(read_weights, {"kernel": jax.ShapeDtypeStruct((64, 32), np.float16, sharding=here)})
    assert made["kernel"].dtype == np.float16
    assert numbers == {"kernel": number_of(weight)} == {"kernel": number_of(weight.astype(jnp.bfloat16))}
    assert number_of(made["kernel"]) != number_of(weight)


def test_the_checksum_is_of_every_weight_wherever_it_is_held():
    weights = {f"blocks.{at}.attention.out.kernel": np.full((4, 2), 1.0 + at, np.float32) for at in range(120)}
    numbers = {name: number_of(value) for name, value in weights.items()}
    whole = checksum(numbers, weights, LocalSync())
    assert whole == checksum_of_files(weights.items()) == checksum_of_files(reversed(weights.items()))
    last = list(weights)[-1]
    assert whole != checksum(numbers | {last: number_of(-weights[last])}, weights, LocalSync())
    assert whole != checksum_of_files((weights | {last: weights[last].T.reshape(4, 2) + 1}).items())

    # Of two processes, both with the table in the middle.
    class Gathered(LocalSync):
        def __init__(self, *others):
            self.others = others

        def _all_gather(self, own):
            self.own = own
            return np.stack([*self.others, own])

    first, rest, alone = dict(list(numbers.items())[:60]), dict(list(numbers.items())[59:]), Gathered()
    checksum(first, weights, alone)
    assert whole == checksum(rest, weights, Gathered(alone.own))


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_goes_on_in_another_precision(root, tmp_path, precision):
    """The base's checksum is that of weights rounded to bfloat16, so it is the same."""
    got = resumed(root, tmp_path, "--memory.precision", precision, "--memory.offload", "optimizer")
    assert main(["convert", str(tmp_path / "run"), str(tmp_path / "out"), "--merge"]) == 0
    for name, value in params(root / "run" / "checkpoints" / "step_00000002").items():
        assert np.abs(got[name] - value).max() < 0.1 * np.abs(value).max(), name


def test_an_export_is_what_peft_reads_and_merged_it_is_the_run(root, capsys, tmp_path):
    out, one, two = tmp_path / "adapter", tmp_path / "merged", tmp_path / "from_peft"
    assert answer(capsys, "convert", str(root / "run"), str(out), "--adapter")["to"] == "adapter"
    config, tensors = (
        json.loads((out / "adapter_config.json").read_text()),
        load_file(out / "adapter_model.safetensors"),
    )
    assert (config["r"], config["lora_alpha"], config["base_model_name_or_path"]) == (4, 8, str(root / "base"))
    assert answer(capsys, "convert", str(root / "run"), str(one), "--merge")["to"] == "huggingface"
    assert main(["convert", str(out), str(two), "--merge"]) == 0
    capsys.readouterr()
    merged, base = pretrained.read_model(one), pretrained.weights(CONFIG)
    again = pretrained.read_model(two)
    for name, value in base.items():
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in tensors:
            value = value + 2.0 * tensors[f"{module}.lora_B.weight"] @ tensors[f"{module}.lora_A.weight"]
        np.testing.assert_allclose(merged[name], value, rtol=0, atol=1e-6, err_msg=name)
        assert np.array_equal(merged[name], again[name])
    assert not np.array_equal(merged["model.layers.0.mlp.up_proj.weight"], base["model.layers.0.mlp.up_proj.weight"])
    words = ("--prompt", "the ", "--tokens", "8", "--temperature", "0")
    ways = ((root / "run",), (one,), (root / "run", "--grid.y", "2"))
    texts = [answer(capsys, "generate", *way, *words)["text"] for way in ways]
    assert texts[0] == texts[1] == texts[2] != ""


@pytest.fixture(scope="module")
def another(root):
    """A base of the same sizes with other weights, and an adapter of the run as PEFT has it."""
    state = pretrained.weights(CONFIG)
    state["model.layers.1.mlp.up_proj.weight"] = -state["model.layers.1.mlp.up_proj.weight"]
    other = pretrained.write_model(root / "other", CONFIG, state)
    shutil.copy(root / "hf" / "tokenizer.json", other)
    assert main(["convert", str(root / "run"), str(root / "adapter"), "--adapter"]) == 0
    return other


@pytest.mark.parametrize(
    ("grid", "source"),
    [
        ((), "run"),
        ((), "adapter"),
        (("--grid.pipe", "2"), "adapter"),
        pytest.param(("--grid.pipe", "2"), "run", marks=pytest.mark.slow),
        pytest.param(("--grid.z", "2", "--grid.y", "2"), "adapter", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_an_adapter_is_trained_further(root, another, tmp_path, capsys, grid, source):
    """Of the files of PEFT, or of another run; with a rate of nearly nothing the values stay, with one they move."""
    config = ["train", str(root / "base" / "config.toml"), "--data.path", str(root / "data"), *SHORT]
    begin = ["--checkpoint.adapter", str(root / source), "--train.steps", "1", *grid]
    want = params(root / "run" / "checkpoints" / "step_00000002")
    for rate, moves in (("1e-12", False), ("0.01", True)):
        folder = tmp_path / f"moves{moves}"
        assert main([*config, "--log.dir", str(folder), "--train.lr", rate, *begin]) == 0
        assert f"adapters from {root / source}" in capsys.readouterr().err
        got = params(folder / "checkpoints" / "step_00000001")
        assert got.keys() == want.keys()
        assert all(np.allclose(got[name], value, atol=1e-7) != moves for name, value in want.items())
    assert main([*config, "--log.dir", str(folder), *begin, "--train.steps", "2"]) == 0  # goes on, not anew
    assert "adapters from" not in capsys.readouterr().err


BAD_RUNS = {
    "no adapter": (["--checkpoint.adapter", "none"], "checkpoint.adapter = 'none': the directory of PEFT's files"),
    "a whole model": (["--checkpoint.adapter", "BASE"], "checkpoint.adapter = "),
    "another rank": (["--checkpoint.adapter", "ADAPTER", "--lora.rank", "2"], "lora.rank = 2: 4, as in "),
    "its own run": (["--checkpoint.adapter", "RUN", "--log.dir", "RUN"], "another directory than checkpoint.adapter"),
    "another base": (
        ["--checkpoint.adapter", "RUN", "--checkpoint.weights", "OTHER"],
        "adapters of this base, by its checksum",
    ),
    "dropout": (["--lora.dropout", "1"], "lora.dropout = 1"),
    "target": (["--lora.targets", "q,vv"], "lora.targets = 'vv': one of q, k, v"),
    "alpha": (["--lora.alpha", "0"], "lora.alpha = 0"),
    "off": (["--lora.rank", "0"], "lora.rank = 0: at least 1 where other settings of [lora] are given"),
    "no base": (["--checkpoint.weights", ""], "checkpoint.weights = '': the directory of the base"),
    "peft": (["--checkpoint.weights", "ADAPTER"], "merge the adapter into its base first"),
}


@pytest.mark.parametrize("name", BAD_RUNS)
def test_runs_that_cannot_be_are_one_line(root, another, capsys, name):
    flags, says = BAD_RUNS[name]
    places = {"ADAPTER": "adapter", "BASE": "base", "RUN": "run", "OTHER": "other"}
    assert train(root, "no", *(str(root / places[flag]) if flag in places else flag for flag in flags)) == 2
    lines = capsys.readouterr().err.splitlines()
    assert says in next(line for line in lines if line.startswith("error: "))
    assert len(lines) == 1 or name == "another base"  # known when both are read
    assert not (root / "no" / "metrics.jsonl").exists()


@pytest.fixture
def begun(root, another, capsys, monkeypatch, tmp_path):
    """The line of a run that begins with a damaged copy of an adapter and ends before it starts."""

    def line(source, damage):
        adapter = shutil.copytree(root / source, tmp_path / "damaged")
        damage(adapter)
        monkeypatch.setattr("axonn_jax.run.main.train", lambda *_: pytest.fail("training was started"))
        config = ["train", str(root / "base" / "config.toml"), "--data.path", str(root / "data"), *SHORT]
        return refusal(capsys, *config, "--log.dir", str(tmp_path / "run"), "--checkpoint.adapter", str(adapter))

    return line


def test_a_rank_of_millions_beside_small_tensors_is_one_line(begun):
    line = begun("adapter", lambda folder: edit_json(folder / "adapter_config.json", lambda raw: raw.update(r=3000000)))
    assert "lora_A.weight = (4, 48): (3000000, 48), for an adapter of this base" in line


@pytest.mark.parametrize("arrays", [False, True])
def test_a_rank_of_millions_in_a_manifest_is_one_line(begun, arrays):
    def change(content):
        content["run"]["lora"]["rank"] = 3000000
        for name, stored in content["arrays"].items() if arrays else ():
            if name.endswith((".adapter.a", ".adapter.b")):
                stored["shape"][name.endswith(".a")] = 3000000 * (1 + 2 * name.endswith("qkv.adapter.a"))

    line = begun("run", lambda run: forge(run / "checkpoints" / "step_00000002", change))
    says = "adapter.b is (4, 48), not (3000000, 48) as in manifest.json" if arrays else "lora.rank = 3000000, but "
    assert "checkpoint.adapter = " in line
    assert says in line


GOES_ON = {
    "base": (["--checkpoint.weights", "OTHER"], "adapters of this base, by its checksum"),
    "alpha": (["--lora.alpha", "16"], "lora.alpha = 16.0: 8.0, as in "),
    "targets": (["--lora.targets", "q,v"], "lora.targets = ['q', 'v']: ['q', 'k', 'v'"),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_run_does_not_go_on_with_other_adapters(root, another, capsys, name):
    flags, says = GOES_ON[name]
    flags = [str(another) if flag == "OTHER" else flag for flag in flags]
    assert train(root, "run", "--train.steps", "3", *flags) == 2
    lines = capsys.readouterr().err.splitlines()
    assert says in next(line for line in lines if line.startswith("error: "))


def test_adapters_are_no_whole_model(root, another, capsys, tmp_path):
    data = ["--data.path", str(root / "data"), "--log.dir", str(tmp_path / "run"), *SHORT]
    assert main(["train", str(root / "base" / "config.toml"), *data, "--checkpoint.weights", str(root / "run")]) == 2
    assert "this checkpoint has adapters alone" in capsys.readouterr().err
    assert train(root, str(tmp_path / "run"), "--checkpoint.weights", str(root / "run")) == 2
    assert "this checkpoint has adapters alone" in capsys.readouterr().err
    convert = ["convert", root / "run", tmp_path / "out"]
    refused(capsys, convert, "--adapter", "--merge")
    refusal(capsys, "convert", root / "base", tmp_path / "out", "--adapter", alone=False)
    convert += ["--merge", "--base"]
    refused(capsys, [*convert, another], "the base that the adapters were trained on")
    refused(capsys, [*convert, "nowhere"], "--base = 'nowhere': the directory of the adapters' base")


def test_a_base_that_has_gone_or_changed_is_one_line(root, another, capsys, tmp_path):
    generate = ["generate", str(root / "run"), "--prompt", "the ", "--tokens", "9", "--temperature", "0"]
    assert main(generate) == 0
    text = capsys.readouterr().out
    whole = ["generate", root / "base", *generate[2:], "--base", another]
    refused(capsys, whole, "base = ", f"left out, as {root / 'base'} is a whole model")
    (root / "base").rename(root / "gone")
    try:
        told = f"it is no longer at {root / 'base'}", "--base DIR of generate, evaluate and convert --merge"
        refused(capsys, generate, *told)
        assert main([*generate, "--base", str(root / "gone")]) == 0
        assert capsys.readouterr().out == text
        refused(capsys, [*generate, "--base", "nowhere"], "base = 'nowhere'")
        shutil.copytree(another, root / "base")
        refused(capsys, generate, "this one's checksum is another")
        shutil.rmtree(root / "base")
        assert main(["convert", str(root / "run"), str(tmp_path / "out"), "--merge", "--base", str(root / "gone")]) == 0
    finally:
        (root / "gone").rename(root / "base")


BAD_ADAPTERS = {
    "dora": ({"use_dora": True}, "use_dora = True: null, false or empty"),
    "modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save = ['lm_head']"),
    "unknown": ({"use_nothing": 1}, "use_nothing = 1"),
    "kind": ({"peft_type": "LOHA"}, "peft_type = 'LOHA': LORA"),
    "start": ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa'"),
    "rank": ({"r": 0}, "r = 0: at least 1"),
    "number": ({"target_modules": 3}, "target_modules = 3: a list of names or a regular expression"),
    "target": ({"target_modules": ["q_proj", "up_prj"]}, "target_modules = 'up_prj': among q_proj"),
    "left over": ({"target_modules": ["q_proj", "v_proj"]}, "only those of the adapters of target_modules"),
    "another rank": ({"r": 5}, "(4, 48): (5, 48), for an adapter of this base"),
}


@pytest.mark.parametrize("name", BAD_ADAPTERS)
def test_adapters_that_are_not_applied_are_one_line(root, another, capsys, tmp_path, name):
    changes, says = BAD_ADAPTERS[name]
    folder = shutil.copytree(root / "adapter", tmp_path / "adapter")
    edit_json(folder / "adapter_config.json", lambda raw: raw.update(changes))
    refused(capsys, ["convert", str(folder), str(tmp_path / "out"), "--merge"], says)


def test_an_adapter_without_a_tensor_is_one_line(root, another, capsys, tmp_path):
    folder = shutil.copytree(root / "adapter", tmp_path / "adapter")
    tensors = load_file(folder / "adapter_model.safetensors")
    gone = tensors.pop("base_model.model.model.layers.1.mlp.down_proj.lora_B.weight")
    save_file(tensors, folder / "adapter_model.safetensors")
    assert gone.shape == (48, 4)
    says = "layers.1.mlp.down_proj.lora_B.weight = None: an array of shape (48, 4)"
    refused(capsys, ["convert", folder, tmp_path / "out", "--merge"], says)
