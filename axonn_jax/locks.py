"""A lock that one process holds at a time; the kernel frees it when the process ends, also by kill -9."""

import contextlib
import errno
import fcntl
import os
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)  # Lustre mounted without flock, say
_MOST = 200  # bytes read of what the holder wrote


class Held(Exception):
    """The refusal of a lock that another process holds; the text says which, as in "process 12 on node3 since ..."."""


@contextlib.contextmanager
def held(path: Path) -> Iterator[bool]:
    """Holds the lock of a file, which it makes and at the end removes; False where the file system has no locks.

    A file that a killed process left is nobody's lock. Over NFS the lock counts on all hosts.

    Raises:
        Held: another process holds it.
        OSError: the file cannot be made or written.
    """
    while True:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)
        try:
            locked = _take(file)
            if _is_at(file, path):
                try:
                    os.ftruncate(file, 0)
                    os.pwrite(file, _me().encode(), 0)
                    yield locked
                finally:
                    with contextlib.suppress(OSError):
                        os.unlink(path)  # while it is locked: whoever opened it meanwhile sees that it is gone
                return
        finally:
            os.close(file)


def _take(file: int) -> bool:
    if not stat.S_ISREG(os.fstat(file).st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        holder = os.pread(file, _MOST, 0).decode("utf-8", "backslashreplace")
        raise Held(" ".join(holder.split()) or "another process") from None
    except OSError as error:
        if error.errno in _WITHOUT_LOCKS:
            return False
        raise
    return True


def _is_at(file: int, path: Path) -> bool:
    """Whether the open file is still the one at the path, which its last holder may just have removed."""
    try:
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except FileNotFoundError:
        return False


def _me() -> str:
    return f"process {os.getpid()} on {socket.gethostname()} since {time.strftime('%Y-%m-%d %H:%M:%S %Z')}\n"
