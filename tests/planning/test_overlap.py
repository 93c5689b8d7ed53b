"""Windows of collectives and modelled time, on hand-made schedules whose times can be worked out on paper."""

from dataclasses import replace
from pathlib import Path

import pytest
from hlo.overlap import classify, measure, share, shares
from hlo.program import parse
from hlo.roofline import Costs, ring_rate

from axonn_jax.core.hardware import H100, Accelerator

SCHEDULED = (Path(__file__).parents[1] / "fixtures" / "scheduled.hlo").read_text()

# A matmul of 2^31 FLOPs takes 2 s, a copy of 4 MiB (read and written) 1 s; 8 MiB to one of 2 peers travel in 4 s on
# the links of a node (2 MiB/s) and, where nodes have two rings, in 16 s between them.
MIB = 1 << 20
MACHINE = Accelerator("paper", float(1 << 30), 8.0 * MIB, 4, 2.0 * MIB, 1.0 * MIB, 0.0)
MESH = {"z": 2, "y": 2, "x": 2}

HEAD = """HloModule step, is_scheduled=true, num_partitions=8

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%matmul (l: bf16[1024,1024], r: bf16[1024,1024]) -> bf16[1024,1024] {
  %l = bf16[1024,1024]{1,0} parameter(0)
  %r = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot = bf16[1024,1024]{1,0} dot(%l, %r), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

ENTRY %main (p: bf16[1024,1024], q: bf16[2097152], w: bf16[4194304], v: bf16[2097152]) -> bf16[1024,1024] {
  %p = bf16[1024,1024]{1,0} parameter(0)
  %q = bf16[2097152]{0} parameter(1)
  %w = bf16[4194304]{0} parameter(2)
  %v = bf16[2097152]{0} parameter(3)
"""
MATMUL = "  %{0} = bf16[1024,1024]{{1,0}} fusion(%p, %p), kind=kCustom, calls=%matmul\n"
COPY = "  %{0} = bf16[2097152]{{0}} copy(%q)\n"
END = "  ROOT %root = bf16[1024,1024]{1,0} bitcast(%p)\n}\n"
X, Z = "{{0,1},{2,3},{4,5},{6,7}}", "{{0,4},{1,5},{2,6},{3,7}}"


def reduced(name, start=True, of="w", groups=X, op_name="jit(f)/jvp()/psum"):
    shape = {"w": "bf16[4194304]{0}", "v": "bf16[2097152]{0}"}[of]
    if not start:
        return f"  %{name}.done = {shape} all-reduce-done(%{name})\n"
    return (
        f"  %{name} = {shape} all-reduce-start(%{of}), replica_groups={groups}, "
        f'to_apply=%add, metadata={{op_name="{op_name}"}}\n'
    )


def windows(*lines, machine=MACHINE):
    found = measure(HEAD + "".join(lines) + END, MESH, machine)
    return {one.name: one for one in found.windows}, found


def test_a_collective_is_hidden_for_as_long_as_the_device_computes():
    body = MATMUL.format("m"), COPY.format("c")
    by_name, found = windows(reduced("a"), *body, reduced("a", False), MATMUL.format("n"))
    one = by_name["a"]
    assert (one.kind, one.link, one.times, one.matmuls) == ("forward all-reduces", "node", 1, 1)
    assert one.bytes == 8 * MIB  # 2 (G-1)/G of 8 MiB
    assert one.seconds == pytest.approx(4.0)
    assert one.work_s == pytest.approx(3.0)
    assert one.hidden_s == pytest.approx(3.0)
    assert found.compute_s == pytest.approx(5.0)
    assert found.step_s == pytest.approx(6.0)  # a wait of one second at the done


def test_the_same_compute_hides_only_one_collective_of_the_same_links():
    """Both windows hold both matmuls, 4 s; `a` is served in the first 4 s, `b` in the 2 s after, all of them waits."""
    body = MATMUL.format("m"), MATMUL.format("n")
    by_name, found = windows(
        reduced("a"), reduced("b", of="v"), *body, reduced("a", False), reduced("b", False), MATMUL.format("last")
    )
    assert [by_name[name].matmuls for name in "ab"] == [2, 2]
    assert [by_name[name].hidden_s for name in "ab"] == [pytest.approx(4.0), pytest.approx(0.0)]
    assert found.step_s == pytest.approx(8.0)


def test_other_links_serve_at_the_same_time():
    by_name, _ = windows(
        reduced("a"), reduced("b", of="v", groups=Z), *(MATMUL.format(f"m{n}") for n in range(2)),
        reduced("a", False), reduced("b", False),
    )  # fmt: skip
    between = by_name["b"]
    assert between.link == "network"
    assert between.seconds == pytest.approx(4 / (1 / 4))  # four rings share a node's 1 MiB/s
    assert between.hidden_s == pytest.approx(4.0)
    assert by_name["a"].hidden_s == pytest.approx(4.0)


