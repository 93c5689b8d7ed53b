"""XLA's compiler options that a program's backend needs."""

import functools
from collections.abc import Mapping
from typing import Any

import jax


def step_options(platform: str, ordered: bool) -> dict[str, Any]:
    """Return XLA's compiler options of a training step, empty except on GPUs.

    Args:
        platform: Platform of the devices.
        ordered: True if the program orders collectives to run alongside matmuls.
    """
    if platform not in ("gpu", "cuda"):
        return {}
    # A combined collective waits for the last of its inputs, and has to finish for the first of its users, so XLA must
    # not combine what the program did not. Allow many collectives in flight: with a limit of 8, slow gathers between
    # nodes took every slot, and the all-reduces beside them were waited for at once.
    overlap = {
        "xla_gpu_all_gather_combine_threshold_bytes": 0,
        "xla_gpu_all_reduce_combine_threshold_bytes": 0,
        "xla_gpu_reduce_scatter_combine_threshold_bytes": 0,
        "xla_gpu_experimental_parallel_collective_overlap_limit": 32,
    }
    # Use cuBLAS for matmuls: autotuning XLA's own kernels took 4 s, and steps were up to 1 % slower.
    return {"xla_gpu_enable_triton_gemm": False} | (overlap if ordered else {})


def supported_options(options: Mapping[str, object]) -> dict[str, Any]:
    """Return the options that the installed jaxlib supports, found by compiling an empty program with each of them.

    Args:
        options: Compiler options by name.
    """
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
