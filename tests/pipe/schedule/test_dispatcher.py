"""The dispatcher of one rank, followers, and the check of fixed orders."""

import gc
import random
import sys

import pytest
from spans import check_feasible

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.message_driven import dispatcher_of
from axonn_jax.pipe.schedule.policies import FIXED, ByArrival, policy_of
from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task, sends


def task(name):
    stage, microbatch = name[1:].split(".")
    return Task(Kind(name[0]), int(stage), int(microbatch))


def start_all(rank):
    """Starts ahead as far as it goes; the names of what was started."""
    names = []
    while (started := rank.next()) is not None:
        names.append(str(started))
    return names


def forward(stage, microbatch):
    return Message("forward", stage, microbatch)


def backward(stage, microbatch):
    return Message("backward", stage, microbatch)


def test_the_first_stage_injects_up_to_the_limit_and_once_after_each_backward():
    rank = dispatcher_of(PipelineShape(3, 8), 0, ByArrival(3))
    assert start_all(rank) == ["F0.0", "F0.1", "F0.2"]
    assert rank.live == 3
    assert rank.waiting_for() == [backward(0, 0), backward(0, 1), backward(0, 2)]
    rank.arrived(backward(0, 1))
    # At the memory bound a weight gradient held back would have to go before the forward: the backward runs in one.
    assert start_all(rank) == ["B0.1", "F0.3"]


def test_the_last_backwards_are_split_and_their_weight_gradients_go_before_a_forward_that_needs_their_memory():
    rank = dispatcher_of(PipelineShape(3, 5), 0, ByArrival(3))
    assert start_all(rank) == ["F0.0", "F0.1", "F0.2"]
    rank.arrived(backward(0, 2))
    assert start_all(rank) == ["I0.2", "W0.2", "F0.3"]


def test_fused_backward():
    rank = dispatcher_of(PipelineShape(2, 4), 0, ByArrival(2, splits=False))
    assert start_all(rank) == ["F0.0", "F0.1"]
    rank.arrived(backward(0, 0))
    assert start_all(rank) == ["B0.0", "F0.2"]


def test_the_last_stage_runs_a_backward_right_after_its_forward():
    rank = dispatcher_of(PipelineShape(3, 8), 2, ByArrival(3))
    assert start_all(rank) == []
    for microbatch in (4, 0, 1):  # what arrives decides, in whatever order
        rank.arrived(forward(2, microbatch))
    assert start_all(rank) == ["F2.0", "I2.0", "F2.1", "I2.1", "F2.4", "B2.4", "W2.0", "W2.1"]


def test_forwards_and_backwards_take_turns():
    rank = dispatcher_of(PipelineShape(4, 8), 1, ByArrival(8))
    for microbatch in range(6):
        rank.arrived(forward(1, microbatch))
    assert [str(rank.next()) for _ in range(3)] == ["F1.0", "F1.1", "F1.2"]
    for microbatch in range(3):
        rank.arrived(backward(1, microbatch))
    assert start_all(rank) == ["I1.0", "F1.3", "I1.1", "F1.4", "I1.2", "F1.5", "W1.0", "W1.1", "W1.2"]


def test_chunks_go_in_groups_of_pipe():
    rank = dispatcher_of(PipelineShape(2, 4, 2), 0, ByArrival(4))
    assert [str(rank.next()) for _ in range(2)] == ["F0.0", "F0.1"]
    rank.arrived(forward(2, 0))
    rank.arrived(forward(2, 1))
    assert start_all(rank) == ["F2.0", "F2.1", "F0.2", "F0.3"]
    for message in (backward(0, 0), backward(2, 1), backward(2, 0)):
        rank.arrived(message)
    assert [str(rank.next()) for _ in range(3)] == ["I2.0", "I2.1", "I0.0"]


def test_a_young_microbatch_leaves_room_for_the_oldest():
    rank = dispatcher_of(PipelineShape(2, 8, 2), 0, ByArrival())  # at most 5 activations
    assert start_all(rank) == ["F0.0", "F0.1", "F0.2", "F0.3"]
    rank.arrived(forward(2, 1))
    assert start_all(rank) == [], "the fifth place is the second chunk's of microbatch 0"
    assert forward(2, 0) in rank.waiting_for()
    assert forward(2, 2) not in rank.waiting_for()
    rank.arrived(forward(2, 0))
    assert start_all(rank) == ["F2.0"]


