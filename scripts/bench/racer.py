"""One contestant of a race on its own core, as the process `racer.py SPEC`; and functions of one process in turns.

SPEC is a JSON object: the function that `build` names ("file:function", of a module or a script here) makes of it what
answers orders, each with a dict. Under mpirun rank 0 takes the orders and gives the largest of all ranks' figures.
"""

import importlib
import json
import os
import runpy
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ORDER_BYTES = 64
Answer = Callable[[str], dict[str, Any]]


def in_turns(work: Mapping[str, Callable[[], Any]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of so many calls of each function, one after the other, behind some that do not count."""
    import jax

    times: dict[str, list[float]] = {name: [] for name in work}
    for number in range(rounds + warm_up):
        for name, run in work.items():
            began = time.perf_counter()
            jax.block_until_ready(run())
            times[name] += [time.perf_counter() - began] if number >= warm_up else []
    return times


def peak(work: Callable[[], Any], figure: Callable[[], int]) -> tuple[int, Any]:
    """The largest value of a figure while work is done, looked at every 2 ms; and what the work returned."""
    most, done = figure(), threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.002):
            most = max(most, figure())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        returned = work()
    finally:
        done.set()
        thread.join()
    return max(most, figure()), returned


def pin(place: int) -> None:
    """Keeps this process on one core. Call before jax or torch is imported: they size their pools by it."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[place % len(cores)]})


def timed(step: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a step returns, with its seconds."""
    begin = time.perf_counter()
    found = step()
    return {"seconds": time.perf_counter() - begin, **found}


def serve(answer: Answer) -> None:
    """Answer orders from standard input; of several ranks those of the first."""
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        _serve_mpi(answer)
        return
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(line.strip())), flush=True)


def _serve_mpi(answer: Answer) -> None:
    """Answer orders that rank 0 reads; the others look for them now and then, since who waits in MPI spins."""
    import numpy as np
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()

    def wait(request: Any, pause: float) -> None:
        while not request.Test():
            time.sleep(pause)

    if comm.rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    while True:
        order = np.zeros(ORDER_BYTES, np.uint8)
        if comm.rank == 0:
            text = sys.stdin.readline().strip().encode()
            order[: len(text)] = list(text)
        wait(comm.Ibcast(order), 0.003)
        if not order[0]:
            return
        got = answer(bytes(order).rstrip(b"\0").decode())
        wait(comm.Ibarrier(), 0.0005)  # the benchmark stops all ranks when it is another's turn
        every = comm.gather(got)
        if every is not None:
            largest = {key: max(one[key] for one in every if key in one) for key in got}
            print(json.dumps({**largest, **({"loss": got["loss"]} if "loss" in got else {})}), flush=True)


def main() -> None:
    """Be one process of a contestant."""
    pin(int(os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ["BENCH_CORE"])))
    spec = json.loads(sys.argv[1])
    name, _, function = spec["build"].partition(":")
    script = HERE / name
    found = runpy.run_path(str(script)) if script.is_file() else vars(importlib.import_module(name))
    serve(found[function](spec))
    os._exit(0)


if __name__ == "__main__":
    main()
