"""Models and their sizes."""

from typing import TYPE_CHECKING, Any

from axonn_jax.models.config import ModelShape
from axonn_jax.models.presets import preset, preset_names

if TYPE_CHECKING:
    from axonn_jax.models.huggingface.load import from_pretrained
    from axonn_jax.models.sequential import SequenceModel
    from axonn_jax.models.transformer import Transformer

__all__ = ["ModelShape", "SequenceModel", "Transformer", "from_pretrained", "preset", "preset_names"]


def __getattr__(name: str) -> Any:
    # Sizes are known without jax; only the model itself needs it.
    if name == "Transformer":
        from axonn_jax.models.transformer import Transformer

        return Transformer
    if name == "SequenceModel":
        from axonn_jax.models.sequential import SequenceModel

        return SequenceModel
    if name == "from_pretrained":
        from axonn_jax.models.huggingface.load import from_pretrained

        return from_pretrained
    raise AttributeError(f"module 'axonn_jax.models' has no attribute {name!r}")
