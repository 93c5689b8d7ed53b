"""Generated programs that do harm: each is stopped, leaves nothing behind, and is reported."""

import contextlib
import os
import platform
import time
from dataclasses import replace
from pathlib import Path

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.judge import jail, sandbox
from axonn_jax.judge.build import compiler
from axonn_jax.judge.judge import Judge, judging
from axonn_jax.judge.suite import problems

TRANSFORM = next(problem for problem in problems("mini") if problem.kind == "transform")
HEADERS = """
#include <cstdio>
#include <cstring>
#include <csignal>
#include <fstream>
#include <new>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
"""
FILE, PROCESS, NETWORK = "forbidden: writing a file", "forbidden: another process", "forbidden: the network"
# Bodies of the function, with PLACE for a directory that anyone may write in, and what is said of them.
CASES = {
    "loops": ("for (volatile int i = 0;; i = i + 1) {}", "time: over 1 s"),
    "sleeps": ("for (;;) pause();", "time: over 1 s"),
    "prints without end": ('for (;;) fprintf(stderr, "again\\n");', "time: over 1 s"),
    "allocates": ("std::vector<double> all; for (;;) all.resize(2 * all.size() + 99);", "memory: over "),
    "allocates and never looks": (
        "for (;;) { char *p = (char *) malloc(1 << 24); memset(p, 1, 1 << 24); }",
        "memory: over ",
    ),
    "recurses": ("volatile char page[4096]; page[0] = 1; toLogistic(x); page[1] = 2;", "crash: SIGSEGV"),
    # Newer glibc forks with signals blocked: no handler says which call it was.
    "forks": ("for (;;) fork();", (PROCESS, "forbidden: a system call")),
    "forks by vfork": ("for (;;) { if (vfork() == 0) _exit(0); }", PROCESS),
    "starts a shell": ('if (system("touch PLACE/made") < 0) abort();', "forbidden: "),
    "becomes a shell": ('execl("/bin/sh", "sh", "-c", "echo > PLACE/made", (char *) 0);', "forbidden: "),
    "kills the evaluation": ("kill(getppid(), SIGKILL);", PROCESS),
    "starts threads": (
        "pthread_attr_t small; pthread_attr_init(&small); pthread_attr_setstacksize(&small, 1 << 14); pthread_t made;"
        "for (;;) pthread_create(&made, &small, [](void *) -> void * { for (;;) pause(); }, nullptr);",
        "threads: over 256",
    ),
    "writes a file": ('std::ofstream("PLACE/made") << "x";', FILE),
    "writes into its directory": ('std::ofstream("made") << "x";', FILE),
    "empties a file": ('truncate("PLACE/kept", 0);', FILE),
    "removes a file": ('unlink("PLACE/kept");', FILE),
    "opens a file's rights": ('chmod("PLACE/kept", 0777);', FILE),
    "opens a socket": ("socket(AF_INET, SOCK_STREAM, 0);", NETWORK),
    "opens a local socket": ("socket(AF_UNIX, SOCK_DGRAM, 0);", NETWORK),
    "ignores the signal": ("signal(SIGSYS, SIG_IGN); socket(AF_INET, SOCK_STREAM, 0);", "forbidden: "),
    "has a handler of its own": (
        "struct sigaction own{}; own.sa_handler = [](int) {}; sigaction(SIGSYS, &own, nullptr);"
        "socket(AF_INET, SOCK_STREAM, 0); for (double &v : x) v = 1 / (1 + std::exp(-v));",
        "forbidden: another handler of SIGSYS (rt_sigaction)",
    ),
    "has a handler before the start": (
        "for (double &v : x) v = 1 / (1 + std::exp(-v));\n} struct Early { Early() {"
        "signal(SIGSYS, [](int) {}); socket(AF_INET, SOCK_STREAM, 0); } } early; void more() {",
        "forbidden: a system call",
    ),
    "has handlers of other signals": (
        "for (int n : {SIGFPE, SIGSEGV, SIGTERM}) signal(n, SIG_IGN); abort();",
        "crash: SIG",
    ),
    "ends early": ("_exit(0);", ""),
    "speaks for the sandbox": ('write(3, "Jail: no means\\n", 15); _exit(126);', ""),
    "crashes": ("*(volatile int *) 0 = 1;", "crash: SIGSEGV"),
    "aborts": ("abort();", "crash: SIGABRT"),
    "reads a limit": ("if (sysconf(_SC_NPROCESSORS_ONLN) < 1) abort();", ""),
}


@pytest.fixture(scope="module", params=[False, True] if os.geteuid() == 0 else [False], ids=str)
def judge(request):
    with judging("mini", compiler(None), sandbox.Limits(seconds=60, memory=1 << 28, as_root=request.param)) as made:
        made.output(TRANSFORM, "serial", prompt(), "}")  # the reference solution has its time
        yield made


def prompt():
    return HEADERS + TRANSFORM.prompt("serial")


