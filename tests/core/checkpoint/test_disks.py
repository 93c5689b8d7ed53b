"""Checkpoints on full and read-only disks: one line of warning, and nothing else on the terminal."""

import gc
import subprocess

import jax.numpy as jnp
import pytest
from saved import check_files, disk_of, faults, names, saver, state

from axonn_jax.core.checkpoint.manifest import read


@pytest.fixture
def small_disk(tmp_path):
    with disk_of("256k", tmp_path / "disk") as disk:
        yield disk


@pytest.mark.parametrize("filler", [65_000, 150_000], ids=["it runs full while saving", "it is full before"])
def test_a_full_disk_is_one_line_and_the_one_before_stays(small_disk, filler):
    said = []
    folder = small_disk / "checkpoints"
    with saver(folder, said) as made:
        made.save(2, state(2), {})
        assert made.settle() == ""
        (small_disk / "filler").write_bytes(bytes(filler))
        big = {**state(4), "params.kernel": jnp.ones((64, 480), jnp.float32)}  # 123 kB, of which Orbax writes more
        made.save(4, big, {})
        assert made.settle().startswith("no space left on the device")
        assert made.settle() == ""
        (line,) = said
        assert line.startswith(f"warning: the checkpoint of step 4 was not saved in {folder}: no space left on")
        assert line.endswith("; the last complete one is step 2")
        assert names(folder) == ["step_00000002"]
        assert faults(folder / "step_00000002") == ""
        (small_disk / "filler").unlink()
        made.save(6, state(6), {})  # the next one is tried again
        assert made.settle() == ""
    assert read(folder / "step_00000006").step == 6


@pytest.mark.parametrize("filler", [35_000, 45_000, 55_000])
def test_a_disk_that_runs_full_while_more_is_written_is_one_line(filler, small_disk, caplog):
    said = []
    with saver(small_disk / "checkpoints", said) as made:
        (small_disk / "filler").write_bytes(bytes(filler))
        many = {f"params.{i}": jnp.ones(2500, jnp.float32) for i in range(20)}  # 200 kB, of which Orbax writes more
        made.save(4, many, {})
        assert made.settle().startswith("no space left on the device")
    gc.collect()  # of what waited or failed beside it nothing is left that complains
    assert len(said) == 1
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def test_a_read_only_disk_is_one_line(small_disk):
    said = []
    folder = small_disk / "checkpoints"
    with saver(folder, said) as made:
        made.save(2, state(2), {})
        assert made.settle() == ""
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        made.save(4, state(4), {})
        assert made.settle() == "the file system is read-only"
    (line,) = said
    assert "the file system is read-only; the last complete one is step 2" in line
    assert check_files(folder / "step_00000002").step == 2
