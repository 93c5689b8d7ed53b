"""Checkpoints on real disks: complete or not there, kept or retired, damaged in 200 ways."""

import gc
import math
import os
import random
import shutil
import threading
import time
from importlib import metadata

import grids
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from commands import answer
from jax import NamedSharding, P
from saved import GRID, check_files, faults, names, saver, state

from axonn_jax import GridShape, UserError
from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint import orbax
from axonn_jax.core.checkpoint.restore import Checkpoint, check_shapes, load, newest, resolve_checkpoint
from axonn_jax.core.checkpoint.save import Saver
from axonn_jax.core.distributed.host_sync import LocalSync

CORRUPTIONS = 200


def wanted(**kinds):
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    return {
        name: jax.ShapeDtypeStruct(value.shape, kinds.get(name, value.dtype), sharding=one)
        for name, value in state().items()
    }


def test_what_was_saved_is_read_on_another_grid(tmp_path):
    with saver(tmp_path) as made:
        made.save(7, state(7), {"position": 112})
        assert made.settle() == ""
    found = newest(tmp_path, LocalSync(), pytest.fail)
    assert (found.manifest.step, found.manifest.run, found.manifest.grid) == (7, {"position": 112}, str(GRID))
    loaded = load(found, wanted())
    for name, value in state(7).items():
        np.testing.assert_array_equal(loaded[name], value)
        assert loaded[name].sharding.mesh.size == 1
    assert set(load(found, {"params.bias": wanted()["params.bias"]})) == {"params.bias"}


def test_a_part_without_an_array_is_saved(tmp_path):
    """A rank of the pipe has none where its layers have no adapters: Orbax refuses an empty tree."""
    with saver(tmp_path) as made:
        made.save(7, {}, {"position": 112})
        assert made.settle() == ""
    assert newest(tmp_path, LocalSync(), pytest.fail).manifest.arrays == {}


def test_links_in_the_place_of_checkpoints_are_replaced_not_followed(tmp_path):
    victim = tmp_path / "victim"
    victim.mkdir()
    (victim / "keep").touch()
    place = tmp_path / "checkpoints"
    with saver(place, keep=1) as made:
        for step in (1, 2):
            made.save(step, state(step), {})
            for number, target in ((step, tmp_path / "gone"), (step + 1, victim)):
                for kind in ("unfinished_", "removed_", ""):
                    if not os.path.lexists(link := place / f"{kind}step_{number:08d}"):
                        link.symlink_to(target)
            assert made.settle() == ""
            assert check_files(place / f"step_{step:08d}").step == step
        made.clean()
    assert names(place) == ["step_00000002", "step_00000003"]
    assert names(victim) == ["keep"]


def test_a_save_names_the_packages_that_the_run_began_with(tmp_path, monkeypatch):
    """An environment that is renewed under a run has none of them for a moment."""
    with saver(tmp_path) as made:
        monkeypatch.setattr(metadata, "version", lambda name: pytest.fail(f"{name} was looked up"))
        made.save(1, state(), {})
        assert made.settle() == ""
    assert check_files(tmp_path / "step_00000001").versions["jax"] == jax.__version__


def test_a_save_holds_the_state_of_its_step_though_the_next_step_takes_the_arrays(tmp_path):
    advance = jax.jit(lambda tree: jax.tree.map(lambda a: a + 1, tree), donate_argnums=0)
    now = state(3)
    with saver(tmp_path) as made:
        made.save(3, dict(now), {})
        for _ in range(5):
            now = advance(now)
    loaded = load(newest(tmp_path, LocalSync(), pytest.fail), wanted())
    np.testing.assert_array_equal(loaded["params.kernel"], state(3)["params.kernel"])


def test_a_file_that_its_writer_did_not_see_is_in_the_manifest_all_the_same(tmp_path, monkeypatch):
    """As a file system's old listing on another host would have it."""
    monkeypatch.setattr(orbax, "written", lambda folder, process: [])
    with saver(tmp_path) as made:
        made.save(1, state(1), {})
        assert made.settle() == ""
    path = tmp_path / "step_00000001"
    there = {file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file()}
    assert set(check_files(path).files) == there - {"manifest.json"}


def test_the_newest_and_every_so_many_are_kept(tmp_path):
    with saver(tmp_path, keep=2, keep_every=6) as made:
        for step in range(2, 17, 2):
            made.save(step, state(step), {})
    assert names(tmp_path) == [f"step_{step:08d}" for step in (6, 12, 14, 16)]


