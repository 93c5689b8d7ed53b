"""The corrected cost model: its parts against what they are made from, its sums, and which way it moves."""

from dataclasses import replace

import pytest

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.planning.communication import StepSpec, predict
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.cost_model.traffic import Traffic
from axonn_jax.planning.machines.machine import CollectiveTime
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.machines.network import GroupLinks
from axonn_jax.planning.memory import balanced_blocks
from axonn_jax.planning.request import Candidate, OverlapFlags, PlanRequest
from axonn_jax.planning.simulate.candidate import Prices

A100 = load_machine("perlmutter")
JOB = PlanRequest(preset("gpt-5b"), A100, 256, "bf16")
NONE = OverlapFlags(False, False, False, False)
GRID = GridShape(1, 2, 4, 4, 2)
COMMS = [ALL_REDUCE, BlockComm(sequence_split=True), BlockComm(attention=True, mlp=True)]


@pytest.mark.parametrize("policy", ["none", "full", "save_collectives"])
@pytest.mark.parametrize("sequences", [1, 2, 8])
@pytest.mark.parametrize("comm", COMMS, ids=["all_reduce", "split", "gather"])
@pytest.mark.parametrize("model", ["gpt-5b", "llama2-7b"])
def test_times_of_communication_are_those_of_the_exact_accounting(model, comm, policy, sequences):
    """The lines, scaled to any microbatch, add up to every collective that is predicted, each priced by itself."""
    shape = preset(model)
    traffic = Traffic(PlanRequest(shape, A100, 1, "bf16"), comm)
    links = GroupLinks(GRID, A100)
    exact = 0.0
    for one in predict(StepSpec(shape, GRID, GRID.batch_shards * sequences, StepPolicy(1, policy), 2, comm)):
        exact += float(one.bytes) / links.rate(one.axes) + one.times * links.latency(one.kind, one.axes)
    skipped = {"none": ("regather", "rereduce"), "full": (), "save_collectives": ("rereduce",)}[policy]
    lines = 0.0
    for part in ("block", "first", "last", "step"):
        count = shape.layers if part == "block" else 1
        for role in ("gather", "reduce", "regather", "rereduce", "reread", "input", "scatter"):
            if role not in skipped:
                lines += count * sum(line.at(sequences) for line in traffic.lines(GRID, part, role))
        lines += count * sum(line.at(sequences) for of, line in traffic.updates(GRID) if of == part)
    assert lines == pytest.approx(exact)


@pytest.mark.parametrize("layout", [{}, {"sequence_split": True}, {"residual_comm": "gather"}], ids=str)
@pytest.mark.parametrize("policy", ["none", "full"])
def test_without_overlap_everything_is_exposed_and_adds_up(policy, layout):
    model = CostModel(replace(JOB, switches=NONE, **layout))
    one = model.estimate(Candidate(GRID, 8, policy))
    assert sum(one.hidden.values()) == 0
    assert one.step_s == pytest.approx(one.compute_s + one.exposed_s + one.update_s)


@pytest.mark.parametrize("policy", ["none", "full", "save_collectives"])
def test_gathers_of_the_residual_where_they_send_less(policy):
    """On a grid of one large `x` the wide features are what is sent; `auto` never takes longer than either way."""
    for grid in (GridShape(x=16), GridShape(y=2, x=8), GRID):
        papers, spread, auto = (
            CostModel(replace(JOB, switches=NONE, batch=16, residual_comm=wanted)).estimate(Candidate(grid, 1, policy))
            for wanted in ("all_reduce", "gather", "auto")
        )
        assert auto.comm_s["x"] <= min(papers.comm_s["x"], spread.comm_s["x"]) * (1 + 1e-9)
        if grid.y <= 2:
            assert spread.comm_s["x"] < 0.8 * papers.comm_s["x"]
        assert auto.comm_s["y"] == pytest.approx(papers.comm_s["y"])
        assert auto.comm_s["z"] == pytest.approx(papers.comm_s["z"])
        # Matmuls have the same FLOPs in other shapes; heads over `x` too are computed once, and not `x` times.
        assert auto.compute_s <= papers.compute_s * 1.01
        assert spread.compute_s < 0.95 * papers.compute_s


