"""Recording, clocks, idle shares and the trace file of a timeline."""

import json
import random
import subprocess
import sys
import threading

import pytest
from spans import gpipe, task

from axonn_jax.core.errors import UserError
from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.pipe.timeline.spans import (
    KINDS,
    Recorder,
    Span,
    estimate_offset,
    last_complete_step,
    merge,
    ranks_of,
    shift,
    steps_of,
    usage,
    window,
)
from axonn_jax.pipe.timeline.trace import read_trace, write_trace
from axonn_jax.planning.simulate.simulator import simulate


def test_nothing_heavy_is_imported():
    code = """
import sys, axonn_jax.pipe.timeline.spans, axonn_jax.pipe.timeline.picture
print([name for name in ("jax", "numpy", "matplotlib") if name in sys.modules])"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.parametrize(
    ("name", "place"), [("F3.12", (3, 12)), ("send B10.0", (10, 0)), ("O2", (None, None)), ("update", (None, None))]
)
def test_stage_and_microbatch_are_in_the_name(name, place):
    span = task(0, 0.0, 1.0, name=name)
    assert (span.stage, span.microbatch) == place


def test_the_recorder_keeps_the_last_steps():
    recorder = Recorder(steps=3)
    for step in range(100):
        for number in range(5):
            recorder.add(0, f"F0.{number}", "forward", float(step), step + 1.0, step)
    assert steps_of(recorder.spans()) == [97, 98, 99]
    assert len(recorder.spans()) == 15
    assert recorder.spans(98)[1] == Span(0, "F0.1", "forward", 98.0, 99.0, 98)
    recorder.add(0, "send F0.0", "communication", 0.0, 1.0, 5)  # a message that was long under way
    assert steps_of(recorder.spans()) == [97, 98, 99]
    assert recorder.spans(5) == []


def test_the_recorder_needs_a_step():
    with pytest.raises(ValueError, match="at least 1 step, not 0"):
        Recorder(steps=0)


def test_threads_lose_nothing():
    recorder = Recorder(steps=2)
    ready = threading.Barrier(4)

    def record(rank):
        for step in range(200):
            ready.wait(timeout=30)
            for number in range(5):
                recorder.add(rank, f"F{rank}.{number}", "forward", 0.0, 1.0, step)

    threads = [threading.Thread(target=record, args=(rank,)) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert {(span.rank, span.name) for span in recorder.spans(199)} == {
        (rank, f"F{rank}.{number}") for rank in range(4) for number in range(5)
    }
    assert steps_of(recorder.spans()) == [198, 199]
    assert len(recorder.spans()) == 40


def test_offset_of_an_even_exchange_is_exact():
    assert estimate_offset([(10.0, 113.0, 12.0)]) == 102.0


def test_the_quickest_exchange_decides():
    random.seed(3)
    offset, samples = -7.25, []
    for number in range(50):
        there, back = random.uniform(1e-4, 1e-2), random.uniform(1e-4, 1e-2)
        samples.append((number, number + there + offset, number + there + back))
    least = min(received - sent for sent, _, received in samples)
    assert abs(estimate_offset(samples) - offset) <= least / 2
    assert least < 5e-3


@pytest.mark.parametrize("samples", [[], [(2.0, 5.0, 1.0)]])
def test_offset_of_nothing(samples):
    with pytest.raises(ValueError, match="samples"):
        estimate_offset(samples)


def test_ranks_with_different_clocks_come_onto_one():
    true = gpipe(3, 4)
    ahead = [0.0, 5.0, -3.0]  # of the clock of rank 0
    local = [shift([s for s in true if s.rank == rank], ahead[rank]) for rank in range(3)]
    exchanges = [[(t + ahead[rank], t + 0.5, t + 1.0 + ahead[rank]) for t in (0.0, 1.0)] for rank in range(3)]
    merged = merge(shift(local[rank], estimate_offset(exchanges[rank])) for rank in range(3))
    by_name = {span.name: span for span in true}
    for span in merged:
        assert (span.start, span.end) == pytest.approx((by_name[span.name].start, by_name[span.name].end))
    assert len(merged) == len(true)
    assert [span.start for span in merged] == sorted(span.start for span in merged)


def idle_share(spans, ranks):
    return sum(one.idle for one in usage(spans, ranks)) / ranks


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 4), (2, 4), (4, 8), (8, 3)])
def test_idle_share_of_gpipe(ranks, microbatches, split):
    spans = gpipe(ranks, microbatches, split=split)
    expected = (ranks - 1) / (microbatches + ranks - 1)
    assert [one.idle for one in usage(spans, ranks)] == pytest.approx([expected] * ranks)


def test_overlap_counts_once_and_communication_is_not_work():
    spans = [
        task(0, 0.0, 2.0),
        task(0, 1.5, 4.0, kind="backward"),
        task(0, 3.0, 6.0, kind="communication"),  # 1 s behind a task, 2 s bare
        task(0, 5.0, 7.0, kind="communication"),  # 1 s of it behind the one before
        task(1, 9.0, 10.0, kind="optimizer"),
        task(1, -5.0, 1.0, kind="communication"),  # begins before the first task
        task(1, 9.5, 20.0, kind="communication"),
    ]
    first, second = usage(spans, 2)
    assert window(spans) == (0.0, 10.0)
    assert (first.idle, second.idle) == pytest.approx((0.6, 0.9))
    assert (first.exposed, second.exposed) == pytest.approx((0.3, 0.1))
    assert first.shares == pytest.approx(
        dict.fromkeys(KINDS, 0.0) | {"forward": 0.2, "backward": 0.25, "communication": 0.4}
    )
    assert second.shares["communication"] == pytest.approx(0.15)
    assert idle_share(spans, 2) == pytest.approx(0.75)


def test_a_rank_without_tasks_is_idle_throughout():
    assert idle_share([task(0, 0.0, 1.0)], 2) == 0.5


@pytest.mark.parametrize("spans", [[], [task(0, 1.0, 2.0, kind="communication")], [task(0, 1.0, 1.0)]])
def test_no_work_has_no_idle_share(spans):
    assert idle_share(spans, 2) == 0.0


def test_the_idle_share_is_of_one_step():
    with pytest.raises(ValueError, match=r"one step, not of \[1, 2\]"):
        idle_share([task(0, 0.0, 1.0), task(0, 5.0, 6.0, step=2)], 1)


def test_the_last_whole_step():
    cut = gpipe(2, 4, step=9)[:-3]
    late = [task(0, 0.0, 1.0, kind="communication", step=9)] * 20
    assert last_complete_step(gpipe(2, 4, step=7) + gpipe(2, 4, step=8) + cut + late) == 8
    assert last_complete_step([]) is None
    assert last_complete_step(gpipe(2, 4, step=7, split=True) + gpipe(2, 4, step=8)) == 8  # fewer tasks, as whole


def test_a_trace_reads_back(tmp_path):
    random.seed(0)
    spans = shift(gpipe(3, 4, step=5, split=True), 86_400.123456789)
    random.shuffle(spans)
    write_trace(tmp_path / "timeline.json", spans)
    back = read_trace(tmp_path / "timeline.json")
    expected = shift(merge([spans]), -86_400.123456789)
    assert sorted((s.rank, s.name, s.kind, s.step) for s in back) == sorted(
        (s.rank, s.name, s.kind, s.step) for s in expected
    )
    by_name = {s.name: s for s in expected}
    for span in back:
        assert (span.start, span.end) == pytest.approx((by_name[span.name].start, by_name[span.name].end), abs=2e-9)
    assert ranks_of(back) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["timeline.json"]


def test_the_trace_is_what_perfetto_expects(tmp_path):
    spans = [*gpipe(2, 2, step=3), task(0, 20.0, 21.0, kind="optimizer", name="O0", step=3)]
    write_trace(tmp_path / "timeline.json", spans)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {(e["name"], e["pid"]): e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {("process_name", 0): "stage 0", ("process_name", 1): "stage 1"}
    threads = {e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert threads == {"stage 0 tasks", "stage 0 communication", "stage 1 tasks"}
    slices = {e["name"]: e for e in events if e["ph"] == "X"}
    assert len(slices) == len(spans)
    forward = slices["F1.1"]
    assert (forward["pid"], forward["cat"], forward["ts"], forward["dur"]) == (1, "forward", 2e6, 1e6)
    assert forward["args"] == {"microbatch": 1, "stage": 1, "step": 3}
    assert slices["O0"]["args"] == {"stage": 0, "step": 3}
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    ways = [(starts[i]["name"], starts[i]["pid"], ends[i]["pid"]) for i in starts]
    assert sorted(ways) == [("activation", 0, 1)] * 2 + [("gradient", 1, 0)] * 2
    for number, start in starts.items():
        assert ends[number]["bp"] == "e"
        assert any(s["ts"] <= start["ts"] <= s["ts"] + s["dur"] for s in slices.values() if s["pid"] == start["pid"])
        assert any(s["ts"] == ends[number]["ts"] for s in slices.values() if s["pid"] == ends[number]["pid"])


def test_a_forward_joined_with_its_backward_has_arrows_both_ways(tmp_path):
    spans = [
        task(0, 0.0, 1.0, name="F0.0"),
        task(1, 1.0, 3.0, name="FI1.0", kind="forward_and_input_gradient"),
        task(1, 3.0, 5.0, name="FB1.1", kind="forward_and_backward"),
        task(0, 1.0, 2.0, name="F0.1"),
        task(0, 3.0, 4.0, name="B0.0", kind="backward"),
        task(0, 5.0, 6.0, name="B0.1", kind="backward"),
    ]
    write_trace(tmp_path / "timeline.json", spans)
    assert [span.kind for span in read_trace(tmp_path / "timeline.json")] == [s.kind for s in merge([spans])]
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    ends = [(e["name"], e["pid"], e["ts"]) for e in events if e["ph"] == "f"]
    assert sorted(ends) == [("activation", 1, 1e6), ("activation", 1, 3e6), ("gradient", 0, 3e6), ("gradient", 0, 5e6)]


def test_virtual_stages_have_arrows_between_ranks_only(tmp_path):
    spans = [task(stage % 2 if stage < 4 else 1, float(stage), stage + 1.0, name=f"F{stage}.0") for stage in range(5)]
    spans[4] = task(1, 4.0, 5.0, name="F4.0")  # stages 3 and 4 on one rank
    write_trace(tmp_path / "timeline.json", spans)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [(e["pid"], e["ts"]) for e in events if e["ph"] == "f"] == [(1, 1e6), (0, 2e6), (1, 3e6)]


def test_what_overlaps_is_on_another_thread(tmp_path):
    write_trace(
        tmp_path / "timeline.json", [task(0, 0.0, 2.0), task(0, 1.0, 3.0), task(0, 2.0, 4.0), task(0, 3.0, 5.0)]
    )
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    assert [e["tid"] for e in events if e["ph"] == "X"] == [0, 1, 0, 1]
    assert [e["args"]["name"] for e in events if e["name"] == "thread_name"] == ["stage 0 tasks", "stage 0 tasks 2"]


def test_a_trace_of_nothing(tmp_path):
    write_trace(tmp_path / "timeline.json", [])
    assert read_trace(tmp_path / "timeline.json") == []


EVENT = {"ph": "X", "pid": 0, "tid": 0, "name": "F0.0", "cat": "forward", "ts": 0.0, "dur": 1.0, "args": {"step": 1}}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"traceEvents": 3}',
        '{"traceEvents": [3]}',
        '{"traceEvents": [{"ph": "X"}]}',
        "[" * 100_000,
        json.dumps({"traceEvents": [EVENT]})[:-5],
        *(
            f'{{"displayTimeUnit": "ms", "traceEvents": [\n{json.dumps(EVENT | change)}\n]}}\n'
            for change in (
                {"cat": "python"},
                {"cat": ["forward"]},
                {"pid": "0"},
                {"pid": -1},
                {"name": 3},
                {"ts": None},
                {"ts": float("nan")},
                {"dur": -1.0},
                {"dur": float("inf")},
                {"args": {}},
                {"args": {"step": 1.5}},
                {"args": {"step": 2**31}},
                {"pid": 10**12},
                {"pid": 1024},
                {"ts": 1e300},
                {"name": "x" * 1000},
            )
        ),
    ],
    ids=lambda text: text[-60:].replace('"', ""),
)
def test_what_is_not_a_trace_is_refused(tmp_path, text):
    (tmp_path / "timeline.json").write_text(text)
    with pytest.raises(UserError, match=r"^timeline.json = .*: a whole trace as a pipelined run leaves it; "):
        read_trace(tmp_path / "timeline.json")


def test_bytes_and_directories_are_no_trace(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match=r"^timeline.json = .*: a whole trace"):
        read_trace(tmp_path / "bytes")
    with pytest.raises(UserError, match=r"^timeline.json = .*: a whole trace .*; not a regular file$"):
        read_trace(tmp_path)
    with pytest.raises(UserError, match=r"a pipelined run \(grid.pipe above 1\) leaves it where it ends"):
        read_trace(tmp_path / "timeline.json")


def test_a_simulated_step_is_written_as_a_measured_one(tmp_path):
    run = simulate(
        PipelineShape(2, 4), policy_of("zero-bubble"), task_time=lambda task: 1.0, message_time=lambda message: 0.5
    )
    write_trace(tmp_path / "timeline.json", run.timeline())
    read = read_trace(tmp_path / "timeline.json")
    assert read == merge([run.timeline()])
    assert {span.kind for span in read} == {"forward", "input_gradient", "weight_gradient"}
    assert idle_share(read, 2) == pytest.approx(run.idle_fraction)
