"""Tasks, messages and fixed orders, against the published shapes."""

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.policies import FIXED, ByArrival, policy_of
from axonn_jax.pipe.schedule.tasks import Kind, Message, PipelineShape, Task, needs, sends

# PipeDream-Flush's 1F1B for 4 ranks and 8 microbatches: warm-up of P - r - 1, pairs, cool-down.
ONE_F_ONE_B = """\
rank 0: F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 F0.5 B0.2 F0.6 B0.3 F0.7 B0.4 B0.5 B0.6 B0.7
rank 1: F1.0 F1.1 F1.2 B1.0 F1.3 B1.1 F1.4 B1.2 F1.5 B1.3 F1.6 B1.4 F1.7 B1.5 B1.6 B1.7
rank 2: F2.0 F2.1 B2.0 F2.2 B2.1 F2.3 B2.2 F2.4 B2.3 F2.5 B2.4 F2.6 B2.5 F2.7 B2.6 B2.7
rank 3: F3.0 B3.0 F3.1 B3.1 F3.2 B3.2 F3.3 B3.3 F3.4 B3.4 F3.5 B3.5 F3.6 B3.6 F3.7 B3.7"""

GPIPE = """\
rank 0: F0.0 F0.1 F0.2 F2.0 F2.1 F2.2 B2.0 B2.1 B2.2 B0.0 B0.1 B0.2
rank 1: F1.0 F1.1 F1.2 F3.0 F3.1 F3.2 B3.0 B3.1 B3.2 B1.0 B1.1 B1.2"""

# Megatron-LM's interleaved order for 4 ranks, 8 microbatches and 2 chunks: warm-up of 2 (P - r - 1) + P.
INTERLEAVED = [
    "F0.0 F0.1 F0.2 F0.3 F4.0 F4.1 F4.2 F4.3 F0.4 F0.5 F0.6 B4.0 F0.7 B4.1 F4.4 B4.2 F4.5 B4.3 F4.6 B0.0 F4.7 B0.1 "
    "B0.2 B0.3 B4.4 B4.5 B4.6 B4.7 B0.4 B0.5 B0.6 B0.7",
    "F3.0 F3.1 F3.2 F3.3 F7.0 B7.0 F7.1 B7.1 F7.2 B7.2 F7.3 B7.3 F3.4 B3.0 F3.5 B3.1 F3.6 B3.2 F3.7 B3.3 F7.4 B7.4 "
    "F7.5 B7.5 F7.6 B7.6 F7.7 B7.7 B3.4 B3.5 B3.6 B3.7",
]

# ZB-H1: weight gradients lag behind by r microbatches on rank r.
ZERO_BUBBLE = """\
rank 0: F0.0 F0.1 F0.2 F0.3 I0.0 W0.0 F0.4 I0.1 W0.1 F0.5 I0.2 W0.2 F0.6 I0.3 W0.3 F0.7 I0.4 W0.4 I0.5 W0.5 \
I0.6 W0.6 I0.7 W0.7
rank 1: F1.0 F1.1 F1.2 I1.0 F1.3 I1.1 W1.0 F1.4 I1.2 W1.1 F1.5 I1.3 W1.2 F1.6 I1.4 W1.3 F1.7 I1.5 W1.4 I1.6 W1.5 \
I1.7 W1.6 W1.7
rank 2: F2.0 F2.1 I2.0 F2.2 I2.1 F2.3 I2.2 W2.0 F2.4 I2.3 W2.1 F2.5 I2.4 W2.2 F2.6 I2.5 W2.3 F2.7 I2.6 W2.4 \
I2.7 W2.5 W2.6 W2.7
rank 3: F3.0 I3.0 F3.1 I3.1 F3.2 I3.2 F3.3 I3.3 W3.0 F3.4 I3.4 W3.1 F3.5 I3.5 W3.2 F3.6 I3.6 W3.3 F3.7 I3.7 W3.4 \
W3.5 W3.6 W3.7"""