def test_fixed_orders_wait_for_their_next_task_only():
    rank = dispatcher_of(PipelineShape(2, 3), 1, policy_of("1f1b"))
    rank.arrived(forward(1, 1))
    assert rank.next() is None
    assert rank.waiting_for() == [forward(1, 0)]
    assert str(rank.blocked) == "F1.0"
    rank.arrived(forward(1, 0))
    assert rank.waiting_for() == []
    assert start_all(rank) == ["F1.0", "B1.0", "F1.1", "B1.1"]
    assert rank.started == 4


def test_waiting_for_under_the_message_policy():
    rank = dispatcher_of(PipelineShape(2, 2, 2), 1, ByArrival())
    assert rank.waiting_for() == [forward(1, 0), forward(1, 1), forward(3, 0), forward(3, 1)]
    rank.arrived(forward(1, 1))
    assert rank.waiting_for() == [], "it has something to do"
    assert start_all(rank) == ["F1.1"]
    assert rank.waiting_for() == [backward(1, 1), forward(1, 0), forward(3, 0), forward(3, 1)]


def lines_run(function):
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame, event, arg):
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    gc.disable()  # what other tests have left would be counted, too
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return count


@pytest.mark.parametrize("chunks", [1, 4])
@pytest.mark.parametrize("in_flight", [0, 64])
def test_to_know_what_it_waits_for_a_rank_does_not_go_through_all_microbatches(chunks, in_flight):
    """At every event of an idle rank, wherever in the step: what is looked at does not grow with the microbatches."""
    layout, rng, most = PipelineShape(4, 512, chunks), random.Random(chunks), 0
    ranks = [dispatcher_of(layout, rank, ByArrival(in_flight)) for rank in range(4)]
    running, under_way, events = [None] * 4, [], 0
    while not all(rank.done for rank in ranks):
        for rank in ranks:
            running[rank.rank] = running[rank.rank] or rank.next()
            if running[rank.rank] is None and not rank.done and rng.random() < 0.1:
                assert 1 <= len(rank.waiting_for()) <= 8
                most, events = max(most, lines_run(rank.waiting_for)), events + 1
        place = rng.choice([r for r in range(4) if running[r]] + [None] * bool(under_way))
        if place is None:
            message = under_way.pop(rng.randrange(len(under_way)))
            ranks[layout.rank_of(message.stage)].arrived(message)
            continue
        message = sends(running[place], layout)
        under_way += [message] if message else []
        ranks[place].finished(running[place])
        running[place] = None
    assert events > 20
    assert most < 200


def test_done_and_live():
    rank = dispatcher_of(PipelineShape(1, 2), 0, ByArrival(2))
    running = []
    while (started := rank.next()) is not None:
        running.append(started)
    assert [str(t) for t in running] == ["F0.0", "I0.0", "F0.1", "I0.1", "W0.0", "W0.1"]
    assert (rank.live, rank.done) == (2, False)
    for one in running[:-1]:
        rank.finished(one)
    assert (rank.live, rank.done) == (1, False)
    rank.finished(running[-1])
    assert (rank.live, rank.done) == (0, True)


@pytest.mark.parametrize(
    "message",
    [forward(2, 0), forward(1, 9), forward(-1, 0), backward(1, 0), forward(5, 0)],
    ids=["other rank", "no such microbatch", "no such stage", "backward of the last stage", "beyond the last stage"],
)
def test_a_message_for_nobody_here_is_a_bug(message):
    with pytest.raises(ValueError, match="rank 1"):
        dispatcher_of(PipelineShape(2, 3), 1, ByArrival()).arrived(message)