def test_rings_share_what_a_node_sends():
    assert ring_rate(MACHINE, ((0, 1), (2, 3))) == 2 * MIB
    assert ring_rate(MACHINE, ((0, 4), (1, 5), (2, 6), (3, 7))) == MIB / 4
    assert ring_rate(MACHINE, ((0, 1, 4, 5), (2, 3, 6, 7))) == MIB / 2
    assert ring_rate(MACHINE, (tuple(range(8)),)) == MIB
    six = replace(MACHINE, node_devices=6)  # the second of these groups is in two nodes, alone
    assert ring_rate(six, ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))) == MIB
    assert ring_rate(six, (tuple(range(8)), tuple(range(8, 16)), tuple(range(16, 24)))) == MIB / 2


def test_a_loop_runs_its_windows_as_often_as_its_body():
    loop = (
        "%body (s: (s32[], bf16[4194304], bf16[1024,1024])) -> (s32[], bf16[4194304], bf16[1024,1024]) {\n"
        "  %s = (s32[], bf16[4194304]{0}, bf16[1024,1024]{1,0}) parameter(0)\n"
        "  %i = s32[] get-tuple-element(%s), index=0\n"
        "  %w = bf16[4194304]{0} get-tuple-element(%s), index=1\n"
        "  %p = bf16[1024,1024]{1,0} get-tuple-element(%s), index=2\n"
        + reduced("inner", op_name="jit(f)/while/body/transpose(jvp())/psum")
        + MATMUL.format("m")
        + reduced("inner", False)
        + "  ROOT %t = (s32[], bf16[4194304]{0}, bf16[1024,1024]{1,0}) tuple(%i, %inner.done, %m)\n}\n\n"
        "%condition (s.1: (s32[], bf16[4194304], bf16[1024,1024])) -> pred[] {\n"
        "  %s.1 = (s32[], bf16[4194304]{0}, bf16[1024,1024]{1,0}) parameter(0)\n"
        "  ROOT %less = pred[] constant(true)\n}\n\n"
    )
    shape = "(s32[], bf16[4194304]{0}, bf16[1024,1024]{1,0})"
    known = 'backend_config={"known_trip_count":{"n":"3"}}'
    text = HEAD.replace("ENTRY", loop + "ENTRY") + (
        "  %zero = s32[] constant(0)\n"
        f"  %state = {shape} tuple(%zero, %w, %p)\n"
        + reduced("outer", of="v")
        + f"  %while = {shape} while(%state), condition=%condition, body=%body, {known}\n"
        + reduced("outer", False)
        + END
    )
    found = measure(text, MESH, MACHINE)
    by_name = {one.name: one for one in found.windows}
    inner, outer = by_name["inner"], by_name["outer"]
    assert (inner.kind, inner.times) == ("dX all-reduces", 3)
    assert (inner.seconds, inner.hidden_s) == (pytest.approx(12.0), pytest.approx(6.0))
    assert outer.matmuls == 3
    assert outer.hidden_s == pytest.approx(1.0)  # half of its two seconds: the loop waits half of the time
    assert (found.compute_s, found.step_s) == (pytest.approx(6.0), pytest.approx(12.0))


def test_a_combined_collective_is_one_transfer():
    combined = (
        "  %a = (bf16[4194304]{0}, bf16[2097152]{0}) all-reduce-start(%w, %v), "
        f'replica_groups={X}, to_apply=%add, metadata={{op_name="jit(f)/jvp()/psum"}}\n'
    )
    done = "  %d = (bf16[4194304]{0}, bf16[2097152]{0}) all-reduce-done(%a)\n"
    by_name, _ = windows(combined, MATMUL.format("m"), done)
    assert by_name["a"].bytes == 12 * MIB
    assert by_name["a"].seconds == pytest.approx(6.0)


def test_synchronous_collectives_are_exposed():
    sync = f"  %a = bf16[4194304]{{0}} all-reduce(%w), replica_groups={X}, to_apply=%add\n"
    by_name, found = windows(MATMUL.format("m"), sync, MATMUL.format("n"))
    assert (by_name["a"].matmuls, by_name["a"].hidden_s) == (0, 0.0)
    assert found.step_s == pytest.approx(8.0)


def test_fixture_of_the_gpu_compiler():
    found = measure(SCHEDULED, {"data": 2, "x": 4}, H100)
    by_name = {one.name: one for one in found.windows}
    assert {name: one.matmuls for name, one in by_name.items()} == {
        "ags": 1, "cps": 0, "reduce-scatter.1": 0, "rs2": 0, "ars": 0,
    }  # fmt: skip
    assert by_name["ags"].bytes == (128 + 8 * 3 * 2) * 3 / 4  # both members of the combined one
    sums = shares(found.windows)
    assert (sums["data reductions"].of_bytes, sums["small"].count) == (0.0, 4)


