"""Prepares by real processes into one place: started together, killed, on a full disk, beside a user's files."""

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
from saved import disk_of

from axonn_jax.core.errors import UserError
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare

PACKAGE = Path(__file__).resolve().parents[3] / "axonn_jax"
IN_ITS_PLACE = {  # what writes files in their places, and why
    "core/documents.py": "it is what all others call",
    "files/data/prepare.py": "into a directory that is renamed once it is whole",
    "files/adapters/peft.py": "as convert",
    "judge/build.py": "into a directory of its own, which it removes",
    "cli/convert.py": "into a directory that is not there yet",
    "files/huggingface/export.py": "as convert",
    "run/tracking/records.py": "beside, and renames",
}
STDLIB = Path(sysconfig.get_paths()["stdlib"])
HANGING = """
import pathlib, sys, time
from axonn_jax.files.data.prepare import prepare

def report(phase, done, total):
    if phase == "encoding":
        print("there", flush=True)
        time.sleep(120)

prepare(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), vocab=300, include=["*.py"], report=report)
"""


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """Text that takes a prepare a second or more on any machine: longer than two of a pair begin apart."""
    folder = tmp_path_factory.mktemp("texts")
    for file in STDLIB.glob("*.py"):
        shutil.copy(file, folder)
    return folder


PROGRESS = ("reading, ", "counting words, ", "learning merges, ", "encoding", "skipped ")


def start(source, out, *flags):
    command = [sys.executable, "-m", "axonn_jax.cli.main", "prepare", source, out, "--vocab", "400", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def small(out, **options):
    return prepare(STDLIB / "json", out, vocab=300, include=["*.py"], **options)[0]


def errors(text):
    return [line for line in text.splitlines() if not line.startswith(PROGRESS)]


def whole(folder):
    """The seeds of the whole prepared directories in a folder; fails for one that is not."""
    seeds = {}
    for place in folder.iterdir():
        if (place / "manifest.json").exists():
            manifest = Manifest.load(place)
            manifest.verify()
            seeds[place.name] = manifest.options["seed"]
    return seeds


@pytest.fixture
def hanging(tmp_path):
    """A prepare into tmp_path/out that is nearly done and goes no further."""
    process = subprocess.Popen(
        [sys.executable, "-c", HANGING, STDLIB / "json", tmp_path / "out"], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "there\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def begin(phase, act):
    """A report that acts once, when a phase begins."""
    acted = []

    def report(name, done, total):
        if name == phase and not acted:
            acted.append(act())

    return report


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("phase", ["reading", "encoding"])
def test_what_a_user_puts_there_meanwhile_stays(tmp_path, force, phase):
    out = tmp_path / "out"
    if force:
        small(out, seed=9)

    def notes():
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")

    with pytest.raises(
        UserError, match=r"OUT_DIR = .*'notes.txt' and stays unchanged; .* directory is in '(.*)'$"
    ) as e:
        small(out, force=force, report=begin(phase, notes))
    assert (out / "notes.txt").read_text() == "mine"
    kept = Path(str(e.value).split("'")[-2])
    assert whole(tmp_path) == ({kept.name: 0, "out": 9} if force else {kept.name: 0})
    assert sorted(os.listdir(tmp_path)) == sorted(["out", kept.name])


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda out: out.write_text("mine"), "there is nothing yet; the prepared directory"),
        (lambda out: out.symlink_to("nowhere"), "there is nothing yet; the prepared directory"),
        (
            lambda out: small(out.parent / "other").path.rename(out),
            "--force replaces this prepared one; the prepared directory",
        ),
    ],
)
def test_whatever_else_is_there_meanwhile_stays_too(tmp_path, make, says):
    with pytest.raises(UserError, match=says):
        small(tmp_path / "out", seed=5, report=begin("encoding", lambda: make(tmp_path / "out")))
    assert 5 in whole(tmp_path).values()
    assert whole(tmp_path).get("out") in (None, 0)
    assert len(os.listdir(tmp_path)) == 2


def test_an_empty_directory_made_meanwhile_is_replaced(tmp_path):
    small(tmp_path / "out", report=begin("encoding", (tmp_path / "out").mkdir))
    assert whole(tmp_path) == {"out": 0}
    assert os.listdir(tmp_path) == ["out"]


def test_what_comes_in_the_very_last_moment_is_moved_along(tmp_path):
    """The state between the two renames of a replacement, with a file that came after the last look."""
    small(tmp_path / "out", seed=1)
    small(tmp_path / ".out.0123abcd.old", seed=2)
    (tmp_path / ".out.0123abcd.old" / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match=r"'notes.txt' and stays unchanged$"):
        small(tmp_path / "out", force=True)
    assert (tmp_path / "out" / "notes.txt").read_text() == "mine"
    assert os.listdir(tmp_path) == ["out"]


def test_a_prepare_killed_between_the_two_renames_gives_the_earlier_one_back(tmp_path):
    small(tmp_path / ".out.0123abcd.old", seed=2)
    with pytest.raises(UserError, match=r"--force replaces this prepared one$"):
        small(tmp_path / "out")
    assert whole(tmp_path) == {"out": 2}
    assert os.listdir(tmp_path) == ["out"]


