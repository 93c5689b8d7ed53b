"""Groups over nodes, against an enumeration of every device of every grid of up to 48."""

from collections import Counter
from dataclasses import replace
from itertools import product
from math import ceil, log2, prod

import pytest

from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.planning.cost_model.model import CostModel
from axonn_jax.planning.machines.machine import GIB, Messages
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.machines.network import GroupLinks, copies
from axonn_jax.planning.report import explain
from axonn_jax.planning.request import Candidate, PlanRequest
from axonn_jax.planning.search import search
from axonn_jax.planning.space import SearchSpace

NODES = (4, 6, 8)
SUMMIT = load_machine("summit")
INSIDE, ACROSS, NEAR, FAR = 40e9, 23e9, 5e-6, 7e-6
AXES = ("pipe", "data", "z", "y", "x")
OVER = [(axis,) for axis in AXES[1:]] + [("data", "z"), ("data", "z", "y"), ("z", "y", "x"), ("data", "y")]
"""What runs over several axes: gradients of what is replicated over them, norms. The last are no neighbours."""


def machine(node):
    """No launches, so that latencies are those of hops alone."""
    bare = replace(SUMMIT, device=replace(SUMMIT.device, launch_s=0.0), bandwidth=(), messages=())
    return replace(
        bare,
        node=replace(SUMMIT.node, devices=node, bytes_per_s=INSIDE, latency_s=NEAR),
        network=replace(SUMMIT.network, bytes_per_s=ACROSS, latency_s=FAR),
    )


