"""The picture of a timeline."""

from itertools import pairwise

import pytest
from matplotlib.figure import Figure
from spans import gpipe, task

from axonn_jax.pipe.schedule.policies import policy_of
from axonn_jax.pipe.schedule.tasks import PipelineShape as PipelineShape
from axonn_jax.pipe.timeline.picture import draw
from axonn_jax.pipe.timeline.spans import KINDS, shift
from axonn_jax.planning.simulate.simulator import simulate


def figure_of(monkeypatch, spans, path):
    """The figure as it was written."""
    written = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **how: written.append(save(self, *given, **how) or self)
    )
    draw(spans, path)
    return written[0]


def texts_of(monkeypatch, spans, path, **options):
    """Draws, and returns what is written on the tasks and the title."""
    from matplotlib.axes import Axes

    written, titles = [], []
    text, title = Axes.text, Figure.suptitle
    monkeypatch.setattr(Axes, "text", lambda self, x, y, s, **more: written.append(s) or text(self, x, y, s, **more))
    monkeypatch.setattr(Figure, "suptitle", lambda self, s, **more: titles.append(s) or title(self, s, **more))
    draw(spans, path, **options)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    return written, titles[0]


def test_the_picture_is_of_the_last_whole_step(tmp_path, monkeypatch):
    spans = gpipe(2, 4, step=7) + shift(gpipe(2, 4, step=8, split=True), 50.0) + gpipe(2, 4, step=9)[:3]
    written, title = texts_of(monkeypatch, spans, tmp_path / "timeline.png", title="a $run_{")
    assert title == "a $run_{ \N{EM DASH} step 8: 15.000 s, idle 20.0%"
    assert sorted(written) == sorted("0123" * 6)
    written, title = texts_of(monkeypatch, spans, tmp_path / "7.png", step=7)
    assert title.startswith("step 7: ")
    assert sorted(written) == sorted("0123" * 4)


def test_many_stages_and_microbatches_have_their_numbers(tmp_path, monkeypatch):
    written, _ = texts_of(monkeypatch, gpipe(16, 32), tmp_path / "timeline.png")
    assert len(written) == 16 * 32 * 2


def test_a_number_that_does_not_fit_is_left_out(tmp_path, monkeypatch):
    spans = [*gpipe(1, 3), task(0, 20.0, 20.001, name="F0.3")]
    written, _ = texts_of(monkeypatch, spans, tmp_path / "timeline.png")
    assert sorted(written) == sorted("012" * 2)


def test_tasks_without_a_microbatch_or_length_are_drawn(tmp_path, monkeypatch):
    spans = [task(1, 0.0, 1.0, kind="optimizer", name="O1"), task(0, 0.5, 0.5)]
    assert texts_of(monkeypatch, spans, tmp_path / "timeline.png")[0] == []


@pytest.mark.parametrize("spans", [[], [task(0, 0.0, 1.0, kind="communication")], [task(0, 1.0, 1.0)]])
def test_nothing_to_draw(tmp_path, spans):
    with pytest.raises(ValueError, match="no tasks in step"):
        draw(spans, tmp_path / "timeline.png")


@pytest.mark.parametrize("count", range(1, len(KINDS) + 1))
def test_the_legend_lies_within_the_picture_however_many_kinds_there_are(monkeypatch, tmp_path, count):
    kinds = [kind for kind in KINDS if kind != "communication"][:count]
    spans = [task(0, at, at + 1, kind) for at, kind in enumerate(kinds)]
    if count == len(KINDS):
        spans.append(task(0, 0.5, 0.7, "communication"))
    found = figure_of(monkeypatch, spans, tmp_path / "timeline.png")
    (legend,) = found.legends
    named = [text.get_text().replace(" ", "_") for text in legend.get_texts()]
    assert sorted(named) == sorted({span.kind for span in spans} | {"idle"})
    _lies_below_the_time(legend, found)


def _lies_below_the_time(legend, found):
    box, whole = legend.get_window_extent(), found.bbox
    assert whole.x0 <= box.x0 < box.x1 <= whole.x1
    assert whole.y0 <= box.y0
    assert box.y1 <= found.axes[-1].get_tightbbox().y0


def test_a_long_step_is_shown_where_it_fills_in_its_middle_and_where_it_drains(monkeypatch, tmp_path):
    """And above all of it, in little; a forward is wide enough to have its number everywhere."""
    run = simulate(PipelineShape(3, 1024), policy_of("1f1b"), task_time=lambda task: 1.0 + (task.kind != "F"),
                   message_time=lambda _: 0.1)  # fmt: skip
    found = figure_of(monkeypatch, run.timeline(), tmp_path / "timeline.png")
    strip, *lines = found.axes
    assert strip.get_xlim() == (0.0, run.makespan)
    assert [axes.get_xlabel().partition(",")[0] for axes in lines] == ["fill", "steady", "drain"]
    assert lines[0].get_xlim()[0] == 0.0
    assert lines[2].get_xlim()[1] == run.makespan
    for axes in lines:
        begin, end = axes.get_xlim()
        shown = {(round(text.get_position()[1]), text.get_text()) for text in axes.texts}
        middles = [(span, (span.start + span.end) / 2) for span in run.timeline()]
        assert shown == {(span.rank, str(span.microbatch)) for span, at in middles if begin <= at < end}
    assert found.get_size_inches()[0] == 8
    _lies_below_the_time(found.legends[0], found)


def test_a_step_a_little_too_long_is_continued_on_further_lines(monkeypatch, tmp_path):
    found = figure_of(monkeypatch, gpipe(4, 48), tmp_path / "timeline.png")
    strip, *lines = found.axes
    ends = [axes.get_xlim() for axes in lines]
    assert (ends[0][0], ends[-1][1]) == strip.get_xlim()
    assert all(one[1] == pytest.approx(other[0]) for one, other in pairwise(ends))
