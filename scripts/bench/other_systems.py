"""Published runs of other systems in known configurations, and what is calibrated from those of one node."""

import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine import Machine
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.machines.network import GroupLinks
from axonn_jax.planning.request import NO_OVERLAP, Candidate, Estimate, OverlapFlags, PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.space import SearchSpace, legal_grids

# FSDP, like SC 24, overlaps gathers and reductions of the backward pass, not forward all-reduces.
BACKWARD = OverlapFlags(forward=False)


@dataclass(frozen=True)
class Row:
    """A published result and what is predicted for it, in one unit."""

    source: str
    machine: str
    model: str
    devices: int
    unit: str
    published: float
    predicted: float
    note: str = ""
    span: str = ""
    """Where a range is published: all of it, `published` being its nearest end, or the prediction if that is inside."""

    @property
    def error(self) -> float:
        """Predicted over published, less one."""
        return self.predicted / self.published - 1


def mpt(layers: int, hidden: int, heads: int, seq: int = 2048) -> ModelShape:
    """An MPT model of llm-foundry; its vocabulary of 50,368 is rounded up to one that divides over 128."""
    return ModelShape(layers, hidden, heads, heads, 4 * hidden, 51200, seq, bias=False)


MPT = {"1b": (24, 2048, 16), "3b": (32, 2560, 20), "7b": (32, 4096, 32), "13b": (40, 5120, 40), "30b": (48, 7168, 56)}

# Model, GPUs, sequences a microbatch, microbatches, recomputed, tokens/s a GPU. MosaicML llm-foundry,
# scripts/train/benchmarking/README.md (commit c90b9b3), sequence 2,048, FSDP. The first row of each calibrates.
A100_ROWS = (
    ("7b", 8, 12, 4, True, 3679), ("3b", 8, 5, 8, False, 10065), ("1b", 8, 8, 8, False, 19271),
    ("7b", 64, 18, 1, True, 3665), ("13b", 64, 16, 1, True, 1976), ("30b", 128, 6, 1, True, 865),
)  # fmt: skip
H100_ROWS = (
    ("7b", 8, 6, 1, False, 10643), ("1b", 16, 20, 1, False, 46037), ("3b", 16, 10, 3, False, 24142),
    ("30b", 32, 14, 3, True, 2308), ("13b", 128, 16, 1, True, 5080),
)  # fmt: skip
# A whole MI250 (two GCDs) trained MPT models at 0.80 of an A100-40GB's speed (MosaicML, June 2023), 1.13 times that
# with ROCm 5.7 and FlashAttention-2 (October 2023); an MI250X has 1.058 times an MI250's peak.
GCD_OF_A100 = 0.80 * 1.13 * 1.058 / 2
ATTENTION_OF_GCD = 0.45  # `device.attention` of its fused kernels: an estimate, as those of the machine files
# Megatron-LM on A100 80 GB (Narayanan et al. 2021, table 1): layers, hidden, heads, tensor, pipe, GPUs, batch, TFLOP/s.
MEGATRON_ROWS = (
    (24, 2304, 24, 1, 1, 32, 512, 137), (30, 3072, 32, 2, 1, 64, 512, 138), (36, 4096, 32, 4, 1, 128, 512, 142),
    (40, 6144, 48, 8, 1, 256, 1024, 135), (48, 8192, 64, 8, 2, 512, 1536, 138), (60, 10240, 80, 8, 4, 1024, 1792, 140),
    (80, 12288, 96, 8, 8, 1536, 2304, 148),
)  # fmt: skip


def dgx(machine: Machine, gpus: float) -> Machine:
    """The same device in nodes of eight on NVSwitch, `gpus` bytes/s a node between them, as those clusters have."""
    node = replace(machine.node, devices=8, bytes_per_s=max(machine.node.bytes_per_s, 225e9))
    return replace(machine, node=node, network=replace(machine.network, bytes_per_s=gpus), bandwidth=())


def sustained(machine: Machine, share: float) -> Machine:
    """The machine with another `matmul.sustained`."""
    return replace(machine, matmul=replace(machine.matmul, sustained=share))


def solve(value: Any, wanted: float) -> float:
    """The share at which a value that grows with it is the one wanted."""
    low, high = 0.1, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if value(middle) < wanted else (low, middle)
    return low


