"""Resuming in a script: the newest checkpoint or nothing, so many kept, and the state of the script's own data."""

import grids
import jax
import numpy as np
import optax
import pytest
from flax import nnx
from trainers import make_trainer, params, same

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.core.engines.saving import iterator_of

ROWS = np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32)


def loss(model, rows):
    return (model(rows) ** 2).mean()


def trainer(axes=GridShape()):  # noqa: B008 (frozen)
    return make_trainer(nnx.Linear(4, 2, rngs=nnx.Rngs(0)), optax.adam(1e-2), axes, loss=loss)


def test_a_run_goes_on_where_its_directory_ends(tmp_path):
    first = trainer()
    assert ax.latest(tmp_path) is first.resume(tmp_path) is first.iterator is None
    for step in range(1, 6):
        first.step(ROWS)
        path = first.save(tmp_path, step, keep=3, iterator={"seen": np.int64(8 * step), "order": [1, 2]})
    assert sorted(each.name for each in tmp_path.iterdir()) == [f"step_{step:08d}" for step in (3, 4, 5)]
    assert ax.latest(str(tmp_path)) == path
    second = trainer(GridShape(data=2))
    assert second.resume(tmp_path) == 5
    assert second.iterator == {"seen": 40, "order": [1, 2]}
    same(params(second), params(first))
    again = trainer()
    assert again.load(ax.latest(tmp_path), weights_only=True) == 5
    assert again.iterator is None


def test_a_damaged_newest_checkpoint_is_passed_over_with_a_line(tmp_path, capfd):
    first = trainer()
    for step in (1, 2):
        first.save(tmp_path, step)
    (ax.latest(tmp_path) / "manifest.json").unlink()
    assert trainer().resume(tmp_path) == 1
    assert "step_00000002 is damaged and skipped" in capfd.readouterr().err


@pytest.mark.parametrize("state", [object(), b"state", float("nan"), {"a": {2}}], ids=["object", "bytes", "nan", "set"])
def test_a_state_that_json_does_not_hold_is_refused_before_anything_is_written(tmp_path, state):
    with pytest.raises(UserError, match=r"^iterator = '\w+': numbers, texts, lists and tables of them, as JSON holds"):
        trainer().save(tmp_path / "out", 1, iterator=state)
    assert not (tmp_path / "out").exists()
    with pytest.raises(UserError, match=r"^keep = 0: an integer of at least 1"):
        trainer().save(tmp_path / "out", 1, keep=0)


def test_states_of_other_numbers_of_processes():
    grid = grids.lay(GridShape())
    assert iterator_of({}, grid) is None
    assert iterator_of({"iterators": [3, 3]}, grid) == 3
    assert iterator_of({"iterators": [3, 4]}, grid._replace(size=2, rank=1)) == 4
    with pytest.raises(UserError, match=r"^iterator = '1 processes': 2 processes, as of the save"):
        iterator_of({"iterators": [3, 4]}, grid)


def test_orbax_reads_a_checkpoint_alone_on_other_devices(tmp_path):
    ocp = pytest.importorskip("orbax.checkpoint")
    first = trainer(GridShape(data=2, x=2))
    first.step(ROWS)
    reader, part = ocp.StandardCheckpointer(), first.save(tmp_path, 1) / "part_000"
    everywhere = jax.NamedSharding(jax.make_mesh((3,), ("batch",), devices=jax.devices()[:3]), jax.P())
    stored = reader.metadata(part).item_metadata.tree.items()
    wanted = {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=everywhere) for name, a in stored}
    arrays = reader.restore(part, wanted)
    same({name: arrays[f"params.{name}"] for name in params(first)}, params(first))