def test_bugs_of_the_caller():
    rank = dispatcher_of(PipelineShape(2, 3), 1, ByArrival())
    rank.arrived(forward(1, 0))
    with pytest.raises(ValueError, match="arrived twice"):
        rank.arrived(forward(1, 0))
    with pytest.raises(ValueError, match=r"F1\.0 finished but is not running"):
        rank.finished(task("F1.0"))
    with pytest.raises(ValueError, match=r"stage 0, microbatch 1, whose forward has not started"):
        dispatcher_of(PipelineShape(2, 3), 0, ByArrival()).arrived(backward(0, 1))
    with pytest.raises(ValueError, match="nobody sends"):
        dispatcher_of(PipelineShape(2, 3), 0, ByArrival()).arrived(forward(0, 0))
    with pytest.raises(ValueError, match="rank 2 of a pipeline of 2"):
        dispatcher_of(PipelineShape(2, 3), 2, ByArrival())
    with pytest.raises(ValueError, match="chooses by itself"):
        rank.append(task("F1.1"))


def test_by_default_half_as_many_again_as_1f1b_are_in_flight():
    for place, forwards in ((0, 6), (1, 5), (2, 4)):
        rank = dispatcher_of(PipelineShape(4, 16), place, ByArrival(splits=False))
        for microbatch in range(16 if place else 0):
            rank.arrived(forward(place, microbatch))
        assert start_all(rank) == [f"F{place}.{microbatch}" for microbatch in range(forwards)]


def test_a_negative_limit_is_refused():
    with pytest.raises(UserError, match=r"pipeline.in_flight = -1: at least 1, or 0"):
        dispatcher_of(PipelineShape(2, 3), 0, ByArrival(-1))


def test_an_order_is_followed_once_the_inputs_are_there():
    rank = OrderedDispatcher(PipelineShape(2, 2), 1)
    assert rank.next() is None
    rank.arrived(forward(1, 0))
    assert rank.next() is None, "it has no order yet"
    for name in ("F1.1", "F1.0", "I1.1", "W1.1", "B1.0"):
        rank.append(task(name))
    assert rank.next() is None
    assert rank.waiting_for() == [forward(1, 1)]
    rank.arrived(forward(1, 1))
    assert start_all(rank) == ["F1.1", "F1.0", "I1.1", "W1.1", "B1.0"]
    for name in ("F1.1", "F1.0", "I1.1", "W1.1", "B1.0"):
        rank.finished(task(name))
    assert rank.done


def test_an_ordered_dispatcher_refuses_what_cannot_be_meant():
    rank = OrderedDispatcher(PipelineShape(2, 2), 1)
    rank.append(task("F1.0"))
    with pytest.raises(ValueError, match="came twice"):
        rank.append(task("F1.0"))
    with pytest.raises(ValueError, match=r"no place for F0\.0"):
        rank.append(task("F0.0"))


@pytest.mark.parametrize("policy", ["gpipe", "1f1b", "interleaved", "zero-bubble"])
def test_the_fixed_orders_are_feasible(policy):
    for pipe in (1, 2, 3, 5):
        for microbatches in (1, 2, 4, 7):
            for chunks in (1,) if policy == "1f1b" else (1, 2, 3):
                layout = PipelineShape(pipe, microbatches, chunks)
                check_feasible([FIXED[policy].order(layout, rank) for rank in range(pipe)], layout)


def test_a_deadlock_is_found_and_named():
    layout = PipelineShape(2, 2)
    first = [task(n) for n in ("F0.0", "B0.0", "F0.1", "B0.1")]
    second = [task(n) for n in ("F1.0", "F1.1", "B1.0", "B1.1")]
    with pytest.raises(ValueError, match=r"deadlock: rank 0 at B0\.0, rank 1 at F1\.1"):
        check_feasible([first, second], layout)


def test_a_backward_before_its_own_forward_is_found():
    with pytest.raises(ValueError, match=r"rank 0 at W0\.0"):
        check_feasible([[task(n) for n in ("F0.0", "W0.0", "I0.0")]], PipelineShape(1, 1))


def test_incomplete_orders_are_found():
    with pytest.raises(ValueError, match="missing from the order of rank 1"):
        check_feasible([[task("F0.0"), task("B0.0")], [task("F1.0"), task("I1.0")]], PipelineShape(2, 1))
    with pytest.raises(ValueError, match="1 orders for 2 ranks"):
        check_feasible([[]], PipelineShape(2, 1))
