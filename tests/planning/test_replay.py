"""Steps played again: a simulated step's own spans give it back, whatever the policy, jitter or place of a stage."""

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape, Task
from axonn_jax.planning.simulate.perturb import Perturbation, simulate_perturbed
from axonn_jax.planning.simulate.replay import replay, task_runs
from axonn_jax.planning.simulate.simulator import TaskRun
from axonn_jax.planning.simulate.steady import StageTimes

TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.2, Kind.BACKWARD_WEIGHT: 0.9, Kind.BACKWARD: 2.1}


def step(pipe_shape, policy, split=True, jitter=0.3, message=0.05):
    times = StageTimes(
        pipe_shape, {(k, stage): s for k, s in TIMES.items() for stage in range(pipe_shape.stages)}, message
    )
    return simulate_perturbed(times, policy_of(policy, split=split), Perturbation(jitter=jitter))


def measured(simulation, later=100.0):
    return [TaskRun(span.task, span.rank, span.start + later, span.end + later) for span in simulation.spans]


@pytest.mark.parametrize("pipe_shape", [PipelineShape(2, 8), PipelineShape(4, 16), PipelineShape(3, 9, 2)], ids=str)
@pytest.mark.parametrize(
    ("policy", "split"), [("message", True), ("message", False), ("interleaved", False), ("gpipe", False)]
)
def test_a_step_is_played_again(pipe_shape, policy, split):
    ran = step(pipe_shape, policy, split)
    played = replay(measured(ran), policy)
    assert played.measured_s == pytest.approx(ran.makespan)
    assert played.simulated_s == pytest.approx(ran.makespan, rel=0.02)


def test_without_jitter_messages_and_gaps_are_found_exactly():
    ran = step(PipelineShape(4, 12), "1f1b", jitter=0.0)
    played = replay(measured(ran), "1f1b")
    assert played.message_s == pytest.approx(0.05)
    assert played.gap_s == pytest.approx(0.0)
    assert played.simulated_s == pytest.approx(ran.makespan)


def test_another_policy_can_be_tried():
    ran = step(PipelineShape(4, 16), "gpipe", jitter=0.0, split=False)
    assert replay(measured(ran), "1f1b").simulated_s == pytest.approx(
        step(PipelineShape(4, 16), "1f1b", jitter=0.0).makespan
    )
    split = step(PipelineShape(4, 16), "message", jitter=0.0)
    fused = replay(measured(split), "1f1b")
    assert fused.simulated_s == pytest.approx(step(PipelineShape(4, 16), "1f1b", jitter=0.0).makespan, rel=0.02)
    with pytest.raises(UserError, match="--replay = 'zero-bubble'"):
        replay(measured(ran), "zero-bubble")


def test_incomplete_steps_are_refused():
    whole = measured(step(PipelineShape(2, 4), "1f1b"))
    with pytest.raises(ValueError, match="without tasks"):
        replay([], "1f1b")
    with pytest.raises(ValueError, match="7 forwards of 2 stages"):
        replay([one for one in whole if one.task != Task(Kind.FORWARD, 0, 1)], "1f1b")


def test_names_of_tasks():
    assert task_runs("F3.12", 1, 2.0, 5.0) == [TaskRun(Task(Kind.FORWARD, 3, 12), 1, 2.0, 5.0)]
    with pytest.raises(ValueError, match="a task called 'optimizer'"):
        task_runs("optimizer", 0, 0.0, 1.0)


def test_a_span_of_two_tasks_is_shared_by_their_matmuls():
    forward, backward, inputs = (Task(kind, 1, 0) for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT))
    assert task_runs("FB1.0", 1, 0.0, 3.0) == [TaskRun(forward, 1, 0.0, 1.0), TaskRun(backward, 1, 1.0, 3.0)]
    assert task_runs("FI1.0", 1, 0.0, 3.0) == [TaskRun(forward, 1, 0.0, 1.5), TaskRun(inputs, 1, 1.5, 3.0)]