def test_with_overlap_the_step_is_shorter_by_what_is_hidden():
    bare, beside = (
        CostModel(replace(JOB, switches=on)).estimate(Candidate(GRID, 8, "full")) for on in (NONE, OverlapFlags())
    )
    assert sum(beside.comm_s.values()) <= sum(bare.comm_s.values()) * (1 + 1e-9)
    assert bare.step_s - beside.step_s == pytest.approx(bare.exposed_s - beside.exposed_s)
    assert beside.step_s >= beside.compute_s


def contended(share):
    return replace(A100, device=replace(A100.device, contention=share))


def test_hidden_communication_costs_what_compute_loses_beside_it():
    for choice in (
        Candidate(GridShape(z=16), 1, "full"),
        Candidate(GridShape(z=16), 4, "full"),
        Candidate(GRID, 8, "full"),
    ):
        free, slow = (CostModel(replace(JOB, machine=contended(share))).estimate(choice) for share in (0.0, 0.2))
        assert slow.compute_s == free.compute_s
        assert slow.step_s - free.step_s == pytest.approx(slow.exposed_s - free.exposed_s)
        assert slow.step_s > free.step_s
    # Where compute has time to spare beside all of it, a fifth of it is paid.
    free, slow = (
        CostModel(replace(JOB, machine=contended(share))).estimate(Candidate(GridShape(z=4, data=4), 1, "full"))
        for share in (0.0, 0.2)
    )
    assert slow.step_s - free.step_s == pytest.approx(0.2 * sum(free.hidden.values()))
    assert slow.comm_s == pytest.approx(free.comm_s)
    assert sum(free.hidden.values()) > 0


@pytest.mark.parametrize("switch", ["gathers", "scatters", "gradients", "forward"])
def test_every_switch_hides_something(switch):
    choice = Candidate(GridShape(1, 1, 4, 4, 2), 1, "full")
    off = CostModel(replace(JOB, batch=8, switches=NONE)).estimate(choice)
    on = CostModel(replace(JOB, batch=8, switches=replace(NONE, **{switch: True}))).estimate(choice)
    assert on.step_s < off.step_s


def test_recomputation_costs_a_forward_pass_and_saves_memory():
    model = CostModel(replace(JOB, switches=NONE))
    kept, again, dots = (model.estimate(Candidate(GridShape(z=16), 1, policy)) for policy in ("none", "full", "dots"))
    assert 1.25 < again.compute_s / kept.compute_s < 1.34
    assert kept.compute_s < dots.compute_s < again.compute_s
    assert again.memory.total < dots.memory.total < kept.memory.total


@pytest.mark.parametrize("policy", ["none", "full"])
@pytest.mark.parametrize("gather", ["forward", "backward", "step"])
def test_what_is_sent_over_z_is_that_of_the_exact_accounting_however_long_weights_live(gather, policy):
    grid, links = GridShape(z=8), GroupLinks(GridShape(z=8), A100)
    one = CostModel(replace(JOB, batch=64, switches=NONE)).estimate(Candidate(grid, 4, policy, reshard_after=gather))
    work = StepSpec(JOB.shape, grid, 64, StepPolicy(4, policy, gather), 2)
    exact = sum(float(c.bytes) / links.rate(c.axes) + c.times * links.latency(c.kind, c.axes) for c in predict(work))
    assert one.comm_s["z"] == pytest.approx(exact)


def test_weights_that_live_longer_take_memory_and_save_time():
    model = CostModel(replace(JOB, batch=512))
    layer, kept, step = (
        model.estimate(Candidate(GridShape(z=64), 8, "full", reshard_after=g)) for g in ("forward", "backward", "step")
    )
    assert layer.memory.total < kept.memory.total < step.memory.total
    assert layer.comm_s["z"] > kept.comm_s["z"] > step.comm_s["z"]
    once = model.estimate(Candidate(GridShape(z=64), 1, "full", reshard_after="step"))
    same = model.estimate(Candidate(GridShape(z=64), 1, "full", reshard_after="backward"))
    assert (once.step_s, once.memory) == (same.step_s, same.memory)