def test_the_best_stays_until_a_better_one_is_complete(tmp_path, monkeypatch):
    go, finish = threading.Event(), orbax.OrbaxWriter.finish
    monkeypatch.setattr(orbax.OrbaxWriter, "finish", lambda self, folder: go.wait() and finish(self, folder))
    go.set()
    with saver(tmp_path, keep=1) as made:
        made.save(1, state(1), {}, loss=2.0)
        made.settle()
        go.clear()
        made.save(2, state(2), {})
        go.set()
        made.settle()
        assert names(tmp_path) == ["step_00000001", "step_00000002"]
        made.save(3, state(3), {}, loss=1.0)
    assert names(tmp_path) == ["step_00000003"]


def test_the_best_is_the_best_of_the_complete_ones(tmp_path, monkeypatch):
    """The save of a better one fails, and the saves behind it succeed."""
    start = orbax.OrbaxWriter.start

    def full(self, folder, state, progress):
        if folder.name.endswith("3"):
            raise OSError(28, "No space left on device")
        start(self, folder, state, progress)

    monkeypatch.setattr(orbax.OrbaxWriter, "start", full)
    with saver(tmp_path, keep=1) as made:
        for step, loss in ((1, 2.0), (2, 3.0), (3, 1.0), (4, math.inf), (5, 2.5)):
            made.save(step, state(step), {}, loss=loss)
        made.settle()
        assert names(tmp_path) == ["step_00000001", "step_00000005"]
        assert (made.best, made.losses) == (1, {1: 2.0, 2: 3.0, 5: 2.5})
        made.save(6, state(6), {}, loss=1.5)
    assert names(tmp_path) == ["step_00000006"]


def test_leftovers_go_and_strangers_stay(tmp_path):
    for name in ("unfinished_step_00000003", "removed_step_00000001", "notes", "step_x"):
        (tmp_path / name / "deeper").mkdir(parents=True)
    with saver(tmp_path) as made:
        made.clean()
    assert names(tmp_path) == ["notes", "step_x"]
    assert newest(tmp_path, LocalSync(), pytest.fail) is None


def test_what_does_not_fit_is_listed(tmp_path):
    with saver(tmp_path) as made:
        made.save(1, state(1), {})
    found = newest(tmp_path, LocalSync(), pytest.fail)
    shapes = {"params.kernel": (64, 32), "params.bias": (8,), "params.new": (2,)}
    with pytest.raises(UserError) as caught:
        check_shapes(found, shapes, "checkpoint.resume")
    for said in ("1 missing: params.new;", "1 unexpected: optimizer.0.count;",
                 "1 of another shape: params.kernel (64, 64) instead of (64, 32)"):  # fmt: skip
        assert said in str(caught.value)
    check_shapes(found, {"params.kernel": (64, 64), "params.bias": (8,)}, "checkpoint.weights", only="params.")


def test_another_type_is_converted(tmp_path):
    with saver(tmp_path) as made:
        made.save(1, state(1), {})
    kinds = {"params.kernel": jnp.bfloat16}
    loaded = load(newest(tmp_path, LocalSync(), pytest.fail), wanted(**kinds))
    np.testing.assert_array_equal(loaded["params.kernel"], state(1)["params.kernel"].astype(jnp.bfloat16))


def truncate(path, chance):
    size = path.stat().st_size
    os.truncate(path, chance.randrange(size))


def flip(path, chance):
    data = bytearray(path.read_bytes())
    data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)


def delete(path, chance):
    path.unlink()


def append(path, chance):
    path.write_bytes(path.read_bytes() + bytes([chance.randrange(256)]))


def swap(path, chance):
    """With the same file of the other checkpoint where there is one, else with another of its own."""
    step = next(parent for parent in path.parents if parent.name == "step_00000004")
    twin = step.with_name("step_00000002") / path.relative_to(step)
    others = [p for p in step.rglob("*") if p.is_file() and p.read_bytes() != path.read_bytes()]
    other = twin if twin.exists() and twin.read_bytes() != path.read_bytes() else chance.choice(others)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("number", range(CORRUPTIONS))
def test_every_corruption_is_named_and_the_one_before_used(number, two, tmp_path):
    chance = random.Random(number)
    folder = tmp_path / "checkpoints"
    shutil.copytree(two, folder)
    last = folder / "step_00000004"
    path = chance.choice(sorted(p for p in last.rglob("*") if p.is_file() and p.stat().st_size))
    (truncate, flip, delete, append, swap)[number % 5](path, chance)
    name = path.relative_to(last).as_posix()
    assert name in faults(last)
    said = []
    found = newest(folder, LocalSync(), said.append)
    assert found.manifest.step == 2
    (line,) = said
    assert line.startswith(f"warning: checkpoint {last} is damaged and skipped: ")
    assert name in line
    assert "\n" not in line
    with pytest.raises(UserError, match="a valid checkpoint; "):
        resolve_checkpoint(last, LocalSync(), pytest.fail, "checkpoint.resume")


