"""Random steps of all sizes in virtual time: none deadlocks, every task once and after its inputs, memory bounded."""

import random
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from spans import check_feasible

import axonn_jax
from axonn_jax.pipe.schedule.dispatcher import OrderedDispatcher
from axonn_jax.pipe.schedule.message_driven import dispatcher_of
from axonn_jax.pipe.schedule.policies import FIXED, policy_of
from axonn_jax.pipe.schedule.tasks import Kind, PipelineShape, needs, predecessor, sends
from axonn_jax.planning.simulate.simulator import simulate

PARTS, CASES = 20, 500
"""Ten thousand cases, of which each run of the suite takes the first five hundred."""
PIPES, MICROBATCHES = range(2, 17), range(1, 65)
slow = pytest.mark.slow
RELEASES = (Kind.BACKWARD, Kind.BACKWARD_WEIGHT)
POLICIES = ("message", *FIXED)


def random_case(rng):
    """A layout of any size, each as likely as any other, a policy and its options."""
    layout = PipelineShape(rng.choice(PIPES), rng.choice(MICROBATCHES), rng.choice((1, 1, 1, 2, 2, 3, 4)))
    policy = rng.choice(("message", *POLICIES))
    if policy == "1f1b" and layout.virtual_stages > 1:
        policy = "message"
    in_flight = rng.choice((0, 0, 1, 2, rng.randint(1, 2 * layout.pipe)))
    return layout, policy, {"in_flight": in_flight, "split": rng.random() < 0.7}


def random_times(rng):
    """A source of times: constant, zero, even, or heavy-tailed (a Pareto tail without variance, lognormal)."""
    return rng.choice(
        (
            lambda: 1.0,
            lambda: 0.0,
            rng.random,
            lambda: rng.paretovariate(1.2) - 1.0,
            lambda: rng.lognormvariate(0.0, 1.5),
        )
    )


def check_complete(tasks, layout, policy):
    """Every forward and every backward exactly once: whole, or both of its parts, as the policy has it."""
    assert len(set(tasks)) == len(tasks)
    ways = {"whole": ("BF",), "split": ("FIW",), "both": ("BF", "FIW")}[policy.backwards(layout)]
    kinds = {}
    for task in tasks:
        kinds.setdefault((task.stage, task.microbatch), []).append(task.kind.value)
    assert len(kinds) == layout.stages * layout.microbatches
    for (_, microbatch), found in kinds.items():
        late = microbatch >= layout.microbatches - layout.pipe
        assert "".join(sorted(found)) in (ways[-1:] if late else ways)


def check(result, layout, policy, delays):
    spans = result.spans
    times = {span.task: span for span in spans}
    check_complete([span.task for span in spans], layout, policy)
    free = [0.0] * layout.pipe
    for span in sorted(spans, key=lambda s: (s.start, s.end)):
        assert span.start >= free[span.rank]
        free[span.rank] = span.end
    ready = {message: span.end + delays[message] for span in spans if (message := sends(span.task, layout))}
    for task, span in times.items():
        assert span.rank == layout.rank_of(task.stage)
        message, before = needs(task, layout), predecessor(task)
        assert message is None or ready[message] <= span.start
        assert before is None or times[type(task)(before, task.stage, task.microbatch)].end <= span.start
    check_joins([span.task for span in spans if span.task.stage == layout.last], layout, policy)
    for rank, peak in enumerate(result.peak_live):
        assert 1 <= peak <= policy.live(layout, rank)


def check_joins(order, layout, policy):
    """What the last stage ran: where forwards join their backwards, nothing comes between the two."""
    if policy.joins(layout):
        for task, following in pairwise(order):
            if task.kind is Kind.FORWARD:
                assert following.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT)
                assert following.microbatch == task.microbatch


def cases(part):
    """The cases of a part, and a source of their times."""
    rng = random.Random(20240229 + part)
    return [random_case(rng) for _ in range(CASES)], rng