@pytest.mark.parametrize("case", CASES)
def test_a_program_that_does_harm_is_stopped(judge, tmp_path, monkeypatch, case):
    if judge.limits.as_root and case not in ("starts a shell", "removes a file", "opens a socket"):
        pytest.skip("as nobody is enough")
    tmp_path.chmod(0o777)
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "kept").chmod(0o666)
    body, says = CASES[case]
    if says[:6] == "time: ":
        monkeypatch.setattr(judge, "limits", replace(judge.limits, seconds=1.0))
    done = judge.output(TRANSFORM, "serial", prompt(), body.replace("PLACE", str(tmp_path)) + "\n}")
    assert done["build_error"] == ""
    (run,) = done["runs"]
    assert not run["is_valid"]
    assert run["stopped"].startswith(says)
    assert bool(run["stopped"]) == bool(says)
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]
    assert (tmp_path / "kept").read_text() == "kept"
    assert (tmp_path / "kept").stat().st_mode & 0o777 == 0o666
    assert list(judge._empty.iterdir()) == []


# Lines of a program for the judge, and how it ends: whatever they are, the evaluation goes on.
LINES = {
    "passes without a time": ("Validation: PASS", "exit 0", ""),
    "passes in no time": ("Time: nan\nBestSequential: 1.000000000\nValidation: PASS", "exit 0", ""),
    "passes before it began": ("Time: -1.000000000\nBestSequential: 1.000000000\nValidation: PASS", "exit 0", ""),
    "passes without a reference": ("Time: 1.000000000\nBestSequential: inf\nValidation: PASS", "exit 0", ""),
    "forbids a long number": (f"Forbidden: {'9' * 5_000}", "exit 1", ""),
    "forbids a digit of its own": ("Forbidden: \N{SUPERSCRIPT TWO}", "exit 1", ""),
    "has used much": (f"VmPeak: {'9' * 5_000} kB", "kill -ABRT $$", "crash: SIGABRT"),
    "ends by a signal without a name": ("", "kill -37 $$", "crash: signal 37"),
}


@pytest.mark.parametrize("case", LINES)
def test_lines_of_a_sample_are_a_wrong_result(case, tmp_path, monkeypatch):
    lines, end, stopped = LINES[case]
    command = ["/bin/sh", "-c", f"printf '%s\\n' '{lines}' >&3; {end}"]
    monkeypatch.setattr(
        "axonn_jax.judge.judge.run_under",
        lambda _, folder, limits, **__: sandbox.run(command, folder, limits, filtered=False),
    )
    judge = Judge(None, tmp_path, sandbox.Limits(seconds=60, memory=1 << 30, as_root=True))
    done = judge._run(tmp_path, TRANSFORM, 1)
    assert (done["is_valid"], done["runtime"], done["best_sequential_runtime"]) == (False, None, None)
    assert done["stopped"] == stopped


def test_an_endless_source_is_not_built(judge):
    done = judge.output(
        TRANSFORM, "serial", prompt(), "static volatile char all[2000000000] = {1}; x[0] = all[x.size()];\n}"
    )
    assert (done["did_build"], done["runs"]) == (False, None)
    assert done["build_error"]


def test_nothing_of_a_stopped_compiler_goes_on(tmp_path):
    tmp_path.chmod(0o755)
    limits = sandbox.Limits(seconds=1, memory=1 << 30)
    words = ["/bin/sh", "-c", "sleep 47.11 & sleep 47.11 & wait"]
    assert sandbox.run(words, tmp_path, limits, filtered=False).stopped == "time: over 1 s"
    end = time.monotonic() + 60
    while any(b"47.11" in line for line in commands()):  # killed, and perhaps not yet gone
        assert time.monotonic() < end
        time.sleep(0.05)


def commands():
    """Command lines of all processes."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            yield file.read_bytes()


def test_every_refused_call_has_a_purpose_and_none_is_allowed_too():
    for column in (0, 1):
        allowed = jail.numbers(jail.ALLOWED, column)
        for purpose, table in jail.REFUSED.items():
            numbers = jail.numbers(table, column)
            assert not set(numbers.values()) & set(allowed.values())
            assert purpose
    assert jail.purpose(jail.numbers(jail.REFUSED["the network"], 0)["socket"]) == "the network (socket)"


@pytest.mark.parametrize("machine", jail.MACHINES)
def test_a_filter_jumps_within_itself(machine):
    raw = jail.filter_program(machine)
    count = len(raw) // 8
    assert count < 4096  # the kernel's most
    for at in range(count):
        code, jump, other = raw[8 * at], raw[8 * at + 2], raw[8 * at + 3]
        if code & 7 == 5:
            assert at + 1 + max(jump, other) < count


def test_another_processor_is_refused(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(
        UserError, match="Linux on x86_64 or aarch64, whose system calls the sandbox knows; not riscv64"
    ):
        sandbox.check_sandbox(as_root=False)


def test_a_jail_without_means_names_them(monkeypatch, tmp_path):
    tmp_path.chmod(0o755)
    limits = sandbox.Limits(seconds=9, memory=1 << 30)
    with pytest.raises(UserError, match=r"--execute = True: a system .* missing: .*No such file"):
        sandbox.run(["/nowhere/program"], tmp_path, limits, filtered=True)
