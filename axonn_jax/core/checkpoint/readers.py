"""Directories in other layouts than a checkpoint's: the files by which they are known, and who reads them; no jax."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

CONFIG = "config.json"
WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
"""Names of files in Hugging Face's layout."""
READERS: Mapping[str, str] = MappingProxyType(
    dict.fromkeys((CONFIG, *WEIGHTS, *ADAPTER), "axonn_jax.files.into_engine:take_pretrained")
)
"""Functions that put a directory's weights into an engine, by a file that the directory has.

They are named and not imported: an engine saves and loads its own checkpoints without them.
"""


def reader_of(directory: Path) -> str | None:
    """Return the reader of a directory, whether its files are sound or not; None of a checkpoint and a training run."""
    if (directory / "checkpoints").is_dir():
        return None
    return next((reader for name, reader in READERS.items() if os.path.lexists(directory / name)), None)
