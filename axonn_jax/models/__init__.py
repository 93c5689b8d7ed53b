"""Models and their sizes."""

import importlib
from typing import TYPE_CHECKING, Any

from axonn_jax.models.config import ModelShape
from axonn_jax.models.presets import preset, preset_names

if TYPE_CHECKING:
    from axonn_jax.models.huggingface.load import from_pretrained
    from axonn_jax.models.huggingface.pretrained import shape_of
    from axonn_jax.models.packed import pack
    from axonn_jax.models.sequential import SequenceModel
    from axonn_jax.models.transformer import Transformer

__all__ = [
    "ModelShape",
    "SequenceModel",
    "Transformer",
    "from_pretrained",
    "pack",
    "preset",
    "preset_names",
    "shape_of",
]

# Sizes are known without jax; only the models themselves need it.
_HOME = {
    "SequenceModel": "axonn_jax.models.sequential",
    "Transformer": "axonn_jax.models.transformer",
    "from_pretrained": "axonn_jax.models.huggingface.load",
    "pack": "axonn_jax.models.packed",
    "shape_of": "axonn_jax.models.huggingface.pretrained",
}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'axonn_jax.models' has no attribute {name!r}")
