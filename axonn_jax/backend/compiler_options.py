"""XLA's compiler options that a program's backend needs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax


def step_options(platform: str, ordered: bool) -> dict[str, Any]:
    """XLA's compiler options of a training step: none but on GPUs; `ordered` if collectives run beside matmuls.

    Matmuls are cuBLAS's: XLA's own kernels took 4 s to choose among and a step up to 1 % longer.
    Combined collectives wait for the last and end with the first of their members, so nothing is combined that the
    program did not combine itself; and many collectives may be under way at once: with a limit of 8, gathers that take
    long between nodes used all of it, and the all-reduces beside them were waited for at once.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    overlap = {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    }
    return {"xla_gpu_enable_triton_gemm": False} | (overlap if ordered else {})


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