def test_offload_and_zero_move_the_optimizers_state():
    model, base = CostModel(JOB), Candidate(GridShape(data=8, z=2), 4, "full")
    plain, offload, zero = (model.estimate(one) for one in (base, replace(base, offload=True), replace(base, zero=1)))
    local = JOB.shape.params() / 2
    assert (plain.memory.weights, plain.memory.optimizer) == pytest.approx((4 * local, 8 * local))
    assert (offload.memory.weights, zero.memory.weights) == pytest.approx((2 * local, 2 * local))
    assert offload.memory.optimizer == 0
    assert offload.memory.host == pytest.approx(12 * local)
    assert zero.memory.optimizer == pytest.approx(12 * local / 8)
    assert offload.update_s > plain.update_s > zero.update_s
    left = JOB.machine.device.program_bytes - offload.memory.total
    assert offload.memory.staying == pytest.approx(left / 2)  # what a run keeps on the device
    travels = offload.memory.host - offload.memory.staying
    assert offload.update_s == pytest.approx(travels / JOB.machine.host.bytes_per_s)
    alone = Candidate(GridShape(data=2, z=8), 4, "full", offload=True)
    assert model.estimate(alone).memory.staying == model.estimate(alone).memory.host  # all of it has room
    on_device = model.estimate(replace(alone, offload=False)).update_s
    assert model.estimate(alone).update_s == pytest.approx(on_device)
    # fp32 gradients scattered and bf16 weights gathered: (4 + 2) of 2 x 4 bytes.
    assert zero.exposed["data"] == pytest.approx(0.75 * plain.exposed["data"])


def test_large_matmuls_reach_the_machines_rate_and_small_ones_do_not():
    compute = CostModel(JOB).compute
    large, small = compute.matmul(16384, 8192, 8192), compute.matmul(64, 64, 64)
    assert 2 * 16384 * 8192**2 / large == pytest.approx(compute.rate, rel=0.07)
    assert 2 * 64**3 / small < 0.01 * compute.rate


def test_a_pipeline_in_closed_form_is_near_its_simulation():
    for policy, split in (("message", True), ("interleaved", False)):
        model = CostModel(replace(JOB, policy=policy, split=split))
        choice = Candidate(GridShape(pipe=8, data=4), 16, "full")
        closed = model.estimate(choice)
        assert Prices(model).price(choice).step_s == pytest.approx(closed.step_s, rel=0.08)
        assert Prices(model).price(choice).simulated


def test_a_stage_gathers_again_whatever_it_keeps():
    model = CostModel(replace(JOB, switches=NONE))
    for pipe in (1, 2):
        grid = GridShape(pipe=pipe, z=8)
        kept, computed = (model.estimate(Candidate(grid, 8, policy)).exposed["z"] for policy in ("none", "full"))
        assert (kept < computed) if pipe == 1 else (kept == pytest.approx(computed))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("pipe", [1, 2])
def test_a_vocabulary_that_does_not_divide_costs_what_its_padded_table_does(pipe, tied):
    """The program's table has rows of zeros up to the next multiple of y * z; memory and time are those of all rows."""
    grid = GridShape(pipe=pipe, z=8, y=16)
    odd = replace(JOB, shape=replace(JOB.shape, tied=tied, vocab=50_257))
    whole = replace(JOB, shape=replace(JOB.shape, tied=tied, vocab=50_304))
    assert odd.shape.padded_vocab(8 * 16) == whole.shape.vocab
    for policy in ("none", "full"):
        one, other = (CostModel(job).estimate(Candidate(grid, 4, policy)) for job in (odd, whole))
        assert (one.step_s, one.compute_s, one.update_s) == (other.step_s, other.compute_s, other.update_s)
        assert one.memory == other.memory
    alone, wide = (CostModel(job).estimate(Candidate(GridShape(x=8), 4, "full")) for job in (odd, whole))
    assert alone.memory.total < wide.memory.total  # nothing splits it


def test_stages_hold_the_whole_model():
    model, choice = CostModel(JOB), Candidate(GridShape(pipe=4, data=4), 16, "full")
    times = Prices(model).stage_times(choice)
    forward = sum(seconds for (kind, _), seconds in times.tasks.items() if kind.value == "F")
    tasks = model.tasks(choice)
    parts = {part: tasks.times(part, 4, "full", True).forward for part in ("block", "first", "last")}
    assert forward == pytest.approx(24 * parts["block"] + parts["first"] + parts["last"])


