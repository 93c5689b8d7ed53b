"""The simulator: known makespans, jitter, deadlocks named."""

import random
import statistics

import pytest

from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape, Task
from axonn_jax.planning.simulate.simulator import simulate

TIMES = {Kind.FORWARD: 1.0, Kind.BACKWARD: 2.0, Kind.BACKWARD_INPUT: 1.0, Kind.BACKWARD_WEIGHT: 1.0}


def jitter(seed):
    """Lognormal task times, Pareto message times: the same for every policy, and a fused backward is its two parts."""

    def draw(what):
        return random.Random(f"{seed} {what}")

    def task_time(task):
        both = (Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
        parts = both if task.kind is Kind.BACKWARD else (task.kind,)
        return sum(draw(Task(kind, task.stage, task.microbatch)).lognormvariate(0, 0.6) for kind in parts)

    return {"task_time": task_time, "message_time": lambda m: 0.3 * (draw(m).paretovariate(1.5) - 1.0)}


def even(layout, policy, **options):
    return simulate(layout, policy_of(policy, **options), task_time=lambda t: TIMES[t.kind], message_time=lambda _: 0.0)


@pytest.mark.parametrize(("pipe", "microbatches", "chunks"), [(4, 8, 1), (8, 16, 1), (4, 8, 2), (2, 6, 3)])
def test_published_bubbles(pipe, microbatches, chunks):
    """Bubbles of (P - 1) (F + B) for fused backwards, (P - 1) (F + I - W) for ZB-H1, in times of a chunk."""
    layout = PipelineShape(pipe, microbatches, chunks)
    work = 3.0 * microbatches * chunks
    assert even(layout, "gpipe").makespan == work + 3 * (pipe - 1)
    assert even(layout, "interleaved").makespan == work + 3 * (pipe - 1)
    if chunks == 1:
        assert even(layout, "1f1b").makespan == work + 3 * (pipe - 1)
        assert even(layout, "zero-bubble").makespan == work + (pipe - 1)


@pytest.mark.parametrize(
    "layout",
    [PipelineShape(4, 8), PipelineShape(8, 32), PipelineShape(16, 32), PipelineShape(4, 8, 2), PipelineShape(8, 16, 4)],
    ids=str,
)
def test_message_driven_equals_the_best_fixed_policy_without_jitter(layout):
    several = layout.virtual_stages > 1
    ours = even(layout, "message", in_flight=0 if several else layout.pipe)
    # The last rank cannot start before P - 1 forwards have passed, and then has all its work to do: the optimum.
    assert ours.makespan == max(ours.busy) + layout.pipe - 1
    assert ours.makespan <= even(layout, "zero-bubble").makespan
    assert max(ours.peak_live) <= max(even(layout, "zero-bubble").peak_live)
    assert even(layout, "message", split=False).makespan == even(layout, "interleaved").makespan
    assert even(layout, "message").makespan == ours.makespan, "more in flight change nothing"


@pytest.mark.parametrize("layout", [PipelineShape(4, 16), PipelineShape(8, 32), PipelineShape(4, 16, 2)], ids=str)
def test_message_driven_beats_fixed_orders_under_heavy_tailed_jitter(layout):
    def makespan(policy, **options):
        return statistics.median(
            simulate(layout, policy_of(policy, **options), **jitter(seed)).makespan for seed in range(7)
        )

    ours = makespan("message")
    assert ours < 0.95 * makespan("zero-bubble")
    assert ours < 0.85 * makespan("interleaved")
    # Fused backwards leave little to choose: as good as 1F1B, and better the longer messages may take.
    assert makespan("message", split=False) < 1.02 * makespan("interleaved")


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3])
@pytest.mark.parametrize("layout", [PipelineShape(4, 8), PipelineShape(8, 32)], ids=str)
def test_fused_message_driven_is_1f1b_where_messages_take_the_same_time(layout, delay):
    times = {"task_time": lambda t: TIMES[t.kind], "message_time": lambda _: delay}
    ours, theirs = (
        simulate(layout, policy_of(policy, layout.pipe, split=False), **times) for policy in ("message", "1f1b")
    )
    assert ours.makespan == pytest.approx(theirs.makespan)
    assert ours.peak_live == theirs.peak_live


def test_sums():
    result = even(PipelineShape(2, 3), "1f1b")
    assert (result.makespan, result.busy, result.peak_live) == (12.0, [9.0, 9.0], [2, 1])
    assert result.idle_fraction == pytest.approx(0.25)
    assert [str(span.task) for span in result.spans if span.rank == 1] == [
        "F1.0",
        "B1.0",
        "F1.1",
        "B1.1",
        "F1.2",
        "B1.2",
    ]
    assert (result.spans[0].start, result.spans[0].end) == (0.0, 1.0)


def test_message_time_is_added_between_ranks():
    result = simulate(PipelineShape(2, 1), policy_of("1f1b"), task_time=lambda _: 1.0, message_time=lambda _: 10.0)
    assert result.makespan == 24.0


def test_a_deadlock_has_the_state_of_every_rank():
    ranks = [OrderedDispatcher(PipelineShape(3, 1), rank) for rank in range(3)]
    ranks[0].append(Task(Kind.FORWARD, 0, 0))
    ranks[1].append(Task(Kind.BACKWARD, 1, 0))
    ranks[2].append(Task(Kind.FORWARD, 2, 0))
    with pytest.raises(RuntimeError, match="wait for each other") as error:
        simulate(ranks[0].shape, policy_of("message"), task_time=lambda _: 1.0, message_time=lambda _: 0.0, ranks=ranks)
    assert "rank 0: 1 tasks started, 1 activations alive, told no more" in str(error.value)
    assert "rank 1: 0 tasks started, 0 activations alive, waits for backward message for stage 1" in str(error.value)
    assert "rank 2: 0 tasks started, 0 activations alive, waits for forward message for stage 2" in str(error.value)