def show(orders):
    """The task lists as text, one line a rank: `rank 0: F0.0 F0.1 B0.0 ...`."""
    return "\n".join(f"rank {rank}: " + " ".join(map(str, order)) for rank, order in enumerate(orders))


def orders(policy, layout):
    return [FIXED[policy].order(layout, rank) for rank in range(layout.pipe)]


def test_1f1b_is_the_published_order():
    assert show(orders("1f1b", PipelineShape(4, 8))) == ONE_F_ONE_B


def test_gpipe_runs_chunk_by_chunk():
    assert show(orders("gpipe", PipelineShape(2, 3, 2))) == GPIPE
    assert show(orders("gpipe", PipelineShape(4, 8))).splitlines()[3] == (
        "rank 3: " + " ".join([f"F3.{m}" for m in range(8)] + [f"B3.{m}" for m in range(8)])
    )


def test_interleaved_is_megatrons_order():
    text = orders("interleaved", PipelineShape(4, 8, 2))
    assert [" ".join(map(str, text[rank])) for rank in (0, 3)] == INTERLEAVED


def test_interleaved_with_one_chunk_is_1f1b():
    assert orders("interleaved", PipelineShape(5, 7)) == orders("1f1b", PipelineShape(5, 7))


def test_interleaved_leaves_out_microbatches_that_do_not_exist():
    whole, part = orders("interleaved", PipelineShape(4, 8, 2)), orders("interleaved", PipelineShape(4, 6, 2))
    assert part == [[task for task in order if task.microbatch < 6] for order in whole]


def test_zero_bubble_is_zb_h1():
    assert show(orders("zero-bubble", PipelineShape(4, 8))) == ZERO_BUBBLE


def test_zero_bubble_is_the_interleaved_order_with_late_weight_gradients():
    layout = PipelineShape(3, 6, 2)
    for rank in range(3):
        names = [str(t) for t in FIXED["zero-bubble"].order(layout, rank) if t.kind is not Kind.BACKWARD_WEIGHT]
        assert [name.replace("I", "B") for name in names] == [str(t) for t in FIXED["interleaved"].order(layout, rank)]


@pytest.mark.parametrize("policy", ["gpipe", "interleaved", "zero-bubble"])
@pytest.mark.parametrize(
    "layout",
    [PipelineShape(1, 1), PipelineShape(1, 3, 2), PipelineShape(4, 1, 3), PipelineShape(3, 7, 2), PipelineShape(4, 4)],
    ids=str,
)
def test_an_order_has_every_task_once(policy, layout):
    kinds = "FIW" if policy == "zero-bubble" else "FB"
    for rank, order in enumerate(orders(policy, layout)):
        wanted = [f"{k}{s}.{m}" for k in kinds for s in layout.stages_of(rank) for m in range(layout.microbatches)]
        assert sorted(map(str, order)) == sorted(wanted)


def test_1f1b_with_virtual_stages_is_refused():
    with pytest.raises(UserError, match=r'pipeline.virtual_stages = 2: .*"interleaved"'):
        policy_of("1f1b").check(PipelineShape(4, 8, 2))


def test_an_unknown_policy_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"pipeline.policy = '1f1': one of message, .*did you mean '1f1b'"):
        policy_of("1f1")


@pytest.mark.parametrize("field", ["grid.pipe", "train.microbatches", "pipeline.virtual_stages"])
def test_sizes_below_one_are_refused(field):
    sizes = {"grid.pipe": 2, "train.microbatches": 2, "pipeline.virtual_stages": 2} | {field: 0}
    with pytest.raises(UserError, match=f"{field} = 0"):
        PipelineShape(*sizes.values())