def test_a_second_prepare_says_who_writes_and_a_killed_ones_remains_go(tmp_path, hanging):
    partial = [name for name in os.listdir(tmp_path) if name.endswith(".partial")]
    assert len(partial) == 1
    with pytest.raises(UserError, match=rf"OUT_DIR = .*without a writer; process {hanging.pid} on \S+ since 2.*"):
        small(tmp_path / "out", force=True)
    assert set(partial) < set(os.listdir(tmp_path))
    hanging.send_signal(signal.SIGKILL)
    hanging.wait()
    assert set(partial) < set(os.listdir(tmp_path))
    lookalikes = [".out.0123abcd.partial", ".outer.0123abcd.partial", ".out.mine.partial"]
    for name in lookalikes:
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text("mine")
    small(tmp_path / "out")
    assert whole(tmp_path) == {"out": 0}
    assert sorted(os.listdir(tmp_path)) == sorted(["out", *lookalikes])
    assert all((tmp_path / name / "notes.txt").read_text() == "mine" for name in lookalikes)


def test_a_refusal_leaves_no_directories_behind(tmp_path):
    with pytest.raises(UserError, match="--include"):
        prepare(STDLIB / "json", tmp_path / "a" / "b" / "out", vocab=300, include=["*.nothing"])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("size", ["4k", "48k", "80k"])  # the first file fails, a later one, the last
def test_a_full_disk_is_one_line_and_leaves_nothing(tmp_path, size):
    with disk_of(size, tmp_path / "disk") as disk:
        command = [sys.executable, "-m", "axonn_jax.cli.main", "prepare", STDLIB / "json", disk / "out"]
        done = subprocess.run([*command, "--vocab", "300"], capture_output=True, text=True, timeout=100)
        assert (done.returncode, done.stdout) == (2, "")
        line = f"error: OUT_DIR = '{disk / 'out'}': a place that can be written; No space left on device"
        assert errors(done.stderr) == [line]
        assert os.listdir(disk) == []


def test_the_whole_of_a_mounted_disk_is_refused_at_once(tmp_path):
    with disk_of("1m", tmp_path / "disk") as disk:
        with pytest.raises(UserError, match=r"OUT_DIR = .*a directory below: .*mount point"):
            small(disk, report=lambda *_: pytest.fail("something was read"))
        assert os.listdir(tmp_path) == ["disk"]


def test_files_too_are_whole_or_as_they_were():
    """No command writes one in its place, where a full disk would cut it off."""
    writing = re.compile(r"\.(write_text|write_bytes|savefig)\(")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if writing.search(path.read_text())}
    assert found == set(IN_ITS_PLACE)


def race(texts, folder, chance, *, force, notes):
    """Starts two prepares into one place at random moments, and perhaps puts a file there; checks what is left."""
    folder.mkdir()
    out, flags = folder / "out", ["--force"] if force else []
    if force:
        small(out, seed=9)
    processes = []
    for seed in (1, 2):
        processes.append(start(texts, out, "--seed", str(seed), *flags))
        time.sleep(chance.uniform(0, 0.5))
    if notes:
        begun = chance.choice(["", "valid-00000.bin"])  # early, or about when it is renamed
        while not any(folder.glob(f".out.*.partial/{begun}")) and processes[0].poll() is None:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.1 if begun else 2))
        out.mkdir(exist_ok=True)
        (out / "notes.txt").write_text("mine")
    ends = [process.communicate(timeout=200) for process in processes]
    statuses = [process.returncode for process in processes]
    for status, (text, err) in zip(statuses, ends, strict=True):
        assert status in (0, 2), err
        assert len(errors(err)) == (status == 2)
        assert (text == "") == (status == 2)
    found = whole(folder)
    assert not any(name.startswith(".") for name in os.listdir(folder))
    if not notes:
        assert sorted(statuses) == [0, 2]
        assert found == {"out": 1 if statuses[0] == 0 else 2}
        return statuses, "written"
    assert (out / "notes.txt").read_text() == "mine"
    written = [seed for seed in found.values() if seed != 9]
    if 0 in statuses:
        assert statuses.count(0) == 1
        one, other = (1, 2) if statuses[0] == 0 else (2, 1)
        assert found.pop("out") == one
        assert [*found.values()] in ([], [other])  # kept beside: it began when the first had ended, and met the notes
        return statuses, "written, notes after"
    assert len(written) == 1  # kept beside
    assert found.get("out") == (9 if force else None)
    return statuses, f"notes before, kept {written}"


def test_of_two_prepares_into_one_place_one_writes(texts, tmp_path):
    race(texts, tmp_path / "place", random.Random(0), force=True, notes=False)


@pytest.mark.slow
@pytest.mark.parametrize("number", range(20))
def test_of_twenty_pairs_of_prepares_one_writes_and_nothing_is_lost(texts, tmp_path, number):
    for force in (False, True):
        print(race(texts, tmp_path / f"{force}", random.Random(number), force=force, notes=False))
        print(race(texts, tmp_path / f"{force}-notes", random.Random(number), force=force, notes=True))
