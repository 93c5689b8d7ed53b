"""4D-sharded and pipelined training of Flax transformers: the AxoNN family of systems, rebuilt for JAX/XLA.

Importing this package starts nothing: no MPI, no device, no thread. Names load when first used.
"""

import typing as _typing
from importlib import import_module as _import_module

from axonn_jax.version import __version__ as __version__

_HOME = {
    "Generator": "axonn_jax.text.inference.generator",
    "Grid": "axonn_jax.core.grid",
    "GridShape": "axonn_jax.core.grid",
    "Loader": "axonn_jax.files.data.loader",
    "MemoryConfig": "axonn_jax.core.settings",
    "MoeConfig": "axonn_jax.core.experts.shape",
    "PipelineConfig": "axonn_jax.core.settings",
    "PruneConfig": "axonn_jax.core.pruned.config",
    "Sampling": "axonn_jax.text.inference.sampling",
    "TensorConfig": "axonn_jax.core.settings",
    "Trainer": "axonn_jax.trainer",
    "replicated": "axonn_jax.core.tensor.specs",
    "total": "axonn_jax.any_flax.modules.metrics",
    "UserError": "axonn_jax.core.errors",
    "goldfish": "axonn_jax.files.data.goldfish",
    "in_flight": "axonn_jax.core.distributed.bounded",
    "init": "axonn_jax.core.distributed.initialize",
    "latest": "axonn_jax.core.checkpoint.manifest",
    "lora": "axonn_jax.core.adapters.layers",
    "offload": "axonn_jax.core.memory.offload_transform",
    "parallelize": "axonn_jax.any_flax.parallelize.api",
    "parallelize_linen": "axonn_jax.any_flax.parallelize.linen",
    "plan": "axonn_jax.planning.plans.model",
    "sharding_report": "axonn_jax.any_flax.parallelize.report",
    "tracked": "axonn_jax.run.tracking.files",
}

_PUBLIC = ["__version__", "models", *_HOME]

if _typing.TYPE_CHECKING:
    from axonn_jax import models as models
    from axonn_jax.any_flax.modules.metrics import total as total
    from axonn_jax.any_flax.parallelize.api import parallelize as parallelize
    from axonn_jax.any_flax.parallelize.linen import parallelize_linen as parallelize_linen
    from axonn_jax.any_flax.parallelize.report import sharding_report as sharding_report
    from axonn_jax.core.adapters.layers import lora as lora
    from axonn_jax.core.checkpoint.manifest import latest as latest
    from axonn_jax.core.distributed.bounded import in_flight as in_flight
    from axonn_jax.core.distributed.initialize import init as init
    from axonn_jax.core.errors import UserError as UserError
    from axonn_jax.core.experts.shape import MoeConfig as MoeConfig
    from axonn_jax.core.grid import Grid as Grid
    from axonn_jax.core.grid import GridShape as GridShape
    from axonn_jax.core.memory.offload_transform import offload as offload
    from axonn_jax.core.pruned.config import PruneConfig as PruneConfig
    from axonn_jax.core.settings import MemoryConfig as MemoryConfig
    from axonn_jax.core.settings import PipelineConfig as PipelineConfig
    from axonn_jax.core.settings import TensorConfig as TensorConfig
    from axonn_jax.core.tensor.specs import replicated as replicated
    from axonn_jax.files.data.goldfish import goldfish as goldfish
    from axonn_jax.files.data.loader import Loader as Loader
    from axonn_jax.planning.plans.model import plan as plan
    from axonn_jax.run.tracking.files import tracked as tracked
    from axonn_jax.text.inference.generator import Generator as Generator
    from axonn_jax.text.inference.sampling import Sampling as Sampling
    from axonn_jax.trainer import Trainer as Trainer
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
