"""4D-sharded and pipelined training of Flax transformers: the AxoNN family of systems, rebuilt for JAX/XLA.

Importing this package starts nothing: no MPI, no device, no thread. Names load when first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from axonn_jax.version import __version__

if TYPE_CHECKING:
    from axonn_jax import models
    from axonn_jax.adapters.layers import lora
    from axonn_jax.data.goldfish import goldfish
    from axonn_jax.data.loader import Loader
    from axonn_jax.distributed.bounded import InFlight as in_flight
    from axonn_jax.distributed.initialize import init
    from axonn_jax.errors import UserError
    from axonn_jax.experts.shape import MoeConfig
    from axonn_jax.grid import Grid, GridShape
    from axonn_jax.inference.generator import Generator
    from axonn_jax.inference.sampling import Sampling
    from axonn_jax.memory.offload_transform import offload
    from axonn_jax.tensor.parallelize.api import parallelize
    from axonn_jax.tensor.parallelize.linen import parallelize_linen
    from axonn_jax.tensor.parallelize.report import sharding_report
    from axonn_jax.tensor.specs import replicated
    from axonn_jax.train.config import MemoryConfig, PipelineConfig, PruneConfig, TensorConfig
    from axonn_jax.train.modules.numbers import total
    from axonn_jax.train.trainer import Trainer

__all__ = [
    "Generator",
    "Grid",
    "GridShape",
    "Loader",
    "MemoryConfig",
    "MoeConfig",
    "PipelineConfig",
    "PruneConfig",
    "Sampling",
    "TensorConfig",
    "Trainer",
    "UserError",
    "__version__",
    "goldfish",
    "in_flight",
    "init",
    "lora",
    "models",
    "offload",
    "parallelize",
    "parallelize_linen",
    "replicated",
    "sharding_report",
    "total",
]

_HOME = {
    "Generator": "axonn_jax.inference.generator",
    "Grid": "axonn_jax.grid",
    "GridShape": "axonn_jax.grid",
    "Loader": "axonn_jax.data.loader",
    "MemoryConfig": "axonn_jax.train.config",
    "MoeConfig": "axonn_jax.experts.shape",
    "PipelineConfig": "axonn_jax.train.config",
    "PruneConfig": "axonn_jax.train.config",
    "Sampling": "axonn_jax.inference.sampling",
    "TensorConfig": "axonn_jax.train.config",
    "Trainer": "axonn_jax.train.trainer",
    "replicated": "axonn_jax.tensor.specs",
    "total": "axonn_jax.train.modules.numbers",
    "UserError": "axonn_jax.errors",
    "goldfish": "axonn_jax.data.goldfish",
    "in_flight": "axonn_jax.distributed.bounded",
    "init": "axonn_jax.distributed.initialize",
    "lora": "axonn_jax.adapters.layers",
    "offload": "axonn_jax.memory.offload_transform",
    "parallelize": "axonn_jax.tensor.parallelize.api",
    "parallelize_linen": "axonn_jax.tensor.parallelize.linen",
    "sharding_report": "axonn_jax.tensor.parallelize.report",
}


def __getattr__(name: str) -> Any:
    if name == "models":
        return importlib.import_module("axonn_jax.models")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'axonn_jax' has no attribute {name!r}")
