"""The configuration's tables: defaults, shapes, checks, text that reads back, and the reference made from them."""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from typing import Annotated, get_args, get_origin, get_type_hints

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launched import ROOT, finished

from axonn_jax import GridShape, PruneConfig, TensorConfig, UserError
from axonn_jax.core.grid import MOST_DEVICES
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import ModelConfig, preset, preset_names
from axonn_jax.core.settings import TrainConfig
from axonn_jax.files.data.corpora import DataConfig
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.run import config_file
from axonn_jax.run.config import Config, LogConfig
from axonn_jax.run.config_file import to_toml
from axonn_jax.run.validate import check

TINY = ModelConfig(layers=2, hidden=32, heads=4, seq_len=16)


def load(path, overrides=()):
    """The config of a file and flags."""
    return config_file.read(path, config_file.split_argv(overrides)[1])


@pytest.fixture
def config(prepared):
    return Config(model=TINY, data=DataConfig(str(prepared)))


# Model


def test_explicit_fields_fill_in_the_rest():
    shape = TINY.shape(default_vocab=300)
    assert shape == ModelShape(layers=2, hidden=32, heads=4, kv_heads=4, ffn=128, vocab=300, seq_len=16)
    assert replace(TINY, vocab=310).shape(default_vocab=300).vocab == 310


@pytest.mark.parametrize("name", preset_names())
def test_preset_alone_is_the_preset(name):
    assert ModelConfig(preset=name).shape() == preset(name)
    assert ModelConfig(preset=name).shape(default_vocab=264) == preset(name)


def test_preset_with_changes():
    changed = ModelConfig(preset="gpt2", layers=2, norm="rmsnorm", dropout=0.1, tied=False)
    assert changed.shape() == preset("gpt2", layers=2, norm="rmsnorm", dropout=0.1, tied=False)


def test_sizes_that_follow_another_keep_following_it():
    small = ModelConfig(preset="gpt2", hidden=128, heads=4).shape()
    assert (small.kv_heads, small.ffn) == (4, 512)
    assert ModelConfig(preset="gpt2", hidden=384, ffn=100).shape().ffn == 100
    grouped = ModelConfig(preset="llama3-8b", hidden=2048, heads=16).shape()
    assert (grouped.kv_heads, grouped.ffn) == (8, 14336)  # neither follows in this preset


def test_missing_fields_are_named():
    with pytest.raises(UserError, match=r"model\.heads, model\.vocab = \(not given\)"):
        replace(TINY, heads=None).shape()
    with pytest.raises(UserError, match=r"model\.preset = \(not given\): a preset \(gpt2, .*or model\.layers"):
        ModelConfig().shape()


# Check


