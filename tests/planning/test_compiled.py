"""Collectives read from HLO text: hand-made modules in the forms XLA prints, and programs compiled here."""

from collections import Counter
from fractions import Fraction
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo.collectives import axes_finder, collectives, replica_groups, totals
from hlo.program import Array, arrays, parse
from jax import lax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from axonn_jax.planning.machines.network import ring_bytes

MESH = {"data": 2, "x": 4}

# As the GPU compiler prints a scheduled module: combined and async forms, an async wrapper with its own computation.
SCHEDULED = (Path(__file__).parents[1] / "fixtures" / "scheduled.hlo").read_text()


def test_scheduled_module_with_async_combined_and_wrapped_collectives():
    found = collectives(SCHEDULED, MESH)
    by_name = {(one.name, one.operand.dtype): one for one in found}
    assert len(by_name) == len(found) == 6
    gathered, half = by_name["ags", "f32"], by_name["ags", "bf16"]
    assert (gathered.kind, gathered.over, gathered.op_name, gathered.times) == (
        "all-gather",
        "x",
        "jit(step)/gather",
        1,
    )
    assert gathered.whole == 8 * 4 * 4  # what is gathered, not what is put in
    assert gathered.bytes == Fraction(3, 4) * 128
    assert half.whole == 8 * 3 * 2
    assert (by_name["ars", "f32"].over, by_name["ars", "f32"].bytes) == ("data", 128)
    for name in ("reduce-scatter.1", "rs2"):
        one = by_name[name, "f32"]
        assert (one.kind, one.over, one.bytes) == ("reduce-scatter", "x", 96)
    assert (by_name["cps", "f32"].over, by_name["cps", "f32"].bytes) == ("x", 128)


def test_windows_between_start_and_done_are_in_the_order_of_the_schedule():
    module = parse(SCHEDULED)
    assert module.scheduled
    windows = {}
    for one in collectives(module, MESH):
        inside = module.computations[one.computation].instructions[one.start + 1 : one.done]
        windows[one.name] = [instruction.name for instruction in inside]
    assert windows["ags"] == ["dot"]
    assert windows["reduce-scatter.1"] == ["ars", "rsu", "cps", "cpd"]  # of the async-start that runs it
    assert windows["rs2"] == []
    assert windows["ars"][-1] == "rs2d"


def test_an_instruction_has_its_operands_and_attributes():
    dot = parse(SCHEDULED).entry.by_name["dot"]
    assert (dot.opcode, dot.operands, dot.shape) == ("custom-call", ("p0", "p0"), "f32[2,2]{1,0}")
    assert "__cublas$gemm" in dot.attributes


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,4},{1,5}}, dimensions={0}", ((0, 4), (1, 5))),
        ("replica_groups={}, to_apply=%add", (tuple(range(8)),)),
        ("replica_groups=[2,4]<=[8]", ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=[4,2]<=[2,2,2]T(2,0,1)", ((0, 2), (4, 6), (1, 3), (5, 7))),
        ("replica_groups=mesh['data'=2,'x'=4] {'data'}", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}, use_global", ((0, 2), (1, 3))),
        ("source_target_pairs={{0,1},{1,0}}, metadata={}", ((0, 1), (1, 0))),
    ],
)
def test_every_form_of_groups(text, groups):
    assert replica_groups(text, 8) == groups


def test_axes_of_groups():
    over = axes_finder({"data": 2, "z": 2, "x": 2})
    assert over(((0, 4), (1, 5), (2, 6), (3, 7)), False) == ("data",)
    assert over(((0, 2, 4, 6), (1, 3, 5, 7)), False) == ("data", "z")
    assert over((tuple(range(8)),), False) == ("data", "z", "x")
    assert over(((0, 3), (1, 2), (4, 7), (5, 6)), False) is None  # a diagonal of z and x
    assert over(((0, 1, 2), (4, 5, 6)), False) is None  # part of an axis
    assert over(((0, 1), (2, 6)), False) is None  # one axis here, another there
    assert over(((0, 8),), False) is None  # no such device
    assert over(((0, 3), (3, 0)), True) == ("z", "x")
    placed = axes_finder({"data": 2, "x": 2}, order=[0, 2, 1, 3])  # x neighbours are 0 and 2
    assert placed(((0, 2), (1, 3)), False) == ("x",)


def test_groups_along_no_axes_are_called_unknown():
    text = SCHEDULED.replace("replica_groups={{0,1,2,3},{4,5,6,7}}", "replica_groups={{0,1,2,4},{3,5,6,7}}")
    assert [one.over for one in collectives(text, MESH) if one.name == "rs2"] == ["unknown"]


