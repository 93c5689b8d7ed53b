"""Why a choice is what it is: its alternatives on the same grid and the next grid, in sentences."""

from axonn_jax.grid import GridShape
from axonn_jax.planner.job import Estimate, Job
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.network import Links
from axonn_jax.planner.ranking import TIE
from axonn_jax.planner.search import Plan
from axonn_jax.schedule.policies import default_in_flight
from axonn_jax.schedule.tasks import Layout


def explain(job: Job, plan: Plan, one: Estimate) -> list[str]:
    """Sentences about what decides the time of a choice and what its memory is spent on."""
    choice, memory = one.choice, one.memory
    said = [_time(one)]
    grid = choice.grid
    if grid.y * grid.x > 1:
        said.append(_node(grid, job.machine))
    if grid.pipe > 1:
        said.append(
            f"{choice.microbatches} microbatches keep the bubble of {grid.pipe} stages at {one.bubble:.1%}"
            + (f" with {choice.virtual_stages} virtual stages each." if choice.virtual_stages > 1 else ".")
        )
    if choice.in_flight:
        usual = default_in_flight(Layout(grid.pipe, choice.microbatches, choice.virtual_stages))
        said.append(
            f"{choice.in_flight} microbatches in flight, with memory for all their activations, shorten waits."
            if choice.in_flight >= usual
            else f"There is memory for {choice.in_flight} microbatches in flight, fewer than by default."
        )
    if choice.activations != "none":
        said.append(_recomputed(choice.activations))
    if choice.gather != "layer":
        said.append(
            f"Weights gathered over z stay for a {'step' if choice.once else 'microbatch'} "
            f"({memory.gathered / 1e9:.1f} GB) and are not gathered again."
        )
    if choice.offload:
        said.append(
            f"Optimizer state is on the host ({memory.host / 1e9:.1f} GB a device): it does not fit beside the rest."
        )
    if choice.zero:
        said.append(f"ZeRO-1 shares optimizer state among {grid.data} replicas.")
    if job.attention_form.why:
        said.append(f"Attention is {job.attention_form.kernel} ({job.attention_form.why}).")
    closest = next((other for other in plan.best if other is not one and other.step_s >= one.step_s), None)
    if closest is not None and closest.step_s > one.step_s * (1 + TIE):
        said.append(f"The next grid takes {closest.step_s / one.step_s - 1:.1%} longer.")
    return said


def _time(one: Estimate) -> str:
    parts = {
        "compute": one.compute_s,
        "exposed communication": one.exposed_s,
        "bubble": one.bubble * one.step_s,
        "the optimizer": one.update_s,
    }
    shown = [f"{name} {seconds / one.step_s:.1%}" for name, seconds in parts.items() if seconds > 0.0005 * one.step_s]
    hidden = sum(one.hidden.values())
    beside = f", with {hidden:.2f} s of communication beside it" if hidden > 0 else ""
    return f"{', '.join(shown)} of the step{beside}."


def _node(grid: GridShape, machine: Machine) -> str:
    both, node = f"x * y = {grid.x * grid.y}", machine.node.devices
    if Links(grid, machine).near(("y", "x")):
        return f"{both} stays inside a node of {node}."
    if grid.x * grid.y > node:
        return f"{both} leaves the node of {node}, which costs bandwidth."
    return f"{both} does not divide a node of {node}: groups that lie in two nodes cost bandwidth."


def _recomputed(activations: str) -> str:
    return {
        "full": "Blocks are computed again in the backward pass to save memory.",
        "dots": "Results of matmuls are kept and the rest is computed again.",
        "save_collectives": "What was all-reduced is kept and the rest computed again, without communicating twice.",
        "offload": "Inputs of blocks wait on the host for the backward pass.",
    }[activations]