def test_check_fills_in_the_model_and_creates_nothing(config, prepared, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    checked = check(config)
    assert checked.model == ModelConfig(**asdict(TINY.shape(default_vocab=300)))
    assert checked.model.shape() == TINY.shape(default_vocab=300)
    assert checked == replace(config, model=checked.model, log=checked.log)
    assert checked.log.dir == "runs/run"
    assert check(checked) == checked
    assert list(tmp_path.iterdir()) == []


def test_checked_preset_is_the_same_model(config):
    checked = check(replace(config, model=ModelConfig(preset="gpt2", layers=1, seq_len=16)))
    assert checked.model.preset == "gpt2"
    assert checked.model.shape() == preset("gpt2", layers=1, seq_len=16)


def test_limits_are_allowed(config):
    train = TrainConfig(steps=5, warmup=5, clip=0, weight_decay=0, beta1=0, min_lr_ratio=1, seed=2**32 - 1)
    check(replace(config, train=train))


def test_epochs_are_steps(config):
    rows = Manifest.load(config.data.path).rows("train", config.model.shape(default_vocab=300).seq_len)
    batch = config.train.global_batch
    for epochs in (1.0, 2.5, 1e-6):
        train = check(replace(config, train=replace(config.train, steps=7, epochs=epochs))).train
        assert train.steps == max(1, round(epochs * rows / batch))


def test_a_pipeline_cannot_be_told_to_scan_layers(config):
    scanned = replace(config, tensor=TensorConfig(scan_layers="yes"), train=replace(config.train, microbatches=2))
    assert check(scanned).tensor.scan_layers == "yes"
    with pytest.raises(UserError, match=r"tensor\.scan_layers = 'yes': auto or no"):
        check(replace(scanned, grid=GridShape(pipe=2)))


@pytest.mark.parametrize(
    ("prune", "says"),
    [
        (PruneConfig(density=0.5, scope="global"), r"prune\.scope = 'global': layer where grid\.pipe is above 1"),
        (
            PruneConfig(density=0.5, at_step=2),
            r"prune\.at_step = 2: 0 where grid\.pipe is above 1: pruning from the first step on",
        ),
    ],
    ids=["scope", "at_step"],
)
def test_what_a_pipeline_cannot_prune_is_known_before_anything_is_made(config, prune, says):
    given = replace(config, prune=prune, train=replace(config.train, microbatches=2))
    assert check(given).prune == prune
    with pytest.raises(UserError, match=says):
        check(replace(given, grid=GridShape(pipe=2)))


def test_log_directory_may_exist(config, tmp_path):
    for path in (tmp_path, tmp_path / "new" / "deep"):
        assert check(replace(config, log=LogConfig(dir=str(path)))).log.dir == str(path)


# Text


text = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
words = text.filter(lambda word: "," not in word)  # of lists, as a flag has them
paths = words.filter(lambda word: ":/" not in word)  # of this machine


def values(cls):
    """Every value that the types of a table allow."""

    def of(annotation):
        arguments = get_args(annotation)
        if get_origin(annotation) is Annotated:
            kind, note = arguments
            if kind is str:
                return paths
            ends = {"min_value": note.low, "max_value": None if note.high == math.inf else note.high}
            if kind is int:
                return st.integers(**ends)
            return st.floats(**ends, exclude_min=note.open_low, exclude_max=note.open_high and note.high != math.inf,
                             allow_infinity=False)  # fmt: skip
        if get_origin(annotation) is tuple:
            return st.lists(words, min_size=1, max_size=3).map(tuple)
        if get_origin(annotation) is Mapping:
            named = words if arguments[1] is str else of(arguments[1])
            return st.dictionaries(paths.filter(lambda word: "=" not in word), named, max_size=3)
        if type(None) in arguments:
            return st.none() | of(arguments[0])
        if arguments:
            return st.sampled_from(arguments)
        return {bool: st.booleans(), str: text}[annotation]

    if cls is GridShape:
        sizes = st.integers(1, MOST_DEVICES)
        return st.builds(GridShape, **{f.name: sizes for f in fields(GridShape)})
    hints = get_type_hints(cls, include_extras=True)
    return st.builds(cls, **{f.name: of(hints[f.name]) for f in fields(cls)})


configs = st.builds(Config, **{name: values(cls) for name, cls in get_type_hints(Config).items()})


@settings(deadline=None)
@given(configs)
def test_text_reads_back_as_the_same_config(config):
    assert config_file.loads(to_toml(config)) == config


@settings(deadline=None)
@given(configs)
def test_flags_say_the_same_as_a_file(config):
    plain = Config(data=DataConfig("elsewhere"))
    flags = []
    for table in fields(Config):
        for key in fields(getattr(config, table.name)):
            value = getattr(getattr(config, table.name), key.name)
            if isinstance(value, tuple):
                flags.append(f"--{table.name}.{key.name}={','.join(value)}")
            elif isinstance(value, dict):
                flags.append(f"--{table.name}.{key.name}={','.join(f'{k}={v}' for k, v in value.items())}")
            elif value is not None:
                flags.append(f"--{table.name}.{key.name}={str(value).lower() if isinstance(value, bool) else value}")
    rest, read = config_file.split_argv(flags)
    assert rest == []
    assert config_file.loads(to_toml(plain), read) == config


def test_written_config_of_a_checked_run_trains_the_same(config, tmp_path):
    checked = check(config)
    (tmp_path / "config.toml").write_text(to_toml(checked), encoding="utf-8")
    assert check(load(tmp_path / "config.toml")) == checked


def write(path, content):
    path.write_text(content, encoding="utf-8")
    return path


def test_load_with_overrides(tmp_path):
    path = write(tmp_path / "small.toml", '[data]\npath = "d"\n[train]\nsteps = 5\nlr = 1\n')
    assert load(path).train == TrainConfig(steps=5, lr=1.0)
    overrides = ["--train.steps", "7", "--train.lr=2e-3", "--train.eval-every", "3", "--log.tensorboard", "--grid.x=2"]
    config = load(path, overrides)
    assert config.train == TrainConfig(steps=7, lr=2e-3, eval_every=3)
    assert (config.log.tensorboard, config.grid) == (True, GridShape(x=2))
    assert load(path, ["--train.steps", "7", "--train.steps", "8"]).train.steps == 8
    assert isinstance(load(path).train.lr, float)


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--log.tensorboard"], True),
        (["--log.tensorboard", "true"], True),
        (["--log.tensorboard", "false"], False),
        (["--log.tensorboard=false"], False),
        (["--log.tensorboard", "--train.steps", "3"], True),
    ],
)
def test_switches(tmp_path, flags, value):
    path = write(tmp_path / "c.toml", '[data]\npath = "d"\n')
    assert load(path, flags).log.tensorboard is value


