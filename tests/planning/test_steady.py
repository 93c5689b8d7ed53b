"""Long pipelined steps without most of their steady stretch, against whole simulations and the busiest rank's work."""

import random

import pytest

from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape
from axonn_jax.planning.simulate.simulator import simulate
from axonn_jax.planning.simulate.steady import StageTimes, pipelined


def random_pipeline(seed, least, most):
    """Stage times, and how they are run: uneven stages, messages of up to two forwards, every policy; a whole
    simulation has `least` to `most` tasks."""
    rng = random.Random(seed)
    while True:
        pipe, chunks = rng.choice((2, 3, 4, 5, 6, 8, 12, 16, 24, 32)), rng.choice((1, 1, 1, 2, 3, 4))
        microbatches = int(pipe * 2 ** rng.uniform(2, 7))
        if least <= 3 * pipe * chunks * microbatches <= most:
            break
    pipe_shape, program = PipelineShape(pipe, microbatches, chunks), rng.choice((0.0, 0.02))
    uneven, back = rng.choice((0.0, 0.1, 0.3)), rng.uniform(0.8, 1.4)
    tasks = {}
    for stage in range(pipe_shape.stages):
        forward = 1.0 + uneven * rng.random() + (rng.random() if stage == pipe_shape.last else 0.0)
        inputs, weights = forward * back * rng.uniform(0.95, 1.05), forward * rng.uniform(0.8, 1.1)
        parts = {Kind.FORWARD: forward, Kind.BACKWARD_INPUT: inputs, Kind.BACKWARD_WEIGHT: weights}
        tasks |= {(kind, stage): program + seconds for kind, seconds in parts.items()}
        tasks[Kind.BACKWARD, stage] = program + inputs + weights
    policy = rng.choice(("message",) * 6 + ("interleaved", "zero-bubble", "gpipe"))
    depth = rng.choice((0, 0, 2 * pipe, 3 * pipe) if chunks > 1 else (0, 0, pipe, 2 * pipe, 3 * pipe))
    message = rng.choice((0.0, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0, 1.5)) * rng.uniform(0.7, 1.3)
    return StageTimes(pipe_shape, tasks, message), policy_of(policy, depth, rng.random() < 0.6)


def check(seeds, least, most):
    shortened = 0
    for seed in seeds:
        times, policy = random_pipeline(seed, least, most)
        work = {"task_time": times.task, "message_time": times.carried}
        whole, found = simulate(times.pipe_shape, policy, **work, shown=()), pipelined(times, policy)
        shortened += found.skipped_microbatches > 0
        assert found.makespan == pytest.approx(whole.makespan, rel=0.005 if found.skipped_microbatches else 1e-12), seed
        assert found.pipe_shape.microbatches + found.skipped_microbatches == times.pipe_shape.microbatches
        # No rank works longer than the step, which has a microbatch's least work for every one of them.
        most_work = max(times.work(rank, policy) for rank in range(times.pipe_shape.pipe))
        assert found.makespan >= max(found.busy) >= most_work * times.pipe_shape.microbatches * (1 - 1e-9)
        assert max(found.busy) == pytest.approx(max(whole.busy), rel=0.005)
    return shortened


def test_a_long_step_takes_what_its_whole_simulation_takes():
    assert check(range(20), 6_000, 20_000) >= 3


@pytest.mark.slow
def test_500_long_steps_take_what_their_whole_simulations_take():
    assert check(range(500), 6_000, 120_000) >= 100


def test_a_very_long_step_is_simulated_in_part():
    """8 stages and a million microbatches that divide evenly: exactly one forward a stage to fill, then work alone."""
    seconds = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}
    pipe_shape = PipelineShape(8, 1_000_000)
    tasks = {(kind, stage): one for kind, one in seconds.items() for stage in range(8)}
    found = pipelined(StageTimes(pipe_shape, tasks, 0.0), policy_of("message"))
    assert found.makespan == 3 * 1_000_000 + 7
    assert found.skipped_microbatches > 999_000
    assert found.busy == [3_000_000.0] * 8
