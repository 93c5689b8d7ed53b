"""The planner's choice for two processes of this machine, which is calibrated first."""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from race import mpirun
from surveying.workloads import Workload


def planned(workload: Workload, folder: Path) -> dict[str, Any]:
    """Axes, microbatches, and settings of memory and pipeline of the fastest grid of two.

    A microbatch has as many sequences as those of all contestants.
    """
    from axonn_jax.planner.machines.machine_file import load_machine
    from axonn_jax.planner.request import OverlapFlags, PlanRequest
    from axonn_jax.planner.search import search
    from axonn_jax.planner.space import SearchSpace

    path, shape = folder / "machine.toml", workload.shape()
    if not path.exists():
        words = ["calibrate", "--devices", "2", "--out", str(path), "--seq", str(shape.seq_len)]
        words += ["--head-dim", str(shape.head_dim)]
        command = [*mpirun(2), sys.executable, "-P", "-m", "axonn_jax.cli.main", *words]
        done = subprocess.run(command, capture_output=True, text=True, env=dict(os.environ), timeout=900)
        if done.returncode:
            sys.exit(f"error: axonn-jax calibrate ended with status {done.returncode}: {done.stderr[-500:]}")
    machine = load_machine(str(path)).shared(2)
    nothing = OverlapFlags(gathers=False, scatters=False, gradients=False, forward=False)  # as on XLA's CPU backend
    request = PlanRequest(shape, machine, workload.rows, "fp32", switches=nothing)
    space = SearchSpace(sequences=workload.rows // workload.microbatches)
    best = search(request, 2, space, request.memory_limit()).best[0].candidate
    axes = {name: size for name, size in asdict(best.grid).items() if size > 1}
    memory = {"zero": int(best.zero), "offload": "optimizer" if best.offload else "none"}
    memory |= {"activations": best.activations, "reshard_after": best.reshard_after}
    pipeline = {"virtual_stages": best.virtual_stages, "in_flight": best.in_flight}
    return {"axes": axes, "microbatches": best.microbatches, "memory": memory, "pipeline": pipeline}
