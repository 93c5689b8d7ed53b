"""Files of tests that a change needs: those of the parts that it touches and of the parts above them.

Prints paths, one a line; nothing where everything is to run: on a clean clone, without a branch to compare with, and
where a change is of what all parts stand on.
"""

import subprocess
import sys
from collections.abc import Iterable
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

ROOT = Path(__file__).resolve().parents[1]
OUTSIDE = {"docs": "examples", "examples": "examples", "README.md": "examples", "scripts": "scripts"}
"""Folders of tests by what they test outside of the package."""
UNTESTED = ("CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", ".gitignore", ".git-blame-ignore-revs")
ALWAYS = "tests/test_*.py"
"""The rules of the tree, which any change can break."""


def changed() -> list[str]:
    """Return the paths that differ from the branch's base upstream, uncommitted and new ones too; none without one."""

    def git(*command: str) -> list[str]:
        run = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False)
        return run.stdout.splitlines() if run.returncode == 0 else []

    upstream = git("rev-parse", "--abbrev-ref", "@{upstream}") or git("rev-parse", "--abbrev-ref", "origin/HEAD")
    base = git("merge-base", "HEAD", upstream[0]) if upstream else []
    if not base:
        return []
    return git("diff", "--name-only", "--no-renames", base[0]) + git("ls-files", "--others", "--exclude-standard")


def selection(paths: Iterable[str], below: dict[str, tuple[str, ...]]) -> set[str]:
    """Return the folders and files of tests for changed paths; none for all.

    Args:
        paths: Changed paths, relative to the repository's root.
        below: All parts below each part of the package.
    """
    found = set[str]()
    for path in map(Path, paths):
        match path.parts:
            case ("axonn_jax", part, _, *_) if part in below:
                found |= {f"tests/{name}" for name, parts in below.items() if part in (name, *parts)}
            case ("tests", folder, _, *_) if folder in {*below, *OUTSIDE.values()}:
                found.add(f"tests/{folder}" if not path.name.startswith("test_") else str(path))
            case ("tests", name) if name.startswith("test_"):
                pass  # one of ALWAYS
            case (first, *_) if first in OUTSIDE and path.suffix != ".sh":
                found.add(f"tests/{OUTSIDE[first]}")
            case (name,) if name in UNTESTED:
                pass
            case _:
                return set()
    return {path for path in found if (ROOT / path).exists()} | {ALWAYS}


def main() -> None:
    """Print the selection for this checkout."""
    paths = changed()
    loader = SourceFileLoader("house", str(ROOT / "scripts" / "house"))
    house = ModuleType(loader.name)
    house.__file__ = loader.path
    sys.modules[loader.name] = house  # its dataclasses look themselves up
    loader.exec_module(house)
    for path in sorted(selection(paths, house.BELOW)) if paths else ():
        print(path)


if __name__ == "__main__":
    main()
