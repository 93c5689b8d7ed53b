<<<<<<< HEAD
"""Hugging Face models: config.json and safetensors of transformers, read into any grid and written."""
=======
"""Hugging Face models: config.json and safetensors, loaded onto any grid and exported."""

from axonn_jax.models.huggingface.entries import from_huggingface, to_huggingface
from axonn_jax.models.huggingface.families import shape_from_config

__all__ = ["from_huggingface", "shape_from_config", "to_huggingface"]
>>>>>>> 22d6b0a5 (huggingface: plainer names and docstrings; comments say why)
