"""Adapters of PEFT: the function that they make is PEFT's in torch, here and in the files written here."""

import adapted
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

import axonn_jax as ax
from axonn_jax.core.adapters.layers import merged, settings_of
from axonn_jax.core.grid import GridShape
from axonn_jax.files.adapters.peft import TENSORS, read_adapter, write_adapter

KINDS = {"trained": "", "rslora of queries and values": "rslora/"}
TOKENS = adapted.huggingface.fixture("llama")["tokens"][:, :-1]


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return KINDS[request.param]


@pytest.fixture(scope="module")
def directory(kind, tmp_path_factory):
    return adapted.peft_directory(tmp_path_factory.mktemp("peft") / "adapter", kind=kind)


def close(logits, kind):
    want = adapted.stored()[f"{kind}logits"]
    return np.abs(np.asarray(logits)[..., : want.shape[-1]] - want).max() < 2e-5 * np.abs(want).max()


def test_logits_are_those_of_peft(kind, directory):
    model = adapted.adapted(directory)
    assert not close(tiny.forward(adapted.base())(TOKENS), kind)  # the adapter does something
    assert close(tiny.forward(model)(TOKENS), kind)
    plain = merged(model)
    assert settings_of(plain) is None
    assert settings_of(model) is not None  # and is left alone
    assert close(tiny.forward(plain)(TOKENS), kind)


def test_files_written_are_the_files_read(directory, tmp_path):
    adapter = read_adapter(directory, adapted.SHAPE, "directory")
    write_adapter(tmp_path, adapter, adapted.SHAPE)
    (tmp_path / "plain").touch()
    assert len({path.stat().st_mode for path in tmp_path.iterdir()}) == 1  # as umask says
    assert read_adapter(tmp_path, adapted.SHAPE, "directory").config == adapter.config
    got, want = load_file(tmp_path / TENSORS), load_file(directory / TENSORS)
    assert got.keys() == want.keys()
    assert all(np.array_equal(got[name], value) for name, value in want.items())


@pytest.mark.parametrize("targets", ["all-linear", r".*layers\.\d+\.(self_attn|mlp)\..*_proj", "(a+)+$" + "a" * 40])
def test_all_linear_layers_are_all_targets(tmp_path, targets):
    """A pattern is not evaluated, which a stranger's could take for ever: what it has chosen are the arrays."""
    adapter = read_adapter(adapted.peft_directory(tmp_path / "named"), adapted.SHAPE, "directory")
    every = {"layers_to_transform": [*range(adapted.SHAPE.layers)], "layers_pattern": "layers"}
    folder = adapted.peft_directory(tmp_path / "all", target_modules=targets, **every)
    assert read_adapter(folder, adapted.SHAPE, "directory").config == adapter.config


def test_adapters_of_some_layers_alone_are_one_line(tmp_path):
    folder = adapted.peft_directory(tmp_path / "some", target_modules=".*_proj", layers_to_transform=[0])
    tensors = load_file(folder / TENSORS)
    save_file({name: value for name, value in tensors.items() if ".layers.1." not in name}, folder / TENSORS)
    with pytest.raises(ax.UserError, match=r"^directory: tensor \S+layers\.1\.\S+ = None: an array of shape"):
        read_adapter(folder, adapted.SHAPE, "directory")


@pytest.mark.filterwarnings("ignore::FutureWarning")  # PEFT reads an attribute that transformers renamed
def test_peft_itself_loads_the_files(kind, directory, tmp_path):
    """Where torch and PEFT are installed; elsewhere `test_files_written_are_the_files_read` says as much."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    write_adapter(tmp_path, read_adapter(directory, adapted.SHAPE, "directory"), adapted.SHAPE)
    base = transformers.LlamaForCausalLM(transformers.LlamaConfig(**adapted.huggingface.config("llama")))
    weights = adapted.huggingface.under("llama", "weights/")
    base.load_state_dict({name: torch.from_numpy(value) for name, value in weights.items()})
    with torch.no_grad():
        logits = peft.PeftModel.from_pretrained(base, tmp_path)(torch.from_numpy(TOKENS).long()).logits.numpy()
    assert close(logits, kind)


def test_a_generator_takes_a_live_model_with_adapters(directory):
    model = adapted.adapted(directory)
    grid = adapted.grids.lay(GridShape(y=2))
    prompts = [TOKENS[0, :5].tolist()]
    with_adapters = list(ax.Generator(model, grid, slots=1, length=12, dtype="float32").generate(prompts, tokens=6))
    plain = list(ax.Generator(merged(model), grid, slots=1, length=12, dtype="float32").generate(prompts, tokens=6))
    assert with_adapters == plain
    bare = list(ax.Generator(adapted.base(), grid, slots=1, length=12, dtype="float32").generate(prompts, tokens=6))
    assert with_adapters != bare


def test_gpt2s_fused_projections_are_refused(tmp_path):
    shape = adapted.shape_from_config(adapted.huggingface.config("gpt2"))
    with pytest.raises(ax.UserError, match="model of GPT-2's family"):
        read_adapter(adapted.peft_directory(tmp_path, kind="rslora/"), shape, "SOURCE")
