"""Survey worker: one process of one contestant, `worker_survey.py SPEC`, a JSON object; see `surveying.race`.

It answers `step` with seconds, loss and the core's time, `evaluate` with the held-out loss, `memory` with bytes, of
which those of `settle` are gone.
"""

import ctypes
import gc
import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    os.environ["BENCH_CORE"] = os.environ.get("OMPI_COMM_WORLD_LOCAL_RANK", os.environ["BENCH_CORE"])
    os.sched_setaffinity(0, {int(os.environ["BENCH_CORE"])})  # jax and torch size their pools by it
    os.environ.update(dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1"))

from surveying.contestant import Job, Runner, found
from surveying.workloads import WORKLOADS, Data


class Answers:
    """Answers to the orders of the main process."""

    def __init__(self, runner: Runner, job: Job):
        self._runner, self._job, self._number = runner, job, 0

    def to(self, order: str) -> dict[str, Any]:
        """Carry out one order."""
        if order == "step":
            batch = self._job.data.batch(self._number, self._job.rows)  # outside of the time
            self._number += 1
            before, start = os.times(), time.perf_counter()
            loss = self._runner.step(batch)
            seconds, after = time.perf_counter() - start, os.times()
            spent = {"user": after.user - before.user, "system": after.system - before.system}
            return {"seconds": seconds, "loss": loss, **spent}
        if order == "evaluate":
            return {"loss": self._runner.evaluate(self._job.data.held_out())}
        if order == "settle":
            peak = peak_resident()
            forget_start()
            return {"with_start": peak}
        return {"resident": peak_resident(), "state": self._runner.state_bytes()}


def peak_resident() -> int:
    """Largest resident memory of this process since the last `forget_start`, bytes."""
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_start() -> None:
    """Return to the system what a compiler has freed, and let the largest resident memory count from now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")


def serve_mpi(answer: Callable[[str], dict[str, Any]]) -> None:
    """Answer orders that rank 0 reads; the others look for them now and then, since who waits in MPI spins."""
    from mpi4py import MPI

    comm = MPI.COMM_WORLD.Dup()
    import numpy as np

    orders = ("end", "step", "evaluate", "settle", "memory")
    if comm.rank == 0:
        print(json.dumps({"ready": True}), flush=True)
    while True:
        order = np.zeros(1, np.int32)
        if comm.rank == 0:
            order[0] = orders.index(sys.stdin.readline().strip() or "end")
        wait(comm.Ibcast(order), 0.003)
        if not order[0]:
            return
        got = answer(orders[order[0]])
        wait(comm.Ibarrier(), 0.0005)  # the benchmark stops all ranks when it is another's turn
        all_of_them = comm.gather(got)
        if comm.rank == 0:
            largest = {key: max(one[key] for one in all_of_them) for key in got}
            print(json.dumps({**largest, "loss": got.get("loss")}), flush=True)


def wait(request: Any, seconds: float) -> None:
    """Look at a request at intervals until it is done."""
    while not request.Test():
        time.sleep(seconds)


def main() -> None:
    """Build the contestant and serve orders."""
    spec = json.loads(sys.argv[1])
    workload = WORKLOADS[spec["workload"]]
    data = Data(Path(spec["folder"]), workload, spec["seed"])
    contestant = found()[spec["name"]]
    rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", spec["rank"]))
    job = Job(workload, data, spec["rows"], rank, contestant.ranks, spec["port"], spec["choice"])
    answers = Answers(contestant.build(job), job)
    if "OMPI_COMM_WORLD_SIZE" in os.environ:
        serve_mpi(answers.to)
    else:
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            print(json.dumps(answers.to(line.strip())), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
