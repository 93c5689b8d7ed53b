"""Compilation of samples with their problem's driver, by a C++ compiler under limits."""

import os
import shlex
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.judge import jail
from axonn_jax.judge.sandbox import Ended, Limits, run
from axonn_jax.judge.suite import Problem, headers

FLAGS = {"serial": ("-std=c++17", "-O3"), "omp": ("-std=c++17", "-O3", "-fopenmp")}
"""ParEval's compiler flags, by execution model."""
_LIMITS = Limits(seconds=30.0, memory=8 << 30, threads=4, file=256 << 20)
_SHOWN = 600


def compiler(command: str | None) -> list[str]:
    """Return the words that start the compiler.

    Args:
        command: Command line of the compiler; None for $CXX, or else c++ or g++ on the path.

    Raises:
        UserError: There is no such compiler.
    """
    names = [command] if command else [name for name in (os.environ.get("CXX"), "c++", "g++") if name]
    for name in names:
        words = shlex.split(name)
        if words and (path := shutil.which(words[0])):
            return [str(Path(path).absolute()), *words[1:]]
    raise UserError("--compiler", command or " or ".join(names), "a C++ compiler with OpenMP on the path, such as g++")


class Built(NamedTuple):
    """Path of a built program, or the compiler's error."""

    path: Path | None
    error: str


class Builder:
    """Compiler with a build folder, in which headers and drivers are compiled only once.

    Args:
        suite: Name of the suite.
        command: Words that start the compiler.
        folder: Empty build folder.
        as_root: True to let the compiler keep root's rights.
    """

    def __init__(self, suite: str, command: Sequence[str], folder: Path, *, as_root: bool):
        self._command, self._folder, self._limits = list(command), folder, replace(_LIMITS, as_root=as_root)
        self._drivers: dict[str, Path] = {}
        self._headers: set[str] = set()
        for name, text in headers(suite).items():
            (folder / name).write_text(text, encoding="utf-8")
        hand_over(folder, as_root=as_root)
        (ready := folder / "prelude.hpp.gch").mkdir()
        hand_over(ready, as_root=as_root)

    def build(self, problem: Problem, model: str, source: str) -> Built:
        """Compile the source of a sample together with the driver of its problem.

        Raises:
            UserError: The compiler fails on the driver.
        """
        # The compiler picks the precompiled header that fits its flags, and reads the plain one if there is none.
        if model not in self._headers:
            self._run([*FLAGS[model], "-x", "c++-header", "prelude.hpp", "-o", f"prelude.hpp.gch/{model}"])
            self._headers.add(model)
        driver = self._drivers.get(problem.name) or self._driver(problem)
        program, file = self._folder / "sample", self._folder / "sample.cc"
        program.unlink(missing_ok=True)
        file.write_text(f'#include "prelude.hpp"\n#line 1 "sample"\n{source}\n', encoding="utf-8", errors="replace")
        ended = self._run([*FLAGS[model], file.name, driver.name, "-o", program.name])
        return Built(program, "") if ended.status == 0 and program.is_file() else Built(None, _line(ended))

    def _driver(self, problem: Problem) -> Path:
        source = self._folder / f"driver_{problem.kind}.cc"
        source.write_text(problem.driver(), encoding="utf-8")
        target = source.with_suffix(".o")
        ended = self._run([*FLAGS["serial"], "-c", source.name, "-o", target.name])
        source.unlink()  # it contains the reference solution, which a sample could include
        if ended.status or not target.is_file():
            accepted = f"a compiler that builds the suite's own programs; {_line(ended)}"
            raise UserError("--compiler", shlex.join(self._command), accepted)
        self._drivers[problem.name] = target
        return target

    def _run(self, words: Sequence[str]) -> Ended:
        # The user nobody may have no access to the parents of the build folder, so name it relatively.
        environ = {"TMPDIR": ".", "LC_ALL": "C"}
        return run([*self._command, *words], self._folder, self._limits, filtered=False, environ=environ)


def hand_over(folder: Path, *, as_root: bool) -> None:
    """Change a folder's owner to nobody if programs of this process run as nobody."""
    if os.geteuid() == 0 and not as_root:
        os.chown(folder, jail.NOBODY, jail.NOBODY)


def _line(ended: Ended) -> str:
    lines = [" ".join(line.split()) for line in ended.errors.splitlines()]
    first = next((line for line in lines if "error" in line or "undefined" in line), "".join(lines[:1]))
    return (ended.stopped or first or f"status {ended.status}")[:_SHOWN]