@pytest.mark.parametrize(("layers", "pipe"), [(24, 2), (24, 8), (42, 8), (96, 64), (24, 50)])
def test_blocks_are_spread_over_the_pipe(layers, pipe):
    usual, last = balanced_blocks(layers, 1.5, pipe)
    assert usual * (pipe - 1) + last >= layers
    assert (usual - 1.0) * (pipe - 1) + last < layers  # not more than a block too many
    assert usual >= 0.5
    assert last >= 0


def test_more_bandwidth_never_hurts():
    fast = replace(A100, bandwidth=tuple(replace(row, gib_per_s=2 * row.gib_per_s) for row in A100.bandwidth))
    for grid in (GRID, GridShape(data=16), GridShape(z=16), GridShape(x=4, y=4)):
        slow_s, fast_s = (
            CostModel(replace(JOB, machine=one)).estimate(Candidate(grid, 1, "full")).step_s for one in (A100, fast)
        )
        assert fast_s < slow_s


def test_the_bound_is_below_every_choice():
    model = CostModel(JOB)
    for grid in (GRID, GridShape(pipe=4, data=4), GridShape(z=16), GridShape(y=8, data=2)):
        for microbatches in (4, 8):
            for policy in ("none", "full", "dots"):
                assert model.bound(grid) <= model.estimate(Candidate(grid, microbatches, policy)).step_s


def _measured(seconds, per_byte=1e-9):
    """A box whose all-reduces of two devices take so long whatever their bytes, and a little more with them."""
    rows = [
        CollectiveTime("all-reduce", inner, 2, moved, seconds + moved * per_byte)
        for inner in (1, 2)
        for moved in (1e3, 1e6)
    ]
    node = replace(A100.node, devices=4)
    return replace(A100, node=node, bandwidth=(), collectives=tuple(rows))


def test_gradients_of_measured_machines_travel_together():
    """A bucket has the latency of a collective once, however many gradients are in it."""
    shape, grid = preset("gpt-5b"), GridShape(1, 2, 1, 1, 1)
    slow, quick = (Traffic(PlanRequest(shape, _measured(seconds), 1, "bf16")) for seconds in (1e-2, 1e-3))

    def whole(traffic):
        counts = {"block": shape.layers, "first": 1, "last": 1, "step": 1}
        return sum(counts[part] * line.at(1) for part, line in traffic.updates(grid))

    assert whole(slow) - whole(quick) == pytest.approx(3 * 9e-3)  # the gradients, the mean loss, how many targets count
    gradients = 4 * shape.params() * 1e-9
    assert whole(quick) == pytest.approx(gradients + 3 * 1e-3, rel=1e-3)


def test_activations_of_measured_machines_have_their_latency_in_every_microbatch():
    traffic = Traffic(PlanRequest(preset("gpt-5b"), _measured(1e-2), 1, "bf16"))
    line = traffic.lines(GridShape(x=2), "block", "reduce")[0]
    assert line.fixed == line.per_sequence == 0.0
    moved = sum(count * size for count, _, size in line.curves) * 1e-9
    calls = sum(count for count, _, _ in line.curves)
    assert line.at(2) == pytest.approx(calls * 1e-2 + 2 * moved, rel=1e-2)


def test_every_task_of_a_pipeline_is_a_program():
    choice, device = Candidate(GridShape(pipe=4), 16), replace(A100.device, program_s=1e-3)
    plain, slow = CostModel(JOB), CostModel(replace(JOB, machine=replace(A100, device=device)))
    assert slow.estimate(choice).step_s - plain.estimate(choice).step_s == pytest.approx(16 * 3e-3)
    longer = Prices(slow).price(choice).step_s - Prices(plain).price(choice).step_s
    assert 16 * 2e-3 <= longer <= (16 + 2 * 3) * 3e-3  # a backward in one is a program less
    alone = Candidate(GridShape(z=4), 16)
    assert slow.estimate(alone).step_s == plain.estimate(alone).step_s


def test_norms_and_the_optimizer_have_rates_of_their_own():
    choice = Candidate(GridShape(z=4), 16)
    for field, stays in (("light_bytes_per_s", "update_s"), ("update_bytes_per_s", "compute_s")):
        device = replace(A100.device, **{field: A100.device.memory_bytes_per_s / 2})
        plain, slow = (
            CostModel(replace(JOB, machine=one)).estimate(choice) for one in (A100, replace(A100, device=device))
        )
        assert slow.step_s > plain.step_s
        assert getattr(slow, stays) == getattr(plain, stays)