def fused(job: PlanRequest) -> PlanRequest:
    """The job with the fused attention that others' programs had, on AMD GPUs too, where ours has none."""
    device = job.machine.device
    device = replace(device, attention=device.attention or ATTENTION_OF_GCD)
    return replace(job, machine=replace(job.machine, device=device), attention="cudnn")


def fsdp(machine: Machine, row: tuple[Any, ...]) -> float:
    """Tokens a second and GPU of an llm-foundry run, whose gradients travel in bf16 (`mixed_precision: PURE`)."""
    name, gpus, sequences, microbatches, again, _ = row
    shape = mpt(*MPT[name])
    job = fused(
        PlanRequest(shape, machine, gpus * sequences * microbatches, "bf16", gradient_item=2, switches=BACKWARD)
    )
    one = CostModel(job).estimate(Candidate(GridShape(z=gpus), microbatches, "full" if again else "none"))
    return job.batch * shape.seq_len / one.step_s / gpus


def megatron(job: PlanRequest, devices: int, limit: float, space: SearchSpace | None = None) -> Estimate:
    """The best of pipe x data x y, `y` inside a node, fixed interleaved order, no overlap inside a stage.

    Raises:
        UserError: none fits.
    """
    chosen = space or SearchSpace()
    only = replace(chosen, axes={**chosen.axes, "z": 1, "x": 1})
    static = replace(job, switches=NO_OVERLAP, policy="interleaved", split=False)
    legal = legal_grids(static, devices, only, Counter())
    near = [grid for grid in legal if GroupLinks(grid, job.machine).near(("y",))]
    return search(static, devices, replace(only, grids=near), limit).best[0]


def megatron_run(machine: Machine, row: tuple[Any, ...]) -> float:
    """TFLOP/s a GPU of a Megatron-LM run at its best microbatch size, recomputation counted as they do.

    It had no fused attention yet.
    """
    layers, hidden, heads, tensor, pipe, gpus, batch, _ = row
    shape, data = ModelShape(layers, hidden, heads, heads, 4 * hidden, 51200, 2048), gpus // tensor // pipe
    job = PlanRequest(
        shape, machine, batch, "bf16", switches=NO_OVERLAP, policy="interleaved", split=False, attention="xla"
    )
    times = [
        CostModel(job).estimate(Candidate(GridShape(pipe, data, 1, tensor, 1), batch // data // size, "full")).step_s
        for size in (1, 2, 4)
        if batch % (data * size) == 0
    ]
    return shape.step_flops(batch, recompute=True) / min(times) / gpus / 1e12


def calibrate() -> dict[str, float]:
    """`matmul.sustained` by machine, from the calibrating rows alone."""
    a100 = solve(
        lambda share: fsdp(sustained(dgx(load_machine("perlmutter"), 200e9), share), A100_ROWS[0]), A100_ROWS[0][5]
    )
    h100 = solve(lambda share: fsdp(sustained(load_machine("dgx-h100"), share), H100_ROWS[0]), H100_ROWS[0][5])
    speed = GCD_OF_A100 * A100_ROWS[0][5]
    gcd = solve(lambda share: fsdp(sustained(load_machine("frontier"), share), A100_ROWS[0]), speed)
    return {
        "perlmutter": a100,
        "perlmutter-80gb": a100,
        "dgx-h100": h100,
        "alps": h100,
        "frontier": gcd,
        "summit": a100,
    }


def others() -> list[Row]:
    """Rows of other systems: they show what the machine and compute models are worth."""
    a100, h100 = dgx(load_machine("perlmutter"), 200e9), load_machine("dgx-h100")
    found = []
    for machine, name, listed in ((a100, "A100 40 GB", A100_ROWS), (h100, "H100", H100_ROWS)):
        for row in listed[1:]:
            found.append(
                Row("llm-foundry", name, f"mpt-{row[0]}", row[1], "tokens/s a GPU", row[5], fsdp(machine, row))
            )
    fat = dgx(load_machine("perlmutter-80gb"), 200e9)
    for row in MEGATRON_ROWS:
        billions = ModelShape(row[0], row[1], row[2], row[2], 4 * row[1], 51200, 2048).params() / 1e9
        found.append(
            Row(
                "Megatron-LM", "A100 80 GB", f"{billions:.1f}B", row[5], "TFLOP/s a GPU", row[7], megatron_run(fat, row)
            )
        )
    return found


def median_error(found: Sequence[Row]) -> float:
    """Median of absolute errors, rows aside of which a range is published: inside of it the error would be 0."""
    return statistics.median(abs(row.error) for row in found if not row.span)