def test_every_size_is_drawn_as_often_as_any_other():
    drawn = [case for part in range(4) for case in cases(part)[0]]
    layouts, policies = [layout for layout, *_ in drawn], Counter(policy for _, policy, _ in drawn)
    assert {layout.pipe for layout in layouts} == set(PIPES)
    assert {layout.microbatches for layout in layouts} == set(MICROBATCHES)
    quarters = Counter(((layout.pipe - 2) * 4 // 15, (layout.microbatches - 1) * 4 // 64) for layout in layouts)
    assert len(quarters) == 16
    assert max(quarters.values()) < 2 * min(quarters.values()), quarters
    assert min(policies[policy] for policy in POLICIES) > len(drawn) // 20, policies


@pytest.mark.parametrize("part", [pytest.param(part, marks=slow if part else ()) for part in range(PARTS)])
def test_random_steps(part):
    drawn, rng = cases(part)
    for number, (layout, name, options) in enumerate(drawn):
        task_times, message_times, delays = random_times(rng), random_times(rng), {}

        def message_time(message, delays=delays, draw=message_times):
            assert message not in delays
            return delays.setdefault(message, draw())

        try:
            policy = policy_of(name, **options)
            result = simulate(layout, policy, task_time=lambda _, draw=task_times: draw(), message_time=message_time)
            check(result, layout, policy, delays)
        except Exception as error:
            raise AssertionError(f"case {number}: {layout}, {name}, {options}") from error


def random_run(rng, ranks, layout):
    """Starts, ends and deliveries in random order, tasks started ahead of the device; the orders of start."""
    orders, running, under_way = [[] for _ in ranks], [[] for _ in ranks], []
    while True:
        moves = [("end", r) for r, tasks in enumerate(running) if tasks]
        moves += [("deliver", i) for i in range(len(under_way))]
        rng.shuffle(moves)
        moves += [("start", r) for r in rng.sample(range(len(ranks)), len(ranks))]
        if rng.random() < 0.5:
            moves.reverse()
        for move, number in moves:
            if move == "start":
                task = ranks[number].next()
                if task is None:
                    continue
                orders[number].append(task)
                running[number].append(task)
            elif move == "end":
                task = running[number].pop(0)
                ranks[number].finished(task)
                message = sends(task, layout)
                if message:
                    under_way.append(message)
            else:
                message = under_way.pop(number)
                ranks[layout.rank_of(message.stage)].arrived(message)
            break
        else:
            return orders


def device_peak(order):
    """The most activations alive on a device that runs the order: born at a forward's start, dead at an end."""
    live = peak = 0
    for task in order:
        live += task.kind is Kind.FORWARD
        peak = max(peak, live)
        live -= task.kind in RELEASES
    return peak


def test_starting_ahead_never_deadlocks_and_keeps_the_bound():
    rng = random.Random(7)
    for _ in range(300):
        layout, name, options = random_case(rng)
        while layout.stages * layout.microbatches > 300:
            layout, name, options = random_case(rng)
        policy = policy_of(name, **options)
        ranks = [dispatcher_of(layout, rank, policy) for rank in range(layout.pipe)]
        orders = random_run(rng, ranks, layout)
        assert all(rank.done for rank in ranks), (layout, policy)
        check_complete([task for order in orders for task in order], layout, policy)
        for rank, order in enumerate(orders):
            assert device_peak(order) <= policy.live(layout, rank)
        check_joins(orders[-1], layout, policy)
        # What one process of each stage chose, the others can follow, whenever their own messages arrive.
        check_feasible(orders, layout)
        followers = [OrderedDispatcher(layout, rank) for rank in range(layout.pipe)]
        for follower, order in zip(followers, orders, strict=True):
            for task in order:
                follower.append(task)
        times = {"task_time": lambda _: rng.random(), "message_time": lambda _: rng.paretovariate(1.2)}
        replay = simulate(layout, policy, **times, ranks=followers)
        for follower, order in zip(followers, orders, strict=True):
            ran = [span.task for span in replay.spans if span.rank == follower.rank]
            assert ran == order


def test_the_same_arrivals_give_the_same_choices():
    layout, rng = PipelineShape(4, 9, 2), random.Random(3)
    tasks, messages = {}, {}

    def run():
        result = simulate(
            layout,
            policy_of("message"),
            task_time=lambda t: tasks.setdefault(t, rng.lognormvariate(0, 1)),
            message_time=lambda m: messages.setdefault(m, rng.paretovariate(1.2)),
        )
        return result.spans

    assert run() == run()


def test_what_plans_imports_neither_jax_nor_numpy_nor_mpi():
    package = Path(axonn_jax.__file__).parent
    files = [*(package / "pipe" / "schedule").glob("*.py"), *(package / "planning").rglob("*.py")]
    files = [file for file in files if "plans" not in file.parts]
    files += [package / "core" / "models" / "config.py"]
    modules = [".".join(file.with_suffix("").relative_to(package.parent).parts) for file in files]
    assert "axonn_jax.pipe.schedule.dispatcher" in modules
    code = "import sys, " + ", ".join(modules)
    code += "\nprint(sorted({'jax', 'jaxlib', 'numpy', 'mpi4py', 'flax'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