def test_a_checkpoint_under_another_ones_name_is_noticed(two, tmp_path):
    shutil.copytree(two / "step_00000002", tmp_path / "step_00000004")
    assert "manifest.json is of step 2" in faults(tmp_path / "step_00000004")


def test_without_a_sound_one_there_is_none(two, tmp_path):
    shutil.copytree(two, tmp_path / "c")
    for path in (tmp_path / "c").iterdir():
        (path / "manifest.json").unlink()
    said = []
    assert newest(tmp_path / "c", LocalSync(), said.append) is None
    assert len(said) == 2


def test_inspect_lists_sound_and_damaged_ones(two, tmp_path, capsys):
    shutil.copytree(two, tmp_path / "checkpoints")
    victim = next((tmp_path / "checkpoints" / "step_00000004" / "part_000" / "d").iterdir())
    flip(victim, random.Random(0))
    newest_row, row = answer(capsys, "inspect", str(tmp_path))["checkpoints"]
    assert (newest_row["step"], newest_row["valid"], row["step"], row["valid"]) == (4, False, 2, True)
    assert victim.name in newest_row["fault"]
    assert (row["position"], row["grid"], row["processes"]) == (2, str(GRID), 1)
    assert row["bytes"] == sum(p.stat().st_size for p in (two / "step_00000002").rglob("*")
                               if p.is_file() and p.name != "manifest.json")  # fmt: skip
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "DAMAGED: part_000/d/" in shown
    assert ", sound" in shown
    (tmp_path / "checkpoints" / "step_00000002" / "manifest.json").unlink()
    assert main(["inspect", str(tmp_path)]) == 1
    assert main(["inspect", str(tmp_path / "nowhere")]) == 2


def test_a_directory_that_vanishes_is_one_line(tmp_path):
    said = []
    folder = tmp_path / "checkpoints"
    with saver(folder, said) as made:
        made.save(2, state(2), {})
        made.settle()
        shutil.rmtree(folder)
        folder.write_text("not a directory any more")
        made.save(4, state(4), {})
        assert made.settle()
    (line,) = said
    assert "\n" not in line
    assert "was not saved" in line


# Orbax closes its event loop at the first broken array; what tensorstore tells it of the next ones then has no taker.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_found_is_read_where_files_change_after_the_check(two, tmp_path):
    """Between the check and the reading only another process could alter a file: then it is an error that names it."""
    shutil.copytree(two, tmp_path / "c")
    path = tmp_path / "c" / "step_00000004"
    found = Checkpoint(path, check_files(path))
    for data in (path / "part_000").rglob("d/*"):
        data.write_bytes(b"x" * data.stat().st_size)
    with pytest.raises(Exception, match="part_000: "):
        load(found, wanted())
    time.sleep(0.5)  # what comes late belongs to this test, not to the next
    gc.collect()


def arrays(count, elements):
    one = NamedSharding(grids.lay(GridShape()).mesh, P())
    return {f"params.{i}": jax.device_put(jnp.full(elements, i, jnp.float32), one) for i in range(count)}


class Watch:
    """Notes how it is used, in the place of what looks after the growth of the process."""

    def __init__(self, margin):
        self.margin, self.closed = margin, False

    def close(self):
        self.closed = True


def test_the_growth_of_the_process_is_watched_until_a_save_is_written(tmp_path, monkeypatch):
    watches, said = [], []
    monkeypatch.setattr(orbax, "GrowthLimit", lambda margin: watches.append(Watch(margin)) or watches[-1])
    monkeypatch.setattr(orbax, "WORTH_IT", 100_000)
    made = Saver(tmp_path, grids.lay(GridShape()), LocalSync(), warn=said.append)
    made.save(2, arrays(4, 10_000), {})
    (watch,) = watches
    assert watch.margin == 8_000
    assert made.settle() == ""
    assert watch.closed
    made.save(4, arrays(4, 1_000), {})  # too little to look after
    assert made.settle() == ""
    assert len(watches) == 1
    made.close()


@pytest.mark.slow
def test_an_array_may_be_larger_than_what_is_written_or_read_at_a_time(tmp_path):
    state, said = arrays(2, 260_000_000), []
    wanted = {
        name: jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=value.sharding) for name, value in state.items()
    }
    made = Saver(tmp_path, grids.lay(GridShape()), LocalSync(), warn=said.append)
    made.save(2, dict(state), {})
    assert made.settle() == ""
    made.close()
    del state
    loaded = load(newest(tmp_path, LocalSync(), pytest.fail), wanted)
    assert [float(loaded[f"params.{i}"].mean()) for i in range(2)] == [0.0, 1.0]
