"""Models and their sizes."""

import typing as _typing
from importlib import import_module as _import_module

from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import preset, preset_names

if _typing.TYPE_CHECKING:
    from axonn_jax.core.models.packed import pack
    from axonn_jax.core.models.sequential import SequenceModel
    from axonn_jax.core.models.transformer import Transformer
    from axonn_jax.files.huggingface.load import from_pretrained
    from axonn_jax.files.huggingface.pretrained import shape_of

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
    "SequenceModel": "axonn_jax.core.models.sequential",
    "Transformer": "axonn_jax.core.models.transformer",
    "from_pretrained": "axonn_jax.files.huggingface.load",
    "pack": "axonn_jax.core.models.packed",
    "shape_of": "axonn_jax.files.huggingface.pretrained",
}


def __dir__() -> list[str]:
    """Return the public names, for TAB and `help`, though some are not loaded yet."""
    return __all__


def __getattr__(name: str) -> _typing.Any:
    if name in _HOME:
        return getattr(_import_module(_HOME[name]), name)
    raise AttributeError(f"module 'axonn_jax.models' has no attribute {name!r}")
