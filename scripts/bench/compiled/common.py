"""Command line, devices, versions and the small model of benchmarks that compile steps."""

import importlib.util
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, TypeVar

from axonn_jax.cli.main import report
from axonn_jax.cli_args import parse
from axonn_jax.errors import UserError
from axonn_jax.grid import MESH_AXES, GridShape
from axonn_jax.models.config import ModelShape
from axonn_jax.version import __version__

if TYPE_CHECKING:
    import jax

T = TypeVar("T")
Constraints = Literal["layers", "blocks", "none"]
"""Where automatic partitioning is told layouts: behind every linear layer and block, behind blocks only, or nowhere."""

SMALL = ModelShape(layers=12, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=4096, seq_len=256)
"""What steps are run of, where large models are only compiled."""
SMALL_ROWS = 4
"""Sequences of a step that is run."""


def command(kind: type[T], run: Callable[[T], int]) -> NoReturn:
    """Runs a benchmark with the flags of a dataclass and ends the process; an error is one line, as of `axonn-jax`."""
    try:
        status = run(parse(kind, sys.argv[1:], f"scripts/bench/{Path(sys.argv[0]).name}"))
    except SystemExit:
        raise
    except BaseException as error:
        status = report(error)
    sys.exit(status)


def make_devices(count: int) -> None:
    """The CPU backend with virtual devices, also where there is an accelerator; too late once jax has started."""
    import jax

    from axonn_jax import compat

    if not compat.backends_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def keep_recomputation() -> dict[str, str]:
    """Compiler options under which the CPU backend recomputes the values of `jax.checkpoint`, as the GPU backend does.

    By itself it drops the barriers in front of recomputations early, and then merges some of them with the forward
    pass. An unknown pass name would be ignored, so the accounting's tests find out when it changes.
    """
    return {"xla_disable_hlo_passes": "cse_barrier_expander"}


def cuda_plugin_installed() -> bool:
    """Return True if jax's CUDA plugin is installed, which compiles for GPUs also on hosts without any."""
    if importlib.util.find_spec("jax_plugins") is None:  # a submodule of a missing package raises
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def described_gpus(nodes: int, each: int, target: str) -> list[Any]:
    """Devices of `nodes` machines with `each` GPUs as XLA's target description has them, to compile for, not to run on.

    Needs jax's CUDA plugin and `ptxas`, but neither a GPU nor its driver. Raises ``LookupError`` without the plugin.
    """
    from jax.experimental import topologies

    if not cuda_plugin_installed():
        raise LookupError("jax's CUDA plugin is not installed")
    shape = f"1x{nodes}x{each}"  # slices, hosts, devices of a host
    described = topologies.get_topology_desc("gpus", "cuda", target_config=target, topology=shape)
    return list(described.devices)


def mesh_sizes(grid: GridShape) -> dict[str, int]:
    """The sizes of a mesh's axes, by name."""
    return {axis: int(getattr(grid, axis)) for axis in MESH_AXES}


def text_of(program: "jax.stages.Compiled") -> str:
    """A compiled program as HLO."""
    text = program.as_text()
    assert text is not None  # XLA's backends print their programs
    return text


def temporary_bytes(program: "jax.stages.Compiled") -> int:
    """Bytes that a device needs beside arguments and results."""
    memory: Any = program.memory_analysis()
    return int(memory.temp_size_in_bytes)


def grid_of(grid: GridShape, devices: int | None) -> GridShape:
    """The grid on so many devices (its own number where None): what its axes leave of them goes to `data`."""
    if devices is None or devices == grid.devices:
        return grid
    if devices < 1 or devices % grid.devices:
        raise UserError("--devices", devices, f"a multiple of the grid's product, which is {grid.devices}")
    return replace(grid, data=grid.data * devices // grid.devices)


def versions(*packages: str) -> dict[str, str]:
    """The versions of this package and of those of `packages` that are installed."""
    installed = {"axonn_jax": __version__}
    for name in packages:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return installed
