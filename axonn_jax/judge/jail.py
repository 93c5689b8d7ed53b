"""Launcher that sets limits, drops privileges, installs a filter of system calls, and executes a program.

Run by path, without the package: ``python -I -S jail.py '{"memory": ..., ...}' PROGRAM ARGUMENTS...``. Under the filter
a program may compute, read files and start threads. Other system calls fail; those that start a process, write a file
or use the network raise SIGSYS. The filter applies to root too.
"""

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
from typing import Any

RESULTS = 3
"""File descriptor to which a program writes its results."""
NOBODY = 65534
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
"""Column of the tables below, and the kernel's audit number, by processor architecture."""
ALLOWED = """
read 0 63|write 1 64|close 3 57|stat 4 -|fstat 5 80|lstat 6 -|lseek 8 62|mmap 9 222|mprotect 10 226|munmap 11 215
brk 12 214|rt_sigprocmask 14 135|rt_sigreturn 15 139|pread64 17 67|readv 19 65|writev 20 66|access 21 -
sched_yield 24 124|mremap 25 216|madvise 28 233|nanosleep 35 101|getpid 39 172|execve 59 221|exit 60 93|uname 63 160
getcwd 79 17|readlink 89 -|gettimeofday 96 169|getrlimit 97 163|getrusage 98 165|sysinfo 99 179|times 100 153
getuid 102 174|getgid 104 176|geteuid 107 175|getegid 108 177|sigaltstack 131 132|sched_getparam 143 121
sched_getscheduler 145 120|arch_prctl 158 -|gettid 186 178|futex 202 98|sched_getaffinity 204 123|getdents64 217 61
set_tid_address 218 96|restart_syscall 219 128|clock_gettime 228 113|clock_getres 229 114|clock_nanosleep 230 115
exit_group 231 94|newfstatat 262 79|readlinkat 267 78|faccessat 269 48|set_robust_list 273 99|getcpu 309 168
getrandom 318 278|membarrier 324 283|statx 332 291|rseq 334 293|faccessat2 439 439
"""
REFUSED = {
    "another process": """
fork 57 -|vfork 58 -|kill 62 129|ptrace 101 117|tkill 200 130|tgkill 234 131|clone 56 220|rt_sigqueueinfo 129 138
process_vm_writev 311 271|pidfd_send_signal 424 424|pidfd_open 434 434
""",
    "the network": """
socket 41 198|connect 42 203|sendto 44 206|bind 49 200|socketpair 53 199|io_uring_setup 425 425
""",
    "writing a file": """
open 2 -|openat 257 56|creat 85 -|truncate 76 45|ftruncate 77 46|rename 82 -|mkdir 83 -|rmdir 84 -|link 86 -|unlink 87 -
symlink 88 -|chmod 90 -|fchmod 91 52|chown 92 -|mknod 133 -|mount 165 40|setxattr 188 5|mkdirat 258 34|mknodat 259 33
fchownat 260 54|unlinkat 263 35|renameat 264 38|linkat 265 37|symlinkat 266 36|fchmodat 268 53|utimensat 280 88
renameat2 316 276|memfd_create 319 279
""",
    "another handler of SIGSYS": "rt_sigaction 13 134",
}
"""System calls that raise SIGSYS, by purpose. Allowed are `clone` of a thread, opening to read, and handlers of other
signals."""

_LOAD, _EQUAL, _ANY_BIT, _RETURN = 0x20, 0x15, 0x45, 0x06
_ALLOW, _FAIL, _TRAP, _KILL = 0x7FFF0000, 0x00050000 | 38, 0x00030000, 0x80000000  # 38: ENOSYS
_THREAD = 0x10000
_DRIVERS = 0x61786F6E
"""Fifth argument that marks the driver's own call of `rt_sigaction` for SIGSYS; the kernel ignores it."""
_WRITES = os.O_ACCMODE | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38


def numbers(table: str, column: int) -> dict[str, int]:
    """Return the numbers of a table's system calls in a column, by name."""
    entries = [entry.split() for line in table.split("\n") for entry in line.split("|") if entry]
    return {entry[0]: int(entry[1 + column]) for entry in entries if entry[1 + column] != "-"}


def purpose(number: int) -> str:
    """Return the purpose and the name of a refused system call, as in "the network (socket)"."""
    column, _ = MACHINES.get(platform.machine(), (0, 0))
    for text, table in REFUSED.items():
        for name, call_number in numbers(table, column).items():
            if call_number == number:
                return f"{text} ({name})"
    return f"system call {number}"


