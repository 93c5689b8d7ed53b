"""Packages and repositories of other people at the versions that were measured, and how to import parts of them."""

import importlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from axonn_jax.core.errors import UserError


@dataclass(frozen=True)
class Source:
    """One package or repository."""

    name: str
    version: str
    """Version of a package, commit of a repository."""
    folder: str = ""
    """Folder to import from, inside the folder of repositories; empty for a package."""

    @property
    def clone(self) -> str:
        """Shell command that makes the copy of a repository; `REPOSITORIES` is the folder of all."""
        at = f'"$REPOSITORIES"/{self.folder.partition("/")[0]}'
        return f"git clone https://github.com/{self.name} {at} && git -C {at} checkout {self.version}"


def _flax(example: str) -> Source:
    return Source("google/flax", "18f8f311c275d57f46d95e41b15aa97b454754c0", f"flax/examples/{example}")


SOURCES = {
    "tunix": Source("google-tunix", "0.1.7"),
    "dantinox": Source("dantinox", "0.4.14"),
    "mamba2-jax": Source("mamba2-jax", "1.1.2"),
    "jraphx": Source("jraphx", "0.1.0"),
    "flaxdiff": Source("flaxdiff", "0.2.11"),
    "nano-moe-jax": Source("nano-moe-jax", "0.1.0"),
    "gemma": Source("gemma", "3.3.0"),
    "bonsai": Source("jax-ml/bonsai", "36284254cf738d99c1c5d1e3a292d27656a0a365", "bonsai"),
    "flax gemma": _flax("gemma"),
    "flax lm1b": _flax("lm1b"),
    "flax nlp_seq": _flax("nlp_seq"),
    "flax wmt": _flax("wmt"),
    "flax imagenet": _flax("imagenet"),
}
NEEDED = (
    "einops jaxtyping wadler-lindig kauldron clu lark typeguard immutabledict sentencepiece chex toolz ml-collections"
)
"""Packages that the models import; any version will do."""


@dataclass(frozen=True)
class Copies:
    """Folders of the copies."""

    packages: Path
    repositories: Path

    def enter(self, source: str) -> None:
        """Put a source first on the import path; in one process only sources whose modules have different names.

        Raises:
            UserError: the folder is missing.
        """
        folder = SOURCES[source].folder
        paths = {"--packages": self.packages}
        if folder:
            paths["--repositories"] = self.repositories / folder
        for flag, path in paths.items():
            if not path.is_dir():
                raise UserError(flag, path, "an existing folder")
        sys.path[:0] = map(str, reversed(paths.values()))

    def bare(self, *names: str) -> None:
        """Name packages whose own `__init__`, with imports of what is not needed here, is not to run."""
        for name in names:
            package = ModuleType(name)
            package.__path__ = [str(self.packages / name.replace(".", "/"))]
            sys.modules[name] = package


def stand_in(name: str, attribute: Callable[[str], Any]) -> None:
    """Enter a module with any attribute, where a package imports one that is not needed here."""
    module = ModuleType(name)
    module.__getattr__ = attribute  # type: ignore[method-assign]
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
