"""Manifests that a stranger has forged, checksum and all: nothing outside is read, nothing false is called sound."""

import hashlib
import json
import os
import re
import shutil
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from damage import forge, render
from saved import faults

from axonn_jax.cli.main import main
from axonn_jax.core.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.core.checkpoint.restore import load, newest
from axonn_jax.core.distributed.host_sync import LocalSync

SECRET = b"a secret of thirty-one bytes...\n"
SIZE, SHA256 = len(SECRET), hashlib.sha256(SECRET).hexdigest()
DATA = "part_000/_METADATA"


def listing(name, size=SIZE, sha256=SHA256):
    """Lists a file under a name, with the size and the checksum that the secret file has."""
    return lambda content: content["files"].update({name: {"bytes": size, "sha256": sha256}})


def part(name):
    return lambda content: content["arrays"]["params.kernel"].update(part=name)


def array(**fields):
    return lambda content: content["arrays"]["params.kernel"].update(fields)


def facts(**fields):
    return lambda content: content.update(fields)


def without(*keys):
    def change(content):
        for key in keys[:-1]:
            content = content[key]
        del content[keys[-1]]

    return change


def link(name, target):
    """A link in the checkpoint, listed as a file."""

    def change(content):
        os.symlink(target, f"step_00000004/{name}")
        listing(name)(content)

    return change


def fifo(content):
    os.mkfifo("step_00000004/part_000/pipe")
    listing("part_000/pipe", 0, hashlib.sha256().hexdigest())(content)


def folder(content):
    os.mkdir("step_00000004/part_000/folder")
    listing("part_000/folder", 4096)(content)


def outside_part(content):
    """All of another checkpoint's files and arrays, under names that lead there."""
    other = json.loads(Path("step_00000002/manifest.json").read_text())["content"]
    content["files"] = {f"../step_00000002/{name}": file for name, file in other["files"].items()}
    content["arrays"] = {
        name: {**stored, "part": f"../step_00000002/{stored['part']}"} for name, stored in other["arrays"].items()
    }


def linked_part(content):
    shutil.rmtree("step_00000004/part_000")
    os.symlink("../step_00000002/part_000", "step_00000004/part_000")
    other = json.loads(Path("step_00000002/manifest.json").read_text())["content"]
    content.update(files=other["files"], arrays=other["arrays"])


FORGED = {
    "a file above": listing("part_000/../../outside/secret"),
    "a file above, from the checkpoint": listing("../outside/secret"),
    "a file by its whole path": lambda content: listing(os.path.abspath("outside/secret"))(content),
    "a file of the system": listing("/etc/passwd"),
    "an endless file": listing("/dev/zero", 10**12),
    "an endless file by way of a link": link("part_000/zero", "/dev/zero"),
    "a link out": link("part_000/out", "../../outside/secret"),
    "a link to a folder out": link("part_000/out", "../../outside"),
    "a link to itself": link("part_000/self", "self"),
    "a pipe": fifo,
    "a folder": folder,
    "another checkpoint": outside_part,
    "another checkpoint by way of a link": linked_part,
    "a file beside the parts": listing("config.toml"),
    "a file of no name": listing(""),
    "the checkpoint": listing("."),
    "a path with an empty name": listing("part_000//_METADATA"),
    "a path with a dot": listing("part_000/./_METADATA"),
    "a name with NUL": listing("part_000/a\0b"),
    "a name with an escape": listing("part_000/\x1b]0;owned\x07"),
    "a name with a newline": listing("part_000/a\nb"),
    "a name with a surrogate": listing("part_000/\ud800"),
    "a backslash": listing("part_000\\..\\secret"),
    "a name of a million": listing("part_000/" + "a" * 10**6),
    "a path of a million": listing("part_000" + "/a" * 10**6),
    "a file that is not there": listing("part_000/none"),
    "a negative size": listing(DATA, -1),
    "a size that is text": listing(DATA, "12"),
    "a size that is true": listing(DATA, True),
    "a size without end": listing(DATA, 10**400),
    "no checksum": listing(DATA, 1, None),
    "a checksum of another kind": listing(DATA, 1, "md5:" + "0" * 32),
    "a file's fields missing": without("files", DATA, "sha256"),
    "a file not listed": without("files", DATA),
    "no files": facts(files={}),
    "files in a list": facts(files=[]),
    "a part above": part("../step_00000002/part_000"),
    "a part by its whole path": part("/tmp"),
    "a part that is the checkpoint": part(""),
    "a part of another name": part("part_0"),
    "a part that is not there": part("part_001"),
    "a part that is a number": part(0),
    "a shape below zero": array(shape=[-1, 64]),
    "a shape of text": array(shape="64"),
    "a shape of halves": array(shape=[1.5]),
    "a type with an escape": array(dtype="\x1b[2Jfloat32"),
    "an array's fields missing": without("arrays", "params.kernel", "dtype"),
    "arrays in a list": facts(arrays=[1]),
    "no arrays": without("arrays"),
    "no step": without("step"),
    "another step": facts(step=5),
    "a step in text": facts(step="4"),
    "a step of a half": facts(step=4.5),
    "no processes": facts(processes=0),
    "no grid": without("grid"),
    "a grid in a list": facts(grid=["pipe=1"]),
    "no date": without("saved"),
    "a date that is none": facts(saved="yesterday"),
    "a date without a zone": facts(saved="2026-01-01T00:00:00"),
    "a date at the end of time": facts(saved="9999-12-31T23:59:59-12:00"),
    "a date with NUL": facts(saved="2026-01-01\0"),
    "a run in a list": facts(run=[]),
    "versions of numbers": facts(versions={"jax": 1}),
    "a format in text": facts(format="1"),
    "a later format": facts(format=2),
    "a format in a list": facts(format=[1]),
    "a list": lambda content: [content],
    "nothing": lambda content: [],
    "a text": lambda content: "content",
}
"""What the manifest of step 4 is forged to say."""


