"""4D-sharded and pipelined training of Flax transformers: the AxoNN family of systems, rebuilt for JAX/XLA.

Importing this package starts nothing: no MPI, no device, no thread. Names load when first used.
"""

import typing as _typing
from importlib import import_module as _import_module

from axonn_jax.version import __version__ as __version__

_HOME = {
    "Generator": "axonn_jax.inference.generator",
    "Grid": "axonn_jax.grid",
    "GridShape": "axonn_jax.grid",
    "Loader": "axonn_jax.data.loader",
    "MemoryConfig": "axonn_jax.settings",
    "MoeConfig": "axonn_jax.experts.shape",
    "PipelineConfig": "axonn_jax.settings",
    "PruneConfig": "axonn_jax.pruned.config",
    "Sampling": "axonn_jax.inference.sampling",
    "TensorConfig": "axonn_jax.settings",
    "Trainer": "axonn_jax.train.trainer",
    "replicated": "axonn_jax.tensor.specs",
    "total": "axonn_jax.train.modules.numbers",
    "UserError": "axonn_jax.errors",
    "goldfish": "axonn_jax.data.goldfish",
    "in_flight": "axonn_jax.distributed.bounded",
    "init": "axonn_jax.distributed.initialize",
    "latest": "axonn_jax.checkpoint.manifest",
    "lora": "axonn_jax.adapters.layers",
    "offload": "axonn_jax.memory.offload_transform",
    "parallelize": "axonn_jax.tensor.parallelize.api",
    "parallelize_linen": "axonn_jax.tensor.parallelize.linen",
    "plan": "axonn_jax.plans.model",
    "sharding_report": "axonn_jax.tensor.parallelize.report",
    "tracked": "axonn_jax.tracking.files",
}

_PUBLIC = ["__version__", "models", *_HOME]

if _typing.TYPE_CHECKING:
    from axonn_jax import models as models
    from axonn_jax.adapters.layers import lora as lora
    from axonn_jax.checkpoint.manifest import latest as latest
    from axonn_jax.data.goldfish import goldfish as goldfish
    from axonn_jax.data.loader import Loader as Loader
    from axonn_jax.distributed.bounded import in_flight as in_flight
    from axonn_jax.distributed.initialize import init as init
    from axonn_jax.errors import UserError as UserError
    from axonn_jax.experts.shape import MoeConfig as MoeConfig
    from axonn_jax.grid import Grid as Grid
    from axonn_jax.grid import GridShape as GridShape
    from axonn_jax.inference.generator import Generator as Generator
    from axonn_jax.inference.sampling import Sampling as Sampling
    from axonn_jax.memory.offload_transform import offload as offload
    from axonn_jax.plans.model import plan as plan
    from axonn_jax.pruned.config import PruneConfig as PruneConfig
    from axonn_jax.settings import MemoryConfig as MemoryConfig
    from axonn_jax.settings import PipelineConfig as PipelineConfig
    from axonn_jax.settings import TensorConfig as TensorConfig
    from axonn_jax.tensor.parallelize.api import parallelize as parallelize
    from axonn_jax.tensor.parallelize.linen import parallelize_linen as parallelize_linen
    from axonn_jax.tensor.parallelize.report import sharding_report as sharding_report
    from axonn_jax.tensor.specs import replicated as replicated
    from axonn_jax.tracking.files import tracked as tracked
    from axonn_jax.train.modules.numbers import total as total
    from axonn_jax.train.trainer import Trainer as Trainer
else:
    __all__ = _PUBLIC  # a type checker has them from the imports above


def __dir__() -> list[str]:
    """Return the public names, for TAB and `help`, though most are not loaded yet."""
    return _PUBLIC


def __getattr__(name: str) -> _typing.Any:
    if name == "models":
        return _import_module("axonn_jax.models")
    if name in _HOME:
        return getattr(_import_module(_HOME[name]), name)
    raise AttributeError(f"module 'axonn_jax' has no attribute {name!r}")