def test_live_bounds():
    layout, chunks = PipelineShape(4, 8), PipelineShape(4, 8, 2)
    assert [policy_of("1f1b").live(layout, r) for r in range(4)] == [4, 3, 2, 1]
    assert [policy_of("1f1b").live(PipelineShape(4, 2), r) for r in range(4)] == [2, 2, 2, 1]
    assert [policy_of("zero-bubble").live(layout, r) for r in range(4)] == [4] * 4
    assert [policy_of("interleaved").live(chunks, r) for r in range(4)] == [11, 9, 7, 5]
    assert [policy_of("zero-bubble").live(chunks, r) for r in range(4)] == [11] * 4
    assert policy_of("gpipe").live(chunks, 0) == 16
    assert [ByArrival(n).live(layout, 0) for n in (0, 1, 4, 6, 99)] == [6, 1, 4, 6, 8]
    assert [ByArrival(n).live(chunks, 0) for n in (0, 1, 6, 99)] == [11, 2, 12, 16]
    assert [ByArrival(0, splits=False).live(layout, r) for r in range(4)] == [6, 5, 4, 3]
    assert [ByArrival(4, splits=False).live(layout, r) for r in range(4)] == [4, 3, 2, 1]
    assert [ByArrival(2, splits=False).live(layout, r) for r in range(4)] == [2, 2, 2, 1]
    assert [ByArrival(5, splits=False).live(layout, r) for r in range(4)] == [5, 4, 3, 2]
    assert [ByArrival(6, splits=False).live(chunks, r) for r in range(4)] == [12] * 4


def test_in_flight_limits():
    layout = PipelineShape(4, 8)
    assert [ByArrival().limit(layout, r) for r in range(4)] == [6, 5, 4, 3]
    assert [ByArrival(4).limit(layout, r) for r in range(4)] == [4, 3, 2, 1]
    assert [ByArrival().limit(PipelineShape(2, 8), r) for r in range(2)] == [3, 2]
    assert ByArrival().limit(PipelineShape(1, 8), 0) == 1
    assert [ByArrival(6).limit(layout, r) for r in range(4)] == [6, 5, 4, 3]
    assert [ByArrival(2).limit(layout, r) for r in range(4)] == [2, 2, 2, 1]
    assert [ByArrival().limit(PipelineShape(4, 8, 2), r) for r in range(4)] == [8] * 4
    assert [ByArrival(3).limit(PipelineShape(4, 8, 2), r) for r in range(4)] == [3] * 4


def test_places():
    layout = PipelineShape(4, 8, 3)
    assert (layout.stages, layout.first, layout.last) == (12, 0, 11)
    assert list(layout.stages_of(1)) == [1, 5, 9]
    assert {layout.rank_of(s) for s in layout.stages_of(1)} == {1}


def test_messages():
    layout = PipelineShape(4, 8, 2)
    assert sends(Task(Kind.FORWARD, 3, 5), layout) == Message("forward", 4, 5)
    assert sends(Task(Kind.FORWARD, 7, 5), layout) is None
    assert sends(Task(Kind.BACKWARD, 4, 5), layout) == sends(Task(Kind.BACKWARD_INPUT, 4, 5), layout)
    assert sends(Task(Kind.BACKWARD, 4, 5), layout) == Message("backward", 3, 5)
    assert sends(Task(Kind.BACKWARD, 0, 5), layout) is None
    assert sends(Task(Kind.BACKWARD_WEIGHT, 4, 5), layout) is None


def test_every_message_is_what_exactly_one_task_needs():
    layout = PipelineShape(3, 4, 2)
    tasks = [Task(k, s, m) for k in (Kind.FORWARD, Kind.BACKWARD) for s in range(6) for m in range(4)]
    sent = sorted(message for task in tasks if (message := sends(task, layout)))
    needed = sorted(message for task in tasks if (message := needs(task, layout)))
    assert sent == needed
    assert len(sent) == len(set(sent)) == 2 * 5 * 4


def test_tasks_and_messages_print_short_and_sort():
    assert str(Task(Kind.FORWARD, 3, 12)) == "F3.12"
    assert str(Message("backward", 3, 12)) == "backward message for stage 3, microbatch 12"
    assert sorted([Task(Kind.BACKWARD_WEIGHT, 0, 0), Task(Kind.FORWARD, 1, 0)])[0].kind is Kind.FORWARD