@pytest.fixture
def place(two, tmp_path, monkeypatch):
    """Two checkpoints in the working directory, and a secret beside them."""
    run = tmp_path / "run"
    shutil.copytree(two, run)
    (run / "outside").mkdir()
    (run / "outside" / "secret").write_bytes(SECRET)
    monkeypatch.chdir(run)
    return run


OPENED = []
WATCHING = []
sys.addaudithook(lambda event, args: OPENED.append(args[0]) if WATCHING and event == "open" else None)


@pytest.fixture
def opened():
    """The paths that Python has opened since the test began."""
    OPENED.clear()
    WATCHING.append(True)
    yield OPENED
    WATCHING.clear()


@pytest.mark.parametrize("case", FORGED)
def test_a_forged_manifest_is_passed_over_for_the_checkpoint_before(case, place, opened):
    last = place / "step_00000004"
    forge(last, FORGED[case])
    began, said = time.monotonic(), []
    del opened[:]
    fault = faults(last)
    assert fault
    assert newest(place, LocalSync(), said.append).manifest.step == 2
    assert time.monotonic() - began < 10
    (line,) = said
    assert line.startswith(f"warning: checkpoint {last} is damaged and skipped: ")
    assert line.isprintable()
    assert len(line) < 1000
    for path in opened:
        real = os.path.realpath(path) if isinstance(path, (str, os.PathLike)) else ""
        assert not real.startswith(("/etc/passwd", "/dev/zero", str(place / "outside"))), path


@pytest.mark.parametrize("shape", [[128, 64], [64, 10**12], [64], [64, 64, 64]], ids=str)
def test_a_size_that_the_array_itself_has_not_is_no_zeros(shape, place):
    """Files and checksums are sound; what the array lacks would be filled up with zeros, of any size."""
    forge(place / "step_00000004", array(shape=shape))
    checkpoint, said = newest(place, LocalSync(), pytest.fail), tuple(shape)
    wanted = {"params.kernel": jax.ShapeDtypeStruct((128, 64), jnp.float32)}
    with pytest.raises(CorruptCheckpoint, match=rf"kernel is \(64, 64\), not {re.escape(str(said))} as in manifest"):
        load(checkpoint, wanted)


@pytest.mark.parametrize(
    "change",
    [
        facts(later={"field": [1]}),
        array(later="field"),
        lambda content: content["files"][DATA].update(later="field"),
        without("versions"),
    ],
    ids=["of the checkpoint", "of an array", "of a file", "left out"],
)
def test_fields_of_a_later_version_are_left_out(change, place):
    forge(place / "step_00000004", change)
    assert faults(place / "step_00000004") == ""
    assert newest(place, LocalSync(), pytest.fail).manifest.step == 4


def test_a_field_beside_content_and_checksum_is_left_out(place):
    file = place / "step_00000004" / "manifest.json"
    file.write_text(render({**json.loads(file.read_text()), "signature": "later"}))
    assert faults(place / "step_00000004") == ""


RAW = {
    "deep": b"[" * 10**6,
    "deep and closed": b'{"content": ' * 10**5 + b"1" + b"}" * 10**5,
    "without end": b'{"content": {"step": 1e999}, "sha256": ""}',
    "no number": b'{"content": {"step": NaN}, "sha256": ""}',
    "a number of a million digits": b'{"content": ' + b"1" * 10**6 + b"}",
    "not UTF-8": b'\xff\xfe{"content": 1}',
    "empty": b"",
    "a list": b"[]\n",
    "a number": b"12\n",
    "millions of lists": b"[" + b"[]," * 5 * 10**6 + b"[]]",
}


@pytest.mark.parametrize("case", RAW)
def test_what_is_no_manifest_is_damaged(case, place):
    (place / "step_00000004" / "manifest.json").write_bytes(RAW[case])
    began = time.monotonic()
    assert faults(place / "step_00000004") == "manifest.json has been altered or cut off"
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        os.mkdir,
        lambda path: os.symlink("/dev/zero", path),
        lambda path: os.symlink("../outside/secret", path),
    ],
)
def test_a_manifest_that_is_no_file_is_damaged(make, place):
    file = place / "step_00000004" / "manifest.json"
    file.unlink()
    make(file)
    assert faults(place / "step_00000004").startswith(
        ("manifest.json is a link that leads", "manifest.json is not a regular file")
    )


def test_a_manifest_of_a_gigabyte_is_not_read(place):
    os.truncate(place / "step_00000004" / "manifest.json", 1 << 30)
    assert "more than the" in faults(place / "step_00000004")


def test_a_file_beside_those_of_the_manifest_is_noticed(place):
    (place / "step_00000004" / "part_000" / "more").write_text("read, but never checked")
    assert faults(place / "step_00000004") == "part_000/more is not in the manifest"


def test_inspect_shows_all_of_it_as_text(place, capsys):
    forge(place / "step_00000004", facts(grid="\x1b]0;owned\x07\x1b[2J" + "x" * 10**6))
    listed = ("files has", "\x1b", "\x07")
    forge(place / "step_00000002", listing("part_000/\x1b]0;owned\x07"))
    (place / "aside_\x1b[2J").mkdir()
    for options in ([], ["--fast"], ["--json"]):
        assert main(["inspect", str(place), *options]) == 0
        out = capsys.readouterr().out
        assert out.replace("\n", "").isprintable(), options
        assert listed[0] in out or options == ["--json"]
