"""DeepSpeed-TED's published facts (Singh et al., ICS 23) beside what this package's formulas say; no jax."""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from axonn_jax.core.experts.declare import TOKENS
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.declared.transformer import describe_single_device
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.planning import memory
from axonn_jax.planning.communication import Predicted, StepSpec, predict
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.machines.network import GroupLinks
from axonn_jax.planning.memory_model import MemoryModel
from axonn_jax.planning.request import NO_OVERLAP, Candidate, MemoryUse, PlanRequest

CAPACITY = MoeConfig(dispatch="capacity")
BASE, EXPERTS = "6.7b", 16
_BATCH = 1024
"""Sequences a step of the 6.7B base model, as recalled; the paper's was not at hand."""


class Fact(NamedTuple):
    """A claim, what was published, what is computed here, and where the first comes from."""

    claim: str
    published: str
    here: str
    source: str


def facts() -> list[Fact]:
    """The paper's table."""
    counts = {policy: _collectives(policy) for policy in ("full", "save_collectives")}
    rows = predict(_step("full"))
    kept = _exchanged(rows) / _exchanged(with_duplicates(rows))
    faster = [gain for _, gain in speedups()]
    tiled = tiled_memory().total / 1e9
    size = preset(f"ted-{BASE}-16e").params() / 1e9
    return [
        Fact("parameters of the 40B model", "40B: base 6.7B, 16 experts", f"{size:.1f}B", "abstract"),
        Fact(
            "state a device, 4 P (1/Gt + (E+2)/G) bytes",
            "the formula",
            f"differs by at most {max(state_errors()):.2%} on 8 grids",
            "section 3; algebra checked",
        ),
        Fact("base model that fits, over Gt = 1", "4 to 8 times", larger_models(), "abstract; Gt = 6 and 8, E = 16"),
        Fact(
            "all-to-alls + all-reduces over y, a layer",
            "6 + 6; kept 4 + 4",
            "; kept ".join(f"{counts[p][0]} + {counts[p][1]}" for p in ("full", "save_collectives")),
            "derived: communication-aware checkpointing",
        ),
        Fact("all-to-all bytes without duplicates", "1 / Gt", f"{kept:.4f} at Gt = 4", "derived"),
        Fact(
            "40B on 128 V100: faster by both",
            "26 %",
            f"simulated: {min(faster):.0%} to {max(faster):.0%} ({len(faster)} settings)",
            f"abstract; Gt, microbatch unknown; {_BATCH} sequences",
        ),
        Fact(
            "40B on 32 A100 40 GB with the tiled optimizer",
            "31.3 GB; out of memory without",
            f"predicted {tiled:.1f} GB (Gt = 2)",
            "DeepSpeed pull requests 2041, 2079",
        ),
    ]