def _argument(index: int, high: bool = False) -> tuple[int, int, int, int]:
    return (_LOAD, 0, 0, 16 + 8 * index + 4 * high)


def _rules(column: int) -> dict[int, list[tuple[int, int, int, int]]]:
    # Instructions by number of the system call; the jumps stay inside a rule, and its last instructions return.
    allowed, refused = numbers(ALLOWED, column), numbers("\n".join(REFUSED.values()), column)
    allow, trap, fail = ((_RETURN, 0, 0, action) for action in (_ALLOW, _TRAP, _FAIL))
    rules = {number: [trap] for number in refused.values()} | {number: [allow] for number in allowed.values()}
    rules[refused["clone"]] = [_argument(0), (_ANY_BIT, 0, 1, _THREAD), allow, trap]
    rules[refused["openat"]] = [_argument(2), (_ANY_BIT, 0, 1, _WRITES), trap, allow]
    if "open" in refused:
        rules[refused["open"]] = [_argument(1), (_ANY_BIT, 0, 1, _WRITES), trap, allow]
    # abort() signals a thread of its own process.
    rules[refused["tgkill"]] = [_argument(0), (_EQUAL, 0, 1, os.getpid()), allow, trap]
    handler = [_argument(0), (_EQUAL, 0, 3, signal.SIGSYS), _argument(4), (_EQUAL, 1, 0, _DRIVERS)]
    # With a handler of its own, a sample could continue after a refused call.
    rules[refused["rt_sigaction"]] = [*handler, trap, allow]
    checks = [_argument(0), (_EQUAL, 0, 5, 0), _argument(2), (_EQUAL, 0, 3, 0), _argument(2, True), (_EQUAL, 0, 1, 0)]
    rules[(302, 261)[column]] = [*checks, allow, fail]  # prlimit64, only to read limits of this process
    return rules


def filter_program(machine: str) -> bytes:
    """Return the filter for a processor architecture as a classic BPF program."""
    column, kernels = MACHINES[machine]
    # Kill calls of another architecture's table, such as 32-bit calls: their numbers mean other system calls.
    program = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, kernels), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, 0)]
    for number, rule in _rules(column).items():
        program += [(_EQUAL, 0, len(rule), number), *rule]
    program.append((_RETURN, 0, 0, _FAIL))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)


def _control(libc: ctypes.CDLL, label: str, option: int, value: int, pointer: object = None) -> None:
    if libc.prctl(option, ctypes.c_ulong(value), pointer, ctypes.c_ulong(0), ctypes.c_ulong(0)):
        raise OSError(ctypes.get_errno(), f"{label}: {os.strerror(ctypes.get_errno())}")


def _filter(libc: ctypes.CDLL) -> None:
    raw = filter_program(platform.machine())
    instructions = ctypes.create_string_buffer(raw, len(raw))
    program = ctypes.create_string_buffer(struct.pack("HxxxxxxP", len(raw) // 8, ctypes.addressof(instructions)))
    _control(libc, "a filter of system calls", _PR_SET_SECCOMP, 2, program)


def enter(orders: dict[str, Any], program: list[str]) -> None:
    """Execute the program under limits, in place of this one; raise ``OSError`` if a limit cannot be set."""
    os.dup2(orders["results"], RESULTS)
    libc = ctypes.CDLL(None, use_errno=True)
    file = os.open(program[0], os.O_RDONLY | os.O_CLOEXEC)  # before becoming nobody, who may not reach it
    if orders["nobody"]:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
        except OSError as error:
            raise OSError(error.errno, f"user {NOBODY} (nobody): {error.strerror}") from None
    _control(libc, "an end with the command", _PR_SET_PDEATHSIG, signal.SIGKILL)
    _control(libc, "no new rights", _PR_SET_NO_NEW_PRIVS, 1)
    limits = {
        resource.RLIMIT_AS: orders["memory"],
        resource.RLIMIT_CPU: orders["cpu"],
        resource.RLIMIT_FSIZE: orders["file"],
        resource.RLIMIT_CORE: 0,
    }
    for name, most in limits.items():
        _, hard = resource.getrlimit(name)
        least = most if hard == resource.RLIM_INFINITY else min(most, hard)
        resource.setrlimit(name, (least, least))
    if orders["filtered"]:
        _filter(libc)
    os.execve(file, program, dict(os.environ))


if __name__ == "__main__":
    orders = json.loads(sys.argv[1])
    try:
        enter(orders, sys.argv[2:])
    except OSError as fault:
        # The word is random, so that a program cannot fake a failure of the sandbox.
        os.write(RESULTS, f"{orders['failed']}{fault}\n".encode())
        os._exit(1)