def test_shapes_and_ring_formulas():
    assert arrays("(f32[2,3]{1,0:T(8,128)}, /*index=1*/(pred[], s4[5]{0:S(5)}))") == (
        Array("f32", (2, 3)), Array("pred", ()), Array("s4", (5,)),
    )  # fmt: skip
    assert [one.bytes for one in (Array("bf16", (3,)), Array("s4", (5,)), Array("f8e4m3fn", (2,)))] == [6, 3, 2]
    kinds = ("all-gather", "reduce-scatter", "all-to-all", "all-reduce", "collective-permute")
    assert [ring_bytes(kind, 12, 3) for kind in kinds] == [8, 8, 8, 16, 12]


def test_text_that_is_no_module_is_refused():
    with pytest.raises(ValueError, match="no HLO module"):
        parse("module @jit_step {}")


LOOP = """HloModule loop, num_partitions=2

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%body (s: (s32[], f32[4])) -> (s32[], f32[4]) {
  %s = (s32[], f32[4]) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %two = s32[] constant(2)
  %next = s32[] add(%i, %two)
  %v = f32[4] get-tuple-element(%s), index=1
  %ar = f32[4] all-reduce(%v), replica_groups={{0,1}}, to_apply=%add
  ROOT %t = (s32[], f32[4]) tuple(%next, %ar)
}

%condition (s.1: (s32[], f32[4])) -> pred[] {
  %s.1 = (s32[], f32[4]) parameter(0)
  %i.1 = s32[] get-tuple-element(%s.1), index=0
  %limit = s32[] constant(10)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

ENTRY %main (p: f32[4], n: s32[]) -> f32[4] {
  %p = f32[4] parameter(0)
  %n = s32[] parameter(1)
  %zero = s32[] constant(3)
  %state = (s32[], f32[4]) tuple(START, %p)
  %loop = (s32[], f32[4]) while(%state), condition=%condition, body=%body
  ROOT %out = f32[4] get-tuple-element(%loop), index=1
}
"""


def test_trip_count_from_constants_where_xla_left_no_note():
    (one,) = collectives(LOOP.replace("START", "%zero"), {"x": 2})
    assert (one.times, one.bytes) == (4, 4 * 16)  # 3, 5, 7, 9


def test_a_trip_count_that_cannot_be_read_is_not_made_up():
    found = collectives(LOOP.replace("START", "%n"), {"x": 2})
    assert [one.times for one in found] == [None]
    with pytest.raises(ValueError, match="trip count"):
        totals(found)


def compiled(f, *shapes):
    mesh = Mesh(np.asarray(jax.devices()).reshape(2, 4), ("data", "x"))
    run = jax.shard_map(f, mesh=mesh, in_specs=P("data", "x"), out_specs=P("data", "x"))
    text = jax.jit(run).lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    return collectives(text, MESH)


def test_nested_loops_of_a_compiled_program_multiply():
    def inner(v, _):
        return v + lax.pcast(lax.psum(jnp.sin(v), "x"), "x", to="varying"), None

    def outer(v, _):
        v, _ = lax.scan(inner, v, None, length=5)
        return lax.ppermute(jnp.cos(v), "data", [(0, 1), (1, 0)]), None

    found = compiled(lambda v: lax.scan(outer, v, None, length=3)[0], (16, 64))
    assert Counter((one.kind, one.over, one.times, one.operand.dims) for one in found) == {
        ("all-reduce", "x", 15, (8, 16)): 1,
        ("collective-permute", "data", 3, (8, 16)): 1,
    }
    assert all("psum" in one.op_name or "ppermute" in one.op_name for one in found)
    local = 8 * 16 * 4
    assert totals(found) == {
        ("all-reduce", "x"): 15 * 2 * Fraction(3, 4) * local,
        ("collective-permute", "data"): 3 * local,
    }


def test_conditional_and_all_to_all_of_a_compiled_program():
    def f(v):
        def turn(v):
            return lax.all_to_all(v, "x", 0, 0, tiled=True)

        return lax.cond(v.sum() > 0, turn, lambda v: v, v)

    found = compiled(f, (16, 64))
    assert {(one.kind, one.over, one.conditional, one.times) for one in found} == {("all-to-all", "x", True, 1)}
    assert sum(one.bytes for one in found) == Fraction(3, 4) * 8 * 16 * 4
