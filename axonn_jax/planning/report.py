"""Sentences on the reasons for a candidate, and step times with fewer devices."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.pipe.schedule.policies import ByArrival
from axonn_jax.planning.communication import Predicted, predict
from axonn_jax.planning.machines.machine import Machine
from axonn_jax.planning.machines.network import GroupLinks
from axonn_jax.planning.request import Candidate, Estimate, PlanRequest
from axonn_jax.planning.search import TIE, SearchResult, search
from axonn_jax.planning.space import SearchSpace, grid_axes


def explain(request: PlanRequest, plan: SearchResult, estimate: Estimate) -> list[str]:
    """Return sentences on the parts of a candidate's time and memory."""
    candidate, memory = estimate.candidate, estimate.memory
    sentences = [_time(estimate)]
    grid = candidate.grid
    if grid.y * grid.x > 1:
        sentences.append(_node(grid, request.machine))
    if grid.pipe > 1:
        sentences.append(
            f"{candidate.microbatches} microbatches keep the bubble of {grid.pipe} stages at {estimate.bubble:.1%}"
            + (f" with {candidate.virtual_stages} virtual stages each." if candidate.virtual_stages > 1 else ".")
        )
        policy = request.schedule(candidate)
        live, usual = (rule.live(candidate.pipeline, 0) for rule in (policy, ByArrival(splits=policy.splits)))
        if isinstance(policy, ByArrival) and live != usual:
            depth = policy.depth(candidate.pipeline)
            sentences.append(
                f"{depth} microbatches in flight, with memory for all their activations, shorten waits."
                if live > usual
                else f"There is memory for {depth} microbatches in flight, fewer than by default."
            )
    if candidate.activations != "none":
        sentences.append(_recomputed(candidate.activations))
    if candidate.keeps_weights:
        sentences.append(
            f"Weights gathered over z stay for a {'step' if candidate.once else 'microbatch'} "
            f"({memory.gathered / 1e9:.1f} GB) and are not gathered again."
        )
    if candidate.offload:
        stays = f", {memory.staying / 1e9:.1f} GB more stay on the device" if memory.staying else ""
        sentences.append(
            f"Optimizer state is on the host ({(memory.host - memory.staying) / 1e9:.1f} GB a device{stays}), as not "
            "all fits beside the rest."
        )
    if candidate.zero:
        sentences.append(f"ZeRO-1 shares optimizer state among {grid.replicas} replicas.")
    if request.attention_form.why:
        sentences.append(f"Attention is {request.attention_form.kernel} ({request.attention_form.why}).")
    closest = next((other for other in plan.best if other is not estimate and other.step_s >= estimate.step_s), None)
    if closest is not None and closest.step_s > estimate.step_s * (1 + TIE):
        sentences.append(f"The next grid takes {closest.step_s / estimate.step_s - 1:.1%} longer.")
    return sentences


def step_collectives(request: PlanRequest, candidate: Candidate) -> tuple[Predicted, ...]:
    """Return the collectives of a candidate's step, of all its stages, in the order of the model.

    Layers are unrolled. Pipeline stages gather weights and scatter gradients for every microbatch.
    """
    grid, count = replace(candidate.grid, pipe=1), candidate.microbatches
    stages = candidate.grid.pipe > 1
    unpipelined = replace(candidate, grid=grid, microbatches=1 if stages else count)
    comm = request.comm(candidate.grid, candidate.activations)
    sent = predict(request.step(unpipelined, request.batch // (count if stages else 1), comm))
    return tuple(
        collective._replace(times=collective.times * count) if stages and collective.phase != "update" else collective
        for collective in sent
    )


def _time(estimate: Estimate) -> str:
    parts = {
        "compute": estimate.compute_s,
        "exposed communication": estimate.exposed_s,
        "bubble": estimate.bubble * estimate.step_s,
        "the optimizer": estimate.update_s,
    }
    shown = [
        f"{name} {seconds / estimate.step_s:.1%}"
        for name, seconds in parts.items()
        if seconds > 0.0005 * estimate.step_s
    ]
    hidden = sum(estimate.hidden.values())
    overlap = f", with {hidden:.2f} s of communication beside it" if hidden > 0 else ""
    return f"{', '.join(shown)} of the step{overlap}."


def _node(grid: GridShape, machine: Machine) -> str:
    product, node = f"x * y = {grid.x * grid.y}", machine.node.devices
    if GroupLinks(grid, machine).near(("y", "x")):
        return f"{product} stays inside a node of {node}."
    if grid.x * grid.y > node:
        return f"{product} leaves the node of {node}, which costs bandwidth."
    return f"{product} does not divide a node of {node}: groups that lie in two nodes cost bandwidth."


def _recomputed(activations: str) -> str:
    return {
        "full": "Blocks are computed again in the backward pass to save memory.",
        "dots": "Results of matmuls are kept and the rest is computed again.",
        "save_collectives": "All but all-reduces is computed again, so that nothing is communicated twice.",
        "offload": "Inputs of blocks wait on the host for the backward pass.",
    }[activations]


_SEEDS = 5
"""Number of best grids from which the grids of half as many devices are derived."""


def scaling(
    requests: Sequence[PlanRequest], best: Sequence[Estimate], space: SearchSpace, limit: float
) -> list[tuple[int, float]]:
    """Return the devices and seconds per step of a plan, then of half as many devices for each further request.

    The search covers the best grids with one axis halved, and these with a factor of two moved to another axis. The
    list ends where no grid fits.
    """
    points = [(best[0].candidate.grid.devices, best[0].step_s)]
    for request in requests:
        free = [axis for axis in grid_axes(request.shape) if axis not in space.axes]
        halves = set(_scaled((estimate.candidate.grid for estimate in best[:_SEEDS]), free, 0.5))
        grids = halves | set(_scaled(_scaled(halves, free, 0.5), free, 2))
        devices = points[-1][0] // 2
        # Restrict the search to these grids: a full search would repeat the plan's work for every point.
        try:
            best = search(request, devices, replace(space, grids=sorted(grids, key=str)), limit).best
        except UserError:
            break
        points.append((devices, best[0].step_s))
    return points


def _scaled(grids: Iterable[GridShape], axes: Sequence[str], factor: float) -> Iterator[GridShape]:
    """Yield the grids with one of these axes scaled by the factor, if the size stays an integer."""
    for grid in grids:
        for axis in axes:
            if (size := getattr(grid, axis) * factor) == int(size):
                yield replace(grid, **{axis: int(size)})
