"""XLA's compiler options that a program's backend needs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax


def overlap_options(platform: str) -> dict[str, Any]:
    """XLA's compiler options under which collectives run beside matmuls: none but on GPUs.

    Combined collectives wait for the last and end with the first of their members, so nothing is combined that the
    program did not combine itself; and many collectives may be under way at once: with a limit of 8, gathers that take
    long between nodes used all of it, and the all-reduces beside them were waited for at once.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    return {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    }


def known_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Compiler options among `options` that the installed jaxlib has, found by compiling nothing with each."""
    return {name: value for name, value in options.items() if _knows(name, value)}


@functools.cache
def _knows(name: str, value: Any) -> bool:
    try:
        jax.jit(lambda: ()).lower().compile({name: value})
    except jax.errors.JaxRuntimeError as error:
        if "No such compile option" not in str(error):
            raise
        return False
    return True
