"""Disturbed steps: jitter with the right mean, slow ranks, failures, thousands of ranks."""

import statistics
from math import exp

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape
from axonn_jax.planning.simulate.perturb import Perturbation, factor, simulate_perturbed, uniform
from axonn_jax.planning.simulate.simulator import simulate
from axonn_jax.planning.simulate.steady import StageTimes

PARTS = {Kind.FORWARD: 1.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0, Kind.BACKWARD: 2.0}


def even(pipe_shape, message=0.1):
    return StageTimes(
        pipe_shape, {(kind, stage): s for kind, s in PARTS.items() for stage in range(pipe_shape.stages)}, message
    )


def test_nothing_disturbed_is_the_plain_simulation():
    times = even(PipelineShape(4, 16))
    plain = simulate(times.pipe_shape, policy_of("1f1b"), task_time=times.task, message_time=times.carried)
    found = simulate_perturbed(times, policy_of("1f1b"), Perturbation())
    assert found.finished
    assert found.makespan == plain.makespan


def test_factors_have_mean_one_and_the_sigma_asked_for():
    drawn = [factor(0.5, 1, 7, number) for number in range(4000)]
    assert statistics.fmean(drawn) == pytest.approx(1.0, abs=0.03)
    assert statistics.median(drawn) == pytest.approx(exp(-0.125), abs=0.03)
    assert 0 < uniform(1, 2, 3) < 1
    assert uniform(1, 2, 3) == uniform(1, 2, 3) != uniform(1, 2, 4)


def test_the_slowest_of_many_members_counts():
    one, many = (statistics.fmean(factor(0.2, n, 1, number) for number in range(2000)) for n in (1, 64))
    largest = statistics.fmean(max(factor(0.2, 1, 2, number, m) for m in range(64)) for number in range(300))
    assert one == pytest.approx(1.0, abs=0.02)
    assert many == pytest.approx(largest, rel=0.02)


def test_the_seed_decides_and_replicas_differ():
    times, by = even(PipelineShape(4, 16)), Perturbation(jitter=0.4, seed=3)
    first = simulate_perturbed(times, policy_of("message"), by).makespan
    assert simulate_perturbed(times, policy_of("message"), by).makespan == first
    assert simulate_perturbed(times, policy_of("message"), by, replica=1).makespan != first
    assert simulate_perturbed(times, policy_of("message"), Perturbation(jitter=0.4, seed=4)).makespan != first


def test_a_slow_rank_sets_the_pace():
    times = even(PipelineShape(4, 32))
    healthy = simulate_perturbed(times, policy_of("message"), Perturbation())
    slow = simulate_perturbed(times, policy_of("message"), Perturbation(slow={2: 2.0}))
    assert slow.busy[2] == pytest.approx(2 * healthy.busy[2])
    assert slow.makespan > slow.busy[2]
    assert slow.makespan < 1.15 * slow.busy[2]


def test_a_failed_rank_stops_the_step_where_it_fails():
    times = even(PipelineShape(4, 16))
    healthy = simulate_perturbed(times, policy_of("1f1b"), Perturbation())
    failed = simulate_perturbed(times, policy_of("1f1b"), Perturbation(failed={2: 20.0}))
    assert not failed.finished
    assert 20.0 < failed.makespan < healthy.makespan
    mine = [span for span in failed.spans if span.rank == 2]
    assert max(span.end for span in mine) <= 20.0
    # Until the failure everything is as without it, and the others run dry: nobody gets all of its work done.
    before = {(span.task, span.start) for span in healthy.spans if span.end <= 20.0}
    assert before <= {(span.task, span.start) for span in failed.spans}
    assert all(busy < whole for busy, whole in zip(failed.busy, healthy.busy, strict=True))


def test_a_failure_after_the_end_changes_nothing():
    times = even(PipelineShape(2, 4))
    assert simulate_perturbed(times, policy_of("1f1b"), Perturbation(failed={1: 1e6})).finished


def test_thousands_of_ranks():
    times = even(PipelineShape(2048, 8))
    found = simulate_perturbed(times, policy_of("1f1b"), Perturbation(jitter=0.1))
    assert len(found.spans) == 2048 * 8 * 2
    assert found.makespan > 2047 * 3.0


@pytest.mark.parametrize(
    ("by", "field"),
    [
        (Perturbation(jitter=-1.0), "--jitter = -1.0"),
        (Perturbation(jitter=float("nan")), "--jitter = nan"),
        (Perturbation(slow={9: 2.0}), "--slow = 9: a rank of the pipeline, 0 to 3"),
        (Perturbation(slow={1: 0.5}), "--slow = 0.5: a factor of at least 1"),
        (Perturbation(failed={-1: 0.5}), "--fail = -1"),
    ],
)
def test_nonsense_is_refused(by, field):
    with pytest.raises(UserError) as error:
        simulate_perturbed(even(PipelineShape(4, 4)), policy_of("1f1b"), by)
    assert field in str(error.value)


@pytest.mark.slow
def test_512_stages_and_1024_microbatches():
    found = simulate_perturbed(even(PipelineShape(512, 1024)), policy_of("message"), Perturbation())
    assert found.finished