def test_what_collectives_are_for():
    big = 1 << 24
    body = "jit(step)/shard_map/while/body/closed_call"
    assert classify("all-gather", "z", f"{body}/jvp()/all_gather", big) == "z gathers"
    assert classify("reduce-scatter", "z", f"{body}/reduce_scatter", big) == "dW reduce-scatters"
    assert classify("all-reduce", "x", f"{body}/jvp()/psum_invariant", big) == "forward all-reduces"
    assert classify("all-reduce", "y", f"{body}/rematted_computation/psum", big) == "forward all-reduces"
    assert classify("all-reduce", "y", f"{body}/transpose(jvp())/rematted_computation/psum", big) == (
        "forward all-reduces"
    )
    assert classify("all-reduce", "x", f"{body}/transpose(jvp())/psum_invariant", big) == "dX all-reduces"
    assert classify("all-reduce", "x", f"{body}/psum_invariant", big) == "dX all-reduces"
    assert classify("all-reduce", "data*z", f"{body}/psum_invariant", big) == "data reductions"
    assert classify("all-reduce", "x", f"{body}/jvp()/psum_invariant", 24576) == "small"
    assert classify("all-gather", "x", f"{body}/jvp()/dot_general", big) == "other"
    assert classify("all-gather", "z*x", f"{body}/jvp()/dot_general", big) == "z gathers"


def test_work_of_library_calls_and_slices():
    text = HEAD.replace(
        "ENTRY",
        "%part (t: bf16[1024,1024], i: s32[]) -> bf16[1,1024] {\n"
        "  %t = bf16[1024,1024]{1,0} parameter(0)\n"
        "  %i = s32[] parameter(1)\n"
        "  ROOT %row = bf16[1,1024]{1,0} dynamic-slice(%t, %i, %i), dynamic_slice_sizes={1,1024}\n}\n\n"
        "%write (t.1: bf16[1024,1024], u: bf16[1,1024], j: s32[]) -> bf16[1024,1024] {\n"
        "  %t.1 = bf16[1024,1024]{1,0} parameter(0)\n"
        "  %u = bf16[1,1024]{1,0} parameter(1)\n"
        "  %j = s32[] parameter(2)\n"
        "  ROOT %new = bf16[1024,1024]{1,0} dynamic-update-slice(%t.1, %u, %j, %j)\n}\n\nENTRY",
    ) + (
        "  %n = s32[] constant(0)\n"
        "  %row.1 = bf16[1,1024]{1,0} fusion(%p, %n), kind=kLoop, calls=%part\n"
        "  %new.1 = bf16[1024,1024]{1,0} fusion(%p, %row.1, %n), kind=kLoop, calls=%write\n"
        "  %q4 = bf16[2,512,8,64]{3,2,1,0} bitcast(%p)\n"
        '  %gemm = (bf16[1024,1024]{1,0}, s8[64]{0}) custom-call(%p, %p), custom_call_target="__cublas$gemm", '
        'backend_config={"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["0"]}}}\n'
        "  %att = (bf16[2,512,8,64]{3,2,1,0}, u8[0]{0}) custom-call(%q4, %q4, %q4), "
        'custom_call_target="__cudnn$fmhaSoftmax", '
        'backend_config={"cudnn_fmha_backend_config":{"mask_type":"CAUSAL"}}\n' + END
    )
    module = parse(text)
    costs, entry = Costs(module), module.entry
    by_name = {name: costs.of(entry, entry.by_name[name]) for name in ("row.1", "new.1", "gemm", "att", "p")}
    assert by_name["row.1"].bytes == 2 * 2048 + 4  # the row twice and where it is, not the table
    assert by_name["new.1"].bytes == 2 * 2048 + 4
    assert (by_name["gemm"].flops, by_name["gemm"].matmuls) == (2 * 1024**3, 1)
    assert (by_name["att"].flops, by_name["att"].matmuls) == (0.5 * 4 * 2 * 8 * 512 * 512 * 64, 2)
    assert by_name["p"].bytes == 0


def test_sums():
    by_name, _ = windows(reduced("a"), MATMUL.format("m"), reduced("a", False), reduced("b"), reduced("b", False))
    both = share(by_name.values())
    assert (both.count, both.of_bytes) == (2, 0.5)
    assert both.of_time == pytest.approx(2.0 / 8.0)
    assert share([]).of_time is None


def test_text_without_an_order_is_refused():
    with pytest.raises(ValueError, match="not scheduled"):
        measure(HEAD.replace(", is_scheduled=true", "") + END, MESH, MACHINE)
