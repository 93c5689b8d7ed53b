"""Devices and the small model of benchmarks that compile steps."""

import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape

if TYPE_CHECKING:
    import jax

Constraints = Literal["layers", "blocks", "none"]
"""Where automatic partitioning is told layouts: behind every linear layer and block, behind blocks only, or nowhere."""

SMALL = ModelShape(layers=12, hidden=256, heads=8, kv_heads=8, ffn=1024, vocab=4096, seq_len=256)
"""What steps are run of, where large models are only compiled."""
SMALL_ROWS = 4
"""Sequences of a step that is run."""


def make_devices(count: int) -> None:
    """The CPU backend with virtual devices, also where there is an accelerator; too late once jax has started."""
    import jax

    from axonn_jax.core import compat

    if not compat.backends_started():
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", count)


def cuda_plugin_installed() -> bool:
    """Return True if jax's CUDA plugin is installed, which compiles for GPUs also on hosts without any."""
    if importlib.util.find_spec("jax_plugins") is None:  # a submodule of a missing package raises
        return False
    return any(importlib.util.find_spec(f"jax_plugins.xla_cuda{version}") for version in (12, 13))


def h100(devices: int) -> list[Any]:
    """H100 GPUs in nodes of eight as XLA's target description has them, to compile for, not to run on.

    Needs `ptxas`, but neither a GPU nor its driver.

    Raises:
        UserError: jax's CUDA plugin is not installed.
    """
    from jax.experimental import topologies

    if not cuda_plugin_installed():
        accepted = "the extra `aot`: pip install 'axonn_jax[aot]'"
        raise UserError("this environment", "without jax's CUDA plugin", accepted)
    target, shape = (Path(__file__).with_name("h100.txtpb")).read_text(), f"1x{-(-devices // 8)}x8"
    described = topologies.get_topology_desc(
        "gpus", "cuda", target_config=target, topology=shape
    )  # slices, hosts, GPUs
    return list(described.devices)[:devices]


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