def test_switch_in_front_of_the_config_file():
    assert config_file.split_argv(["--log.tensorboard", "c.toml"]) == (["c.toml"], [("log.tensorboard", True)])
    assert config_file.split_argv(["--grid.x", "2", "c.toml"]) == (["c.toml"], [("grid.x", 2)])


def test_texts_stay_as_they_are_typed(tmp_path):
    path = write(tmp_path / "c.toml", '[data]\npath = "d"\n')
    assert load(path, ["--data.path", "123"]).data.path == "123"
    assert load(path, ["--data.path", "true"]).data.path == "true"
    assert load(path, ["--log.dir=a=b"]).log.dir == "a=b"


def test_run_directory_is_named_after_the_file(tmp_path):
    path = write(tmp_path / "gpt.v2.toml", '[data]\npath = "d"\n')
    assert load(path).log.dir == "runs/gpt.v2"
    assert load(path, ["--log.dir", "/scratch/{name}/1"]).log.dir == "/scratch/gpt.v2/1"
    assert load(path, ["--log.dir", "here"]).log.dir == "here"


# Documents


def test_every_field_is_documented_once_for_all():
    done = finished([sys.executable, ROOT / "scripts/docs/config_reference"])
    assert (done.returncode, done.stderr) == (0, "")
    page = done.stdout
    for table, keys in config_file.tables().items():
        section = page.split(f"\n## [{table}]\n")[1].split("\n## ")[0]
        for key in keys:
            assert f"| `{key}` | " in section


def test_every_key_has_a_default():
    """Rules between keys say what is missing."""
    Config(**{table.name: get_type_hints(Config)[table.name]() for table in fields(Config)})


def test_the_example_is_good(prepared):
    flags = ["--data.path", str(prepared), "--model.seq_len", "16"]
    checked = check(load(ROOT / "examples" / "gpt-tiny.toml", flags))
    assert checked.log.dir == "runs/gpt-tiny"
    for grid in (GridShape(x=2), GridShape(y=2, x=2), GridShape(data=2, z=2, y=2), GridShape(z=4), GridShape(y=4)):
        replace(checked.model, vocab=4096).shape().check_grid(grid)
        grid.check_batch(checked.train.global_batch, checked.train.microbatches)
