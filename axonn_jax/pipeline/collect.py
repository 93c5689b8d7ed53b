"""Brings every rank's timeline to the first one, on one clock."""

import time
from typing import TYPE_CHECKING

from axonn_jax.pipeline.timeline import Recorder, Span, estimate_offset, merge, shift

if TYPE_CHECKING:
    from mpi4py import MPI

_ROUNDS = 8


def collect(recorder: Recorder, pipe: "MPI.Comm | None") -> list[Span]:
    """Returns the spans of all places of the pipe on place 0's clock, there; elsewhere an empty list.

    Collective over `pipe` (None: one process, which has them all): a few messages of 8 bytes with every place to
    compare clocks, then its spans, about 100 bytes each.
    """
    own = recorder.spans()
    if pipe is None:
        return merge([own])
    place = pipe.Get_rank()
    if place > 0:
        for _ in range(_ROUNDS):
            pipe.recv(source=0)
            pipe.send(time.monotonic(), 0)
        pipe.send(own, 0)
        return []
    everyone = [own]
    for other in range(1, pipe.Get_size()):
        samples = []
        for _ in range(_ROUNDS):
            sent = time.monotonic()
            pipe.send(None, other)
            remote = pipe.recv(source=other)
            samples.append((sent, remote, time.monotonic()))
        theirs: list[Span] = pipe.recv(source=other)
        everyone.append(shift(theirs, -estimate_offset(samples)))
    return merge(everyone)
