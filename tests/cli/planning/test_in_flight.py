"""Pipelines whose messages take time: what the planner says, against whole simulations, and what it puts in flight."""

from dataclasses import replace

import pytest

from axonn_jax.cli.plan.flags import command, in_flight
from axonn_jax.cli.plan.model import resolve_model
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.report import explain
from axonn_jax.planning.request import Candidate, PlanRequest
from axonn_jax.planning.search import SearchResult, search
from axonn_jax.planning.simulate.candidate import Prices
from axonn_jax.planning.simulate.simulator import simulate
from axonn_jax.planning.space import SearchSpace

SHAPE = replace(preset("gpt-5b"), layers=64, vocab=512)
ROOMY = 1e15


def job(latency, microbatches, pipe):
    """A job whose messages take `latency` forwards of a stage, on a machine with memory for everything."""
    plain, choice = load_machine("perlmutter"), Candidate(GridShape(pipe=pipe), microbatches)
    plain = replace(plain, device=replace(plain.device, memory_bytes=ROOMY))
    made = PlanRequest(SHAPE, plain, microbatches, "bf16")
    forward = max(s for (kind, _), s in Prices(CostModel(made)).stage_times(choice).tasks.items() if kind.value == "F")
    node = replace(plain.node, latency_s=latency * forward, bytes_per_s=1e18)
    network = replace(plain.network, latency_s=latency * forward, bytes_per_s=1e18)
    return replace(made, machine=replace(plain, node=node, network=network))


def simulated_whole(model, choice):
    times, policy = Prices(model).stage_times(choice), model.request.schedule(choice)
    return simulate(times.pipe_shape, policy, task_time=times.task, message_time=times.carried).makespan


def only(pipe, **fixed):
    return SearchSpace(axes={"pipe": pipe, "data": 1, "z": 1, "y": 1, "x": 1}, virtual_stages=(1,), **fixed)


@pytest.mark.parametrize("activations", ["none", "full"])
@pytest.mark.parametrize("latency", [0.0, 0.1, 0.3, 1.0])
@pytest.mark.parametrize(("pipe", "microbatches"), [(2, 32), (4, 16), (4, 64), (8, 64), (16, 192)])
def test_the_answer_is_the_whole_simulations_and_the_closed_form_near_it(pipe, microbatches, latency, activations):
    model = CostModel(job(latency, microbatches, pipe))
    for depth in (pipe, 0, 2 * pipe):
        choice = Candidate(GridShape(pipe=pipe), microbatches, activations, in_flight=depth)
        whole = simulated_whole(model, choice)
        once, closed = model.once_s(choice.grid, choice.placement, 0.0), model.estimate(choice)
        assert Prices(model).price(choice).step_s - once == pytest.approx(whole, rel=0.005)
        assert closed.step_s - once == pytest.approx(whole, rel=0.1)


def test_a_long_message_takes_more_microbatches_in_flight():
    """P 8, M 64, a message as long as a forward: 1F1B's 8 took 1.5 of the time without a bubble."""
    asked = job(1.0, 64, 8)
    best = search(asked, 8, only(8, activations=("none",), sequences=1), ROOMY).best[0]
    assert best.simulated
    assert best.candidate.in_flight in (16, 24)
    model, usual = CostModel(asked), replace(best.candidate, in_flight=0)
    assert best.step_s < 0.95 * Prices(model).price(usual).step_s
    assert best.step_s < 0.75 * Prices(model).price(replace(usual, in_flight=8)).step_s
    assert f"--pipeline.in_flight {best.candidate.in_flight}" in command(resolve_model("gpt-5b"), asked, best.candidate)


def test_where_messages_take_no_time_to_speak_of_the_default_stays():
    asked = job(0.01, 64, 8)
    best = search(asked, 8, only(8, activations=("none",)), ROOMY).best[0]
    assert (best.candidate.in_flight, in_flight(asked, best.candidate)) == (0, 12)
    assert "in_flight" not in command(resolve_model("gpt-5b"), asked, best.candidate)


@pytest.mark.parametrize(
    ("stages", "depth", "says"),
    [(1, 0, ""), (1, 8, "fewer than by default"), (1, 16, "shorten waits"), (2, 0, ""), (2, 16, "shorten waits")],
)
def test_a_plan_says_where_more_or_fewer_than_by_default_are_in_flight(stages, depth, says):
    """With several stages twice the pipe is the default's number, but not the default's memory."""
    asked = job(1.0, 64, 8)
    one = CostModel(asked).estimate(Candidate(GridShape(pipe=8), 64, virtual_stages=stages, in_flight=depth))
    plan = SearchResult([one], [one], [], 1, Prices(CostModel(asked)))
    found = [sentence for sentence in explain(asked, plan, one) if "in flight" in sentence]
    assert len(found) == bool(depth)
    assert all(says in sentence and f"{depth} microbatches" in sentence for sentence in found)


@pytest.mark.parametrize(("room", "depth"), [(8, 8), (12, 0), (16, 16)])
def test_no_more_are_in_flight_than_there_is_memory_for(room, depth):
    asked = job(1.0, 64, 8)
    model, space = CostModel(asked), only(8, activations=("none",), offload=(False,), zero=(0,), sequences=1)
    limit = model.footprint.memory(Candidate(GridShape(pipe=8), 64, in_flight=room)).total + 1
    best = search(asked, 8, space, limit).best[0]
    assert best.candidate.in_flight == depth
    assert best.memory.total <= limit
    assert ("--pipeline.in_flight" in command(resolve_model("gpt-5b"), asked, best.candidate)) == (depth > 0)


def test_other_policies_have_no_such_number():
    asked = replace(job(1.0, 64, 8), policy="zero-bubble")
    best = search(asked, 8, only(8, activations=("none",)), ROOMY).best[0]
    assert (best.candidate.in_flight, in_flight(asked, best.candidate)) == (0, 0)


def test_a_deep_pipeline_that_may_be_the_best_is_simulated():
    found = search(job(0.1, 512, 32), 32, only(32, activations=("none",), sequences=1), ROOMY)
    assert found.best[0].simulated
