"""Steps compiled without arrays, and what is asked of compiled programs: their text, their number of instructions."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hlo.program import parse

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import MESH_AXES, Grid, GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import AttentionKernel
from axonn_jax.core.settings import MemoryConfig, TensorConfig

if TYPE_CHECKING:
    import jax
    import optax

    from axonn_jax.core.tensor.kernel_choice import Tiles


def compile_abstract(
    shape: ModelShape,
    grid: Grid,
    optimizer: "optax.GradientTransformation",
    *,
    sequences: int,
    microbatches: int = 1,
    clip: float = 1.0,
    memory: MemoryConfig = MemoryConfig(),  # noqa: B008 (frozen)
    tensor: TensorConfig = TensorConfig(),  # noqa: B008
    attention: "AttentionKernel | Tiles" = "auto",
    comm: BlockComm = ALL_REDUCE,
    moe: MoeConfig = MoeConfig(),  # noqa: B008
    lora: LoraConfig = LoraConfig(),  # noqa: B008
    compiler_options: Mapping[str, str | bool] | None = None,
) -> "jax.stages.Compiled":
    """Return the compiled step of a `Trainer` with these settings and `sequences` per step, without allocating arrays.

    This compiles a step for hundreds of virtual devices on one machine. Options whose default depends on the backend
    (`attention`, `memory.precision`, `tensor.order`, `tensor.sub_batches`) must be set if the grid's devices belong to
    another backend. Raises ``UserError`` if model or batch do not divide over the grid.
    """
    from axonn_jax.core.engines.step import abstract, build_step
    from axonn_jax.core.tensor.params import split_module

    model, batch = abstract(shape, grid, sequences, microbatches, lora, attention=attention, comm=comm, moe=moe)
    _, _, step = build_step(model, split_module(model), optimizer, grid, clip, memory, tensor)
    return step.compiled(*batch, compiler_options)


def keep_recomputation() -> dict[str, str]:
    """Compiler options under which the CPU backend recomputes the values of `jax.checkpoint`, as the GPU backend does.

    By itself it drops the barriers in front of recomputations early, and then merges some of them with the forward
    pass. An unknown pass name would be ignored, so the accounting's tests find out when it changes.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"}


def mesh_sizes(grid: GridShape) -> dict[str, int]:
    """The sizes of a mesh's axes, by name."""
    return {axis: int(getattr(grid, axis)) for axis in MESH_AXES}


def text_of(program: "jax.stages.Compiled") -> str:
    """A compiled program as HLO."""
    text = program.as_text()
    assert text is not None  # XLA's backends print their programs
    return text


def instructions(program: "jax.stages.Compiled") -> int:
    """Instructions of a compiled program, all its computations together."""
    return sum(len(one.instructions) for one in parse(text_of(program)).computations.values())
