"""Traits of XLA's backends by the platform's name, as `Device.platform` and machine files have it; no jax.

Seen with jax and jaxlib 0.10.2 to 0.12. An unknown platform counts as an accelerator.
"""

_CPU = "cpu"


def computes_on_cores(platform: str) -> bool:
    """True if devices compute with the host's cores, in the host's memory.

    Arrays are then host memory that threads of MPI and of the checkpoint see; temporaries come from the host's
    allocator; a blocked operation holds one of few threads; and starting a program takes none of its time.
    """
    return platform == _CPU


def merges_recomputation(platform: str) -> bool:
    """True if XLA undoes recomputation outside of loops: it drops the barriers before it merges equal operations."""
    return platform == _CPU


def overlaps_collectives(platform: str) -> bool:
    """True if collectives run beside computation, so that an order of the two can hide them."""
    return platform != _CPU


def reduces_in_place(platform: str) -> bool:
    """True if an all-reduce of a whole array needs no second one."""
    return platform != _CPU


def branches_freely(platform: str) -> bool:
    """True if a branch on a computed value makes nothing wait.

    An accelerator's branch makes the host wait for the value. XLA's CPU backend fuses each result of a choice between
    numbers by itself, and would copy moments that another result still reads.
    """
    return platform == _CPU


def copies_kernels(platform: str) -> bool:
    """True if products of few tokens are faster with kernels held transposed.

    XLA's CPU compiler calls Eigen, which copies the second operand of each product into panels.
    """
    return platform == _CPU


def convolves_slowly_in_loops(platform: str) -> bool:
    """True if a loop's convolutions take many times as long as the same ones outside of it."""
    return platform == _CPU


def pools_slowly(platform: str) -> bool:
    """True if the gradient of a maximum over windows takes many times as long as that of slices."""
    return platform == _CPU


def keeps_score_gradients(platform: str) -> bool:
    """True if a block's scores and their gradients are at work at once: XLA runs blocks beside each other."""
    return platform == _CPU


def half_precision_pays(platform: str) -> bool:
    """True if bfloat16 matmuls are faster than float32's; on CPUs they take as long or longer."""
    return platform != _CPU


def fused_attention_expected(platform: str) -> bool:
    """True if jax has kernels of fused attention for the platform, so that doing without one is news."""
    return platform != _CPU


def pools_memory(platform: str) -> bool:
    """True if jax takes a fraction of a device's memory when it starts, the only memory of programs."""
    return platform not in (_CPU, "tpu")


def gives_up_on_late_peers(platform: str) -> bool:
    """True if a group of processes must meet before its first step.

    gloo makes a group's sockets at its first collective, and fails when a member is 30 s late.
    """
    return platform == _CPU