def speedups() -> list[tuple[str, float]]:
    """What duplicate dropping and kept collectives gain of a step on Summit, by setting; nothing overlaps."""
    gains = []
    for y in (2, 4):
        for sequences in (1, 2):
            grid = GridShape(data=128 // (EXPERTS * y), expert=EXPERTS, y=y)
            request, count = _request("summit", _BATCH), _BATCH // grid.batch_shards // sequences
            before, after = (Candidate(grid, count, policy, zero=1) for policy in ("full", "save_collectives"))
            rows = predict(request.step(before, _BATCH, request.comm(grid, before.activations)))
            links, model = GroupLinks(grid, request.machine), CostModel(request)
            more = _seconds(with_duplicates(rows), links) - _seconds(rows, links)
            gain = (model.estimate(before).step_s + more) / model.estimate(after).step_s - 1
            gains.append((f"Gt {y}, microbatch {sequences}", gain))
    return gains


def with_duplicates(rows: Iterable[Predicted]) -> Iterator[Predicted]:
    """A step's collectives if devices along `y` all send the tokens that they have in common; `x` is not split.

    Nothing is gathered along `y` then, more is exchanged, and whole results are summed instead of their parts.
    """
    rows = list(rows)
    tensor = max(row.group for row in rows if row.axes == ("y",))
    for row in rows:
        if row.name != TOKENS:
            yield row
        elif row.kind == "all-to-all":
            yield row._replace(buffer_bytes=tensor * row.buffer_bytes)
        elif row.kind == "reduce-scatter":
            yield row._replace(kind="all-reduce")


def _seconds(rows: Iterable[Predicted], links: GroupLinks) -> float:
    """Seconds of collectives that nothing runs beside."""
    return sum(float(r.bytes) / links.rate(r.axes) + r.times * links.latency(r.kind, r.axes) for r in rows)


def _request(machine: str, batch: int) -> PlanRequest:
    return PlanRequest(
        preset(f"ted-{BASE}-16e"), load_machine(machine), batch, "fp16",
        gradient_item=2, switches=NO_OVERLAP, moe=CAPACITY,
    )  # fmt: skip


def tiled_memory() -> MemoryUse:
    """Memory of the tiled optimizer's job, of which DeepSpeed says the batch: 32 sequences, one a microbatch."""
    grid = GridShape(expert=EXPERTS, y=2)
    job = replace(_request("perlmutter", 32), bucket=1_800_000)
    return MemoryModel(job).memory(Candidate(grid, 2, "full", zero=1))


def state_errors() -> list[float]:
    """How far the formula is from this package's state, of blocks in half precision with ZeRO-1, on eight grids."""
    shape = preset(f"ted-{BASE}-16e")
    errors = []
    for tensor in (1, 2, 4, 8):
        for devices in (128, 512):
            here, base = _blocks_state(shape, tensor, devices), 12 * shape.layers * shape.hidden**2
            errors.append(abs(here / (4 * base * (1 / tensor + (EXPERTS + 2) / devices)) - 1))
    return errors


def _blocks_state(shape: ModelShape, tensor: int, devices: int) -> float:
    """Bytes of weights, gradients and optimizer state of all blocks on a device."""
    params = [
        (layer.count, param) for layer in describe_single_device(shape) if layer.in_block for param in layer.params
    ]
    experts = sum(count * param.elements for count, param in params if "expert" in param.axes)
    dense = sum(count * param.elements for count, param in params) - experts
    replicas = devices // tensor
    parts = ((dense / tensor, replicas), (experts / tensor / EXPERTS, replicas // EXPERTS))
    return sum(
        memory.device_state(params, "fp16", gradient_item=2, separate_masters=True, replicas=of).total
        for params, of in parts
    )


def larger_models() -> str:
    """Base models of one memory, over those at `Gt` = 1: at 6 and 8, for 128, 256 and 512 devices."""

    def state(tensor: int, devices: int) -> float:
        return 1 / tensor + (EXPERTS + 2) / (devices // tensor * tensor)

    pairs = [[state(1, devices) / state(tensor, devices) for tensor in (6, 8)] for devices in (128, 256, 512)]
    return ", ".join("/".join(f"{times:.1f}" for times in pair) for pair in pairs)


def _step(policy: str) -> StepSpec:
    shape, grid = replace(preset(f"ted-{BASE}-16e"), layers=2), GridShape(expert=EXPERTS, y=4)
    return StepSpec(shape, grid, EXPERTS, StepPolicy(1, policy), 2, moe=CAPACITY)


def _collectives(policy: str) -> tuple[int, int]:
    """All-to-alls, and all-reduces over `y` in the blocks, of a layer with experts."""
    sent = list(with_duplicates(predict(_step(policy))))
    exchanged = sum(row.times for row in sent if row.kind == "all-to-all")
    over_y = [row for row in sent if row.kind == "all-reduce" and row.axes == ("y",)]
    # Both layers have as many in attention; the one without experts has three or two in its feed-forward layer.
    attention = sum(row.times for row in over_y if "attention." in row.name) // 2
    reduced = attention + sum(row.times for row in over_y if row.name == TOKENS)
    return exchanged, reduced


def _exchanged(rows: Iterable[Predicted]) -> float:
    """Bytes of all-to-alls."""
    return float(sum(row.bytes for row in rows if row.kind == "all-to-all"))
