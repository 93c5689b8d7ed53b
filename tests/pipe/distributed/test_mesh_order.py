"""Where the mesh puts devices: along the links between TPU chips, in the given order everywhere else."""

from itertools import product
from typing import NamedTuple

import jax
import numpy as np
import pytest

from axonn_jax.core.grid import GridShape, arranged, build_grid


class Chip(NamedTuple):
    """A device as jax shows it, of hosts of 2 x 2 chips."""

    id: int
    process_index: int
    coords: tuple[int, int, int]
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v4"
    core_on_chip: int = 0


def chips(sizes, platform="tpu", first=0, slice_index=0):
    """The devices of a box of chips, host after host, as `jax.devices()` has them."""
    across, up, deep = sizes
    found = []
    for z, host_y, host_x, y, x in product(range(deep), range(0, up, 2), range(0, across, 2), range(2), range(2)):
        if host_x + x < across and host_y + y < up:
            at, number = (host_x + x, host_y + y, z), first + len(found)
            found.append(Chip(number, number // 4, at, slice_index, platform))
    return found


def hops(mesh, axis, sizes):
    """Links between neighbours along an axis of the mesh, on a torus: the most for any two."""

    def apart(one, other):
        steps = (abs(a - b) for a, b in zip(one.coords, other.coords, strict=True))
        return sum(min(step, size - step) for step, size in zip(steps, sizes, strict=True))

    lines = np.moveaxis(mesh, axis, -1).reshape(-1, mesh.shape[axis])
    return max(apart(line[i], line[i - 1]) for line in lines for i in range(len(line)))


def laid(shape, devices):
    order = np.empty(len(devices), object)
    order[:] = arranged(shape, devices)
    return order.reshape(shape.data, shape.z, shape.y, shape.x)


@pytest.mark.parametrize(
    "shape", [GridShape(z=4, y=4, x=4), GridShape(data=4, x=16), GridShape(data=4, z=4, y=4), GridShape(data=16, x=4)]
)
def test_axes_follow_the_links_of_a_torus(shape):
    box = (4, 4, 4)
    mesh = laid(shape, chips(box))
    assert {chip.id for chip in mesh.flat} == set(range(64))
    for axis, size in enumerate(mesh.shape):
        if size == 4:
            assert hops(mesh, axis, box) == 1
    as_given = np.empty(64, object)
    as_given[:] = chips(box)
    assert max(hops(as_given.reshape(4, 4, 4), axis, box) for axis in range(3)) > 1


def test_slices_are_parts_of_data():
    both = [*chips((2, 2, 2)), *chips((2, 2, 2), first=8, slice_index=1)]
    mesh = laid(GridShape(data=4, z=2, x=2), both)
    assert {chip.slice_index for chip in mesh[:2].flat} == {0}
    assert {chip.slice_index for chip in mesh[2:].flat} == {1}
    for shape in (GridShape(x=16), GridShape(data=1, z=2, x=8)):  # slices do not divide data
        assert arranged(shape, both) is both


@pytest.mark.parametrize(
    "devices",
    [
        chips((4, 4, 1), platform="gpu"),
        chips((4, 4, 1), platform="cpu"),
        [*chips((4, 4, 2))[:15], *chips((4, 4, 2))[-1:]],
    ],
    ids=["GPUs", "CPUs", "no whole box"],
)
def test_elsewhere_the_order_stays(devices):
    assert arranged(GridShape(data=2, z=2, x=4), devices) is devices


def test_virtual_devices_are_laid_in_order():
    shape, devices = GridShape(pipe=2, z=2, x=2), jax.devices()[:8]
    grid = build_grid(shape, devices)
    for place in range(2):
        assert list(grid.meshes[place].devices.flat) == devices[place * 4 : place * 4 + 4]


def test_the_grid_of_a_run_on_tpus_is_laid_so(monkeypatch):
    devices = chips((4, 4, 4))
    seen = []
    monkeypatch.setattr("axonn_jax.core.grid.build_mesh", lambda shape, stage: seen.append(list(stage)))
    shape = GridShape(pipe=2, z=2, y=4, x=4)
    build_grid(shape, devices)
    assert seen == [list(arranged(shape, devices[:32])), list(arranged(shape, devices[32:]))]
    assert seen[0] != devices[:32]
