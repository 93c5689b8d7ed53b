"""Locks between real processes, also killed ones."""

import errno
import fcntl
import os
import signal
import subprocess
import sys
import threading

import pytest

from axonn_jax.core.documents import LockHeldError, file_lock

HOLD = "import sys, time, pathlib\nfrom axonn_jax.core.documents import file_lock\n"
HOLD += "with file_lock(pathlib.Path(sys.argv[1])) as locked:\n    print(locked, flush=True); time.sleep(60)\n"


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "lock"], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "True\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def test_a_lock_says_who_holds_it_and_is_free_once_the_holder_was_killed(holder, tmp_path):
    with (
        pytest.raises(LockHeldError, match=rf"^process {holder.pid} on \S+ since 2\d\d\d-"),
        file_lock(tmp_path / "lock"),
    ):
        pass
    assert (tmp_path / "lock").exists()
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    assert (tmp_path / "lock").exists()
    with file_lock(tmp_path / "lock") as locked:
        assert locked
        assert f"process {os.getpid()} on" in (tmp_path / "lock").read_text()
    assert not (tmp_path / "lock").exists()


def test_never_two_hold_it_at_once(tmp_path):
    inside, most, taken = [], [], []

    def work():
        for _ in range(300):
            try:
                with file_lock(tmp_path / "lock"):
                    inside.append(1)
                    most.append(len(inside))
                    taken.append(1)
                    inside.pop()
            except LockHeldError:
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(most) == {1}
    assert taken
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.ENOSYS])
def test_a_file_system_without_locks_is_told(tmp_path, monkeypatch, number):
    def refuse(*_):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with file_lock(tmp_path / "lock") as locked:
        assert not locked
    assert list(tmp_path.iterdir()) == []


def test_what_stands_there_already_is_not_followed_or_waited_for(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match=r"symbolic|regular"), file_lock(tmp_path / name):
            pass
    assert sorted(os.listdir(tmp_path)) == ["link", "pipe"]