def grids(most=48):
    """Every grid of up to so many devices."""

    def sizes(left, axes):
        if not axes:
            yield ()
            return
        for size in range(1, left + 1):
            for rest in sizes(left // size, axes - 1):
                yield (size, *rest)

    return [GridShape(*found) for found in sizes(most, len(AXES))]


GRIDS = grids()


def groups(grid, axes):
    """The numbers of the devices of every group over these axes, the last of AXES counting fastest."""
    found = {}
    for number, place in enumerate(product(*(range(getattr(grid, axis)) for axis in AXES))):
        key = tuple(at for at, axis in zip(place, AXES, strict=True) if axis not in axes)
        found.setdefault(key, []).append(number)
    return list(found.values())


def spread(group, node):
    return Counter(number // node for number in group)


def hops(kind, size, found):
    """Seconds of one group's hops, by how its members are spread over nodes."""
    nodes, most = len(found), max(found.values())
    if kind == "all-reduce":
        return 2 * ceil(log2(most)) * NEAR + 2 * ceil(log2(nodes)) * FAR
    return (size - nodes) * NEAR + (nodes - 1) * FAR


@pytest.mark.parametrize("node", NODES)
def test_groups_lie_in_nodes_as_an_enumeration_of_all_devices_says(node):
    """Whether they leave a node, the rings that share a node's adapters, and the slowest group's hops."""
    seen = set()
    for grid in GRIDS:
        links = GroupLinks(grid, machine(node))
        for wanted in OVER:
            axes = tuple(axis for axis in wanted if getattr(grid, axis) > 1)
            apart = axes == ("data", "y") and grid.z > 1
            key = (
                grid if apart else axes and (links.inner(axes), prod(links.sizes[axis] for axis in axes), grid.devices)
            )
            if not axes or key in seen:
                continue
            seen.add(key)
            listed = groups(grid, axes)
            spreads = [spread(group, node) for group in listed]
            leaving = Counter(at for one in spreads if len(one) > 1 for at in one)
            rate = min(INSIDE, ACROSS / max(leaving.values())) if leaving else INSIDE
            size, inner = len(listed[0]), links.inner(axes)
            ring, tree = (max(hops(kind, size, one) for one in spreads) for kind in ("all-gather", "all-reduce"))
            assert links.near(axes) == (not leaving), (grid, axes)
            if apart:  # as slow as the slower of both runs
                assert links.rate(axes) <= rate, grid
                continue
            assert links.rate(axes) == rate, (grid, axes)
            assert links.latency("all-gather", axes) == pytest.approx(ring), (grid, axes)
            assert links.latency("all-reduce", axes) == pytest.approx(tree), (grid, axes)
            if inner * size % node == 0 and (node % inner == 0 or inner % node == 0):  # nested, as SC 24 has it
                assert rate == (min(INSIDE, ACROSS / min(node, inner)) if inner * size > node else INSIDE)
    assert len(seen) > 300


@pytest.mark.parametrize("node", NODES)
def test_a_pipelines_slowest_link_is_that_of_an_enumeration_of_all_devices(node):
    for grid in GRIDS:
        if grid.pipe == 1:
            continue
        links, each = GroupLinks(grid, machine(node)), grid.stage_devices
        pairs = [(one // node, (one + each) // node) for one in range(grid.devices - each)]
        leaving = Counter(here for here, there in pairs if here != there)
        kinds = {INSIDE} if any(here == there for here, there in pairs) else set()
        kinds |= {min(INSIDE, ACROSS / max(leaving.values()))} if leaving else set()
        assert links.neighbour_rate() == min(kinds), grid
        assert links.neighbour_latency() == (FAR if leaving else NEAR), grid


def test_a_pipeline_that_leaves_a_node_is_no_faster_than_messages_inside():
    """Two devices a stage in nodes of six: stages 2 and 3 are in different nodes."""
    slow = replace(machine(6), messages=(Messages("mpi4py", 5e9, 3e-5),))
    for pipe, rate in ((2, 5e9), (3, 5e9), (4, 5e9)):
        links = GroupLinks(GridShape(pipe=pipe, x=2), slow)
        assert (links.neighbour_rate(), links.neighbour_latency()) == (rate, 3e-5)
    apart = GroupLinks(GridShape(pipe=2, x=6), slow)
    assert (apart.neighbour_rate(), apart.neighbour_latency()) == (ACROSS / 6, FAR)


def test_groups_that_lie_in_two_nodes_are_not_what_was_measured_in_one():
    """Of three devices side by side some lie in two of Perlmutter's nodes of four: 100 GB/s, which two rings share."""
    perlmutter = load_machine("perlmutter")
    across = perlmutter.network.bytes_per_s
    assert GroupLinks(GridShape(x=3), perlmutter).rate(("x",)) == perlmutter.measured(1, 3) == 76 * GIB
    assert GroupLinks(GridShape(x=3, data=4), perlmutter).rate(("x",)) == min(perlmutter.node.bytes_per_s, across / 2)
    assert GroupLinks(GridShape(x=10, data=4), perlmutter).rate(("x",)) == min(80 * GIB, across / 2)
    assert GroupLinks(GridShape(x=12, data=4), perlmutter).rate(("x",)) == 80 * GIB
    assert GroupLinks(GridShape(x=4, data=4), perlmutter).rate(("x",)) == 225 * GIB


JOB = PlanRequest(preset("gpt-5b"), SUMMIT, 256, "fp16")


def priced(y, pipe, data):
    model = CostModel(JOB)
    return model, model.estimate(
        Candidate(GridShape(pipe, data, 1, y, 1), JOB.batch // data // 2, "full", offload=True)
    )


def test_y_of_four_leaves_summits_nodes_of_six():
    """The second of three groups of four is in two nodes; its all-reduces go through their adapters."""
    model, one = priced(4, 6, 2)
    lines = model.traffic.lines(one.candidate.grid, "block", "reduce")
    assert [line.near for line in lines] == [False]
    # Four devices alone are one node's, whatever was priced before.
    assert [line.near for line in model.traffic.lines(GridShape(y=4), "block", "reduce")] == [True]
    wide = model.traffic.lines(GridShape(y=4), "block", "reduce")[0].per_sequence
    assert lines[0].per_sequence == pytest.approx(wide * 40e9 / 23e9)
    for y, near in ((2, True), (4, False), (8, False)):
        model, one = priced(y, 6, 2)
        assert all(line.near == near for line in model.traffic.lines(one.candidate.grid, "block", "reduce"))


@pytest.mark.parametrize(
    ("y", "says"), [(2, "stays inside"), (4, "does not divide a node of 6"), (8, "leaves the node of 6")]
)
def test_what_is_said_of_the_node_is_what_is_priced(y, says):
    found = search(JOB, 48, SearchSpace(axes={"pipe": 6, "y": y, "x": 1}, offload=(True,), zero=(0,)), 1e12)
    assert sum(says in sentence for sentence in explain(JOB, found, found.best[0])) == 1


@pytest.mark.parametrize("node", NODES)
def test_a_mesh_is_priced_once_for_all_grids_it_lies_in_alike(node):
    for grid in GRIDS:
        mesh = GridShape(1, 1, grid.z, grid.y, grid.x)
        few = replace(mesh, pipe=copies(grid, node, mesh.devices))
        assert few.devices <= grid.devices
        for axes in (("x",), ("y",), ("z",), ("z", "y", "x")):
            whole, less = (GroupLinks(one, machine(node)) for one in (grid, few))
            assert (whole.rate(axes), whole.latency("all-gather", axes)) == (
                less.rate(axes),
                less.latency("all-gather", axes),
            ), (grid, axes)
