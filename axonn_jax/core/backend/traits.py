"""Traits of XLA's backends by platform name, as in `Device.platform` and machine files; no jax.

Observed with jax and jaxlib 0.10.2 to 0.12. An unknown platform is treated as an accelerator.
"""

_CPU = "cpu"


def computes_on_cores(platform: str) -> bool:
    """Return whether devices compute with the host's cores, in the host's memory.

    If so, arrays are host memory that MPI and checkpoint threads can read, temporaries come from the host's allocator,
    a blocked operation occupies one of few threads, and launching a program adds nothing to its time.
    """
    return platform == _CPU


def merges_recomputation(platform: str) -> bool:
    """Return whether XLA undoes recomputation outside of loops: it drops barriers before merging equal operations."""
    return platform == _CPU


def overlaps_collectives(platform: str) -> bool:
    """Return whether collectives run concurrently with computation, so that scheduling can hide them."""
    return platform != _CPU


def reduces_in_place(platform: str) -> bool:
    """Return whether an all-reduce of a full array needs no second buffer."""
    return platform != _CPU


def branches_freely(platform: str) -> bool:
    """Return whether branching on a computed value is free.

    On an accelerator, a branch makes the host wait for the value. On CPUs, selecting instead is the worse choice: XLA
    fuses every selected result separately, and would copy optimizer moments that another result still reads.
    """
    return platform == _CPU


def copies_kernels(platform: str) -> bool:
    """Return whether matmuls of few tokens are faster with transposed kernels.

    XLA's CPU compiler calls Eigen, which copies the second operand of every matmul into panels.
    """
    return platform == _CPU


def convolves_slowly_in_loops(platform: str) -> bool:
    """Return whether convolutions take many times as long inside a loop as outside."""
    return platform == _CPU


def prefers_flat_forms(platform: str) -> bool:
    """Return whether products of arrays with more than two axes take longer than those of matrices, and the gradient of
    max pooling many times as long as that of maxima of slices."""
    return platform == _CPU


def keeps_score_gradients(platform: str) -> bool:
    """Return whether attention scores and their gradients are alive at once, because XLA runs blocks concurrently."""
    return platform == _CPU


def half_precision_pays(platform: str) -> bool:
    """Return whether bfloat16 matmuls are faster than float32 ones; on CPUs they take as long or longer."""
    return platform != _CPU


def fused_attention_expected(platform: str) -> bool:
    """Return whether jax has fused attention kernels for the platform, so that running without one is unexpected."""
    return platform != _CPU


def pools_memory(platform: str) -> bool:
    """Return whether jax preallocates a fraction of a device's memory, which bounds what programs can use."""
    return platform not in (_CPU, "tpu")


def gives_up_on_late_peers(platform: str) -> bool:
    """Return whether a group of processes must synchronize before its first step.

    gloo opens a group's sockets in its first collective, and fails if a member is more than 30 s late.
    """
    return platform == _CPU
