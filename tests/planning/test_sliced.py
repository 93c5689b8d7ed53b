"""Which all-reduces a compiler may turn into reduce-scatters, read from a program's text."""

from fractions import Fraction

import pytest
from hlo.collectives import collectives
from hlo.program import parse
from hlo.scatterable import scatterable, totals_if_scattered

# A gradient that only its shard is read of (through a fusion, and through a copy), one that is read whole too, one of
# which a half is read of a sum over four devices, and one that is the program's result.
PROGRAM = """\
HloModule jit_f, is_scheduled=true, num_partitions=4

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%shard (whole: f32[8,4], at: s32[]) -> f32[2,4] {
  %whole = f32[8,4]{1,0} parameter(0)
  %at = s32[] parameter(1)
  %slice = f32[2,4]{1,0} dynamic-slice(%whole, %at, %at), dynamic_slice_sizes={2,4}
  ROOT %twice = f32[2,4]{1,0} add(%slice, %slice)
}

%all (whole: f32[8,4]) -> f32[8,4] {
  %whole = f32[8,4]{1,0} parameter(0)
  ROOT %twice = f32[8,4]{1,0} add(%whole, %whole)
}

ENTRY %main (p0: f32[8,4], p1: f32[8,4], at: s32[]) -> (f32[2,4], f32[2,4], f32[8,4], f32[4,4], f32[8,4]) {
  %p0 = f32[8,4]{1,0} parameter(0)
  %p1 = f32[8,4]{1,0} parameter(1)
  %at = s32[] parameter(2)
  %both = (f32[8,4]{1,0}, f32[8,4]{1,0}) all-reduce(%p0, %p1), replica_groups={{0,1,2,3}}, to_apply=%add
  %first = f32[8,4]{1,0} get-tuple-element(%both), index=0
  %second = f32[8,4]{1,0} get-tuple-element(%both), index=1
  %s0 = f32[2,4]{1,0} fusion(%first, %at), kind=kLoop, calls=%shard
  %copy = f32[8,4]{1,0} copy(%first)
  %s1 = f32[2,4]{1,0} fusion(%copy, %at), kind=kLoop, calls=%shard
  %s2 = f32[2,4]{1,0} fusion(%second, %at), kind=kLoop, calls=%shard
  %w2 = f32[8,4]{1,0} fusion(%second), kind=kLoop, calls=%all
  %half = f32[8,4]{1,0} all-reduce(%p0), replica_groups={{0,1,2,3}}, to_apply=%add
  %s3 = f32[4,4]{1,0} dynamic-slice(%half, %at, %at), dynamic_slice_sizes={4,4}
  %given = f32[8,4]{1,0} all-reduce(%p1), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %result = (f32[2,4], f32[2,4], f32[8,4], f32[4,4], f32[8,4]) tuple(%s0, %s1, %w2, %s3, %given)
}
"""


def test_parts_that_are_read():
    module = parse(PROGRAM)
    first, second, half, given = collectives(module, {"z": 4})
    assert [scatterable(module, first, 0), scatterable(module, second, 1)] == [4, 1]
    assert [scatterable(module, half), scatterable(module, given)] == [2, 1]


def test_bytes_as_reduce_scatters():
    whole = 8 * 4 * 4
    found = totals_if_scattered(PROGRAM, collectives(PROGRAM, {"z": 4}))
    scattered = Fraction(3, 4) * whole + Fraction(1, 2) * whole  # over four, and over two of four
    left = 2 * Fraction(3, 4) * whole * 2 + 2 * Fraction(1, 2) * whole / 2  # two read whole; a half over the other two
    assert found == {("all-reduce", "z"): left, ("reduce-scatter", "z"): scattered}


def test_bytes_as_reduce_scatters_of_a_loop_without_a_trip_count():
    looped = PROGRAM.replace("ENTRY %main", "%body")
    looped += """
%condition (state: f32[8,4]) -> pred[] {
  %state = f32[8,4]{1,0} parameter(0)
  ROOT %go = pred[] constant(true)
}

ENTRY %main (p: f32[8,4]) -> f32[8,4] {
  %p = f32[8,4]{1,0} parameter(0)
  ROOT %loop = f32[8,4]{1,0} while(%p), condition=%condition, body=%body
}
"""
    with pytest.raises(ValueError, match="trip count"):
        totals_if_scattered(looped, collectives(looped, {"z": 4}))
