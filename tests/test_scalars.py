"""Public functions take scalars of other libraries as Python's own, or refuse them in one line."""

import enum
import inspect
import re
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import axonn_jax as ax
from axonn_jax.core.distributed.host_sync import LOCK
from axonn_jax.core.documents import created_folder, file_lock
from axonn_jax.core.errors import UserError, integer, plain, typed_arguments


class Name(enum.StrEnum):
    A = "auto"


class Mixed(str, enum.Enum):  # noqa: UP042 (whose str() is its name)
    A = "auto"


class Number(enum.IntEnum):
    TWO = 2


INTEGERS = [np.int64(2), np.uint8(2), np.array(2), jnp.int32(2), Number.TWO]
FLOATS = [np.float64(0.5), np.float32(0.5), jnp.float32(0.5), np.array(0.5), jnp.bfloat16(0.5)]
BOOLS = [np.True_, np.array(True), jnp.bool_(True)]
TEXTS = [Name.A, Mixed.A, np.str_("auto")]
EACH = [(2, INTEGERS), (0.5, FLOATS), (True, BOOLS), ("auto", TEXTS)]


@pytest.mark.parametrize(("own", "values"), EACH, ids=lambda each: str(type(each).__name__))
def test_scalars_of_other_libraries_become_pythons_own(own, values):
    for value in values:
        assert plain(value) == own
        assert type(plain(value)) is type(own), value
    rows = np.arange(3)
    assert plain(rows) is rows


@typed_arguments
def door(
    count: int | None = None, share: float = 0.0, flag: bool = False, kind: Literal["auto", "xla"] = "auto",
    text: str = "", path: str | Path = "", *names: str, **numbers: float,
):  # fmt: skip
    return [count, share, flag, kind, text, path, *names, *numbers.values()]


def test_a_function_gets_pythons_own_and_refuses_others_by_name():
    for name, own, values in zip(("count", "share", "flag", "kind"), *zip(*EACH, strict=True), strict=True):
        place = ["count", "share", "flag", "kind"].index(name)
        for value in values:
            assert type(door(**{name: value})[place]) is type(own), value
    where = Path("a")
    assert door(1, 2, True, "xla", Name.A, where, Name.A, rate=np.float32(0.5))[4:] == ["auto", where, "auto", 0.5]
    wrong = {
        "flag": [1, "yes", np.int64(0)],
        "kind": [1, "qqqq", True],
        "text": [Path("a"), 1],
        "path": [1, b"a"],
    }
    for name, values in wrong.items():
        for value in values:
            with pytest.raises(ax.UserError, match=f"^{name} = "):
                door(**{name: value})


@pytest.mark.parametrize("value", [True, np.True_, 2.0, np.float32(2), np.array([2]), "2", None, 0])
def test_an_integer_is_no_other_number(value):
    for make in (lambda: integer("n", value, 1), lambda: ax.GridShape(data=value), lambda: ax.in_flight(value)):
        with pytest.raises(ax.UserError, match="an integer of at least 1"):
            make()


@pytest.mark.parametrize("value", INTEGERS, ids=lambda each: type(each).__name__)
def test_sizes_and_settings_keep_pythons_own(value):
    assert all(type(size) is int for size in asdict(ax.GridShape(z=value)).values())
    made = ax.models.ModelShape(layers=value, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64, seq_len=16)
    assert type(made.layers) is int
    assert ax.MemoryConfig(activations=np.str_("full")).activations == "full"
    assert type(ax.TensorConfig(order=Mixed.A).order) is str


COMPUTED = ("GridShape", "ModelShape", "Loader.", "UserError", "Sampling.key", "Grid.")
"""Methods that compute with the numbers that they get."""
CALLED = ("Transformer.run_segment", "Transformer.counts", "SequenceModel.run_segment", "SequenceModel.counts")
"""Methods that an engine calls."""
CHECKED = typed_arguments(lambda: None).__code__


def scalars(hint):
    if get_origin(hint) is Literal:
        return {str}
    return {hint} & {bool, int, float, str} | {kind for each in get_args(hint) for kind in scalars(each)}


def public():
    for home, names in ((ax, ax.__all__), (ax.models, ax.models.__all__)):
        for name in names:
            if not inspect.isclass(found := getattr(home, name)):
                yield name, found
                continue
            for member, function in inspect.getmembers(found, inspect.isfunction):
                is_own = function.__module__.startswith("axonn_jax.") and not hasattr(nnx.Module, member)
                if (member == "__init__" and not is_dataclass(found)) or (is_own and not member.startswith("_")):
                    yield f"{name}.{member}", function


def test_every_public_function_of_scalars_has_its_arguments_checked():
    unchecked = set()
    for name, function in public():
        if not inspect.isfunction(function) or name.startswith((*COMPUTED, *CALLED)):
            continue
        hints = get_type_hints(inspect.unwrap(function))
        hints.pop("return", None)
        if function.__code__ is not CHECKED and any(map(scalars, hints.values())):
            unchecked.add(name)
    assert not unchecked


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: ax.init(dp=2), "dp = 2: no argument of init; did you mean 'data'?"),
        (lambda: ax.MemoryConfig(zer=1), "zer = 1: no argument of MemoryConfig; did you mean 'zero'?"),
        (lambda: ax.Trainer(microbatch=2), "microbatch = 2: no argument of Trainer; did you mean 'microbatches'?"),
    ],
)
def test_an_argument_near_to_a_known_one_is_one_line(call, line):
    with pytest.raises(UserError, match=f"^{re.escape(line)}$"):
        call()
    with pytest.raises(TypeError, match="unexpected keyword argument 'qqq'"):
        ax.MemoryConfig(qqq=1)


def test_what_is_no_list_of_batches_and_no_transformation_is_refused(trainer):
    with pytest.raises(UserError, match=r"^batches = .*: a list or an iterator$"):
        trainer.evaluate({"x": np.ones((2, 2))})
    with pytest.raises(UserError, match=r"^batches = 'none': at least one batch$"):
        trainer.evaluate([])
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)
    with pytest.raises(UserError, match=r"^optimizer = 'Optimizer': its .tx, as optax made it$"):
        ax.Trainer(model, optimizer, trainer.engine.grid, loss=lambda m, b: m(b).mean())


@pytest.fixture(scope="module")
def trainer():
    grid, model = ax.init(data=np.int64(1)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    numbers = {"microbatches": np.int64(1), "clip": np.float32(1), "seed": jnp.uint32(3)}
    return ax.Trainer(model, optax.sgd(0.1), grid, loss=lambda m, b: m(b).mean(), **numbers)


def test_a_save_takes_a_step_of_numpy(trainer, tmp_path):
    saved = trainer.save(tmp_path, np.int64(3))
    assert saved.name == "step_00000003"
    assert type(trainer.load(str(tmp_path))) is int
    assert trainer.rows(np.int64(2)) == [0, 1]
    with pytest.raises(ax.UserError, match=r"^learning_rate = '0.1': a number"):
        trainer.set(learning_rate="0.1")


def test_a_save_is_alone_in_the_directory_of_a_run(trainer, tmp_path):
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints"):
        with created_folder(tmp_path / "run"), file_lock(tmp_path / "run" / LOCK):
            with pytest.raises(OSError, match=r"not saved in .* without another run; process \d+"):
                trainer.save(folder, 1)
            assert not list(folder.glob("step_*"))
        assert [path.name for path in trainer.save(folder, 1).parent.iterdir()] == ["step_00000001"]
