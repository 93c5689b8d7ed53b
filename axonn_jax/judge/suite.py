"""Problem suites: prompts, reference solutions, and the C++ drivers that check and time a solution."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from axonn_jax.core.errors import UserError, nearest

SUITES = ("mini",)
MODELS = ("serial", "omp")
"""Execution models that the suites support."""
_FOLDER = Path(__file__).parent
_SECTION = re.compile(r"^//@ (\w+) ?(.*)$", re.MULTILINE)
_HINTS = {"serial": "", "omp": "   Use OpenMP to compute in parallel.\n"}
_INCLUDES = {"serial": "", "omp": "#include <omp.h>\n\n"}


@dataclass(frozen=True)
class Problem:
    """Problem of a suite, read from one C++ file."""

    kind: str
    """Type of the problem, such as "sort"."""
    sections: Mapping[str, str]
    """Sections of the problem's file, by name."""

    @cached_property
    def name(self) -> str:
        """Name in ParEval's files."""
        return self.sections["name"]

    @cached_property
    def size(self) -> int:
        """Size of the timed input."""
        return int(self.sections["size"])

    @cached_property
    def signature(self) -> str:
        """Signature of the function: the prompt's last line without its brace."""
        return self.sections["prompt"].splitlines()[-1].removesuffix("{").rstrip()

    def prompt(self, model: str) -> str:
        """Return the text to continue, up to the opening brace of the function."""
        text = self.sections["prompt"].replace("{model}", _HINTS[model])
        return f"{_INCLUDES[model]}{self.types}{text}"

    def reference(self, model: str) -> str:
        """Return a correct continuation of the prompt."""
        return self.sections[model]

    @property
    def types(self) -> str:
        """Type definitions at the start of the prompt."""
        return f"{self.sections['types']}\n\n" if "types" in self.sections else ""

    def driver(self) -> str:
        """Return the C++ program that checks and times the function."""
        best = f"namespace reference {{\n{self.signature} {{\n{self.reference('serial')}\n}}"
        sources = [self.types, f"{self.signature};", best, "namespace {", self.sections["driver"], "}"]
        return "\n".join(['#include "prelude.hpp"', '#include "draw.hpp"', *sources, '#include "driver.hpp"', ""])


def problems(suite: str) -> list[Problem]:
    """Return the problems of a suite in the order of their types; raise ``UserError`` for an unknown suite."""
    if suite not in SUITES:
        accepted = f"one of {', '.join(SUITES)}, or a file of ParEval's prompts, FILE.json"
        raise UserError("--suite", suite, accepted + nearest(suite, SUITES))
    return [_problem(path) for path in sorted((_FOLDER / suite).glob("*.cc"))]


def headers(suite: str) -> dict[str, str]:
    """Return the texts of a suite's C++ headers, by name."""
    return {path.name: path.read_text(encoding="utf-8") for path in (_FOLDER / suite).glob("*.hpp")}


def _problem(path: Path) -> Problem:
    text = path.read_text(encoding="utf-8")
    marks = list(_SECTION.finditer(text))
    ends = [mark.start() for mark in marks[1:]] + [len(text)]
    sections = {mark[1]: mark[2] or text[mark.end() : end].strip("\n") for mark, end in zip(marks, ends, strict=True)}
    return Problem(path.stem, sections)
