"""Checkpoints on full and read-only disks: one line of warning, and nothing else on the terminal."""

import asyncio
import contextlib
import gc
import logging
import subprocess
import sys
import warnings

import jax.numpy as jnp
import pytest
from saved import disk_of, names, saver, state

from axonn_jax.state import part
from axonn_jax.state.checkpoint import faults
from axonn_jax.state.files import check
from axonn_jax.state.manifest import read


@pytest.fixture
def small_disk(tmp_path):
    with disk_of("256k", tmp_path / "disk") as disk:
        yield disk


@pytest.mark.parametrize("filler", [40_000, 150_000], ids=["it runs full while saving", "it is full before"])
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


@pytest.mark.parametrize("lot", [50_000, 32_000_000], ids=["others wait for their turn", "others fail as well"])
def test_a_disk_that_runs_full_while_more_is_written_is_one_line(small_disk, monkeypatch, caplog, lot):
    monkeypatch.setattr(part, "_PACED_LOT", lot)
    said = []
    with saver(small_disk / "checkpoints", said) as made:
        (small_disk / "filler").write_bytes(bytes(50_000))
        many = {f"params.{i}": jnp.ones(2500, jnp.float32) for i in range(20)}  # 200 kB, of which Orbax writes more
        made.save(4, many, {})
        assert made.settle().startswith("no space left on the device")
    gc.collect()  # of what waited or failed beside it nothing is left that complains
    assert len(said) == 1
    assert [record for record in caplog.records if record.name == "asyncio"] == []


def forgotten(where, name, said):
    """A task of the program `where` that failed and that nobody asked."""
    program = {}
    exec(compile("async def write():\n    raise OSError('no')", f"/{where}/write.py", "exec"), program)
    loop = asyncio.new_event_loop()
    task = loop.create_task(program["write"](), name=name)
    loop.run_until_complete(asyncio.wait([task]))
    loop.close()
    del task
    gc.collect()
    return [record for record in said.records if name in record.getMessage()]


def test_only_reports_of_the_writer_are_kept_back(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("asyncio"), "filters", [])  # a save that failed leaves its own there
    assert forgotten("orbax", "before", caplog)
    with saver(tmp_path / "checkpoints"):
        assert forgotten("orbax", "of the writer", caplog) == []
        assert forgotten("mine", "of the user", caplog)
    assert forgotten("orbax", "after", caplog)


@pytest.mark.parametrize("warned", ["default", "error"])
def test_a_write_that_never_began_is_not_told(tmp_path, monkeypatch, warned):
    heard = []
    monkeypatch.setattr(sys, "unraisablehook", heard.append)

    async def async_serialize_and_more():
        pass

    async def of_the_user():
        pass

    with saver(tmp_path / "checkpoints"), warnings.catch_warnings():
        if warned == "error":  # in front of what the saver asked for
            warnings.simplefilter("error")
        async_serialize_and_more.__qualname__ = "async_serialize_and_more.<locals>.write"
        async_serialize_and_more()
        assert heard == []
        with pytest.warns(RuntimeWarning, match="of_the_user") if warned == "default" else contextlib.nullcontext():
            of_the_user()
        assert len(heard) == (warned == "error")


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
    assert check(folder / "step_00000002").step == 2
