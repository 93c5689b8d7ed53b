"""Collectives on links: bytes that a device sends on a ring, places of groups in nodes, and times."""

from collections.abc import Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import ceil, gcd, log2, prod
from typing import Literal, NamedTuple

from axonn_jax.core.grid import MESH_AXES, GridShape
from axonn_jax.planning.machines.machine import Curve, Machine

CollectiveKind = Literal["all-gather", "all-reduce", "all-to-all", "collective-permute", "reduce-scatter"]


def ring_bytes(kind: CollectiveKind, buffer: int, group: int) -> Fraction:
    """Return the bytes that a device sends for a collective of `group` devices over a full buffer of `buffer` bytes.

    With the ring algorithms (Thakur et al. 2005) all-gather, reduce-scatter and all-to-all send (G-1)/G n bytes, an
    all-reduce 2 (G-1)/G n, and a permutation n. The result is a fraction, so that sums compare exactly.
    """
    if kind == "collective-permute":
        return Fraction(buffer)
    return Fraction((2 if kind == "all-reduce" else 1) * (group - 1) * buffer, group)


class GroupSpread(NamedTuple):
    """Spread of a collective's groups over nodes; all groups run at once, and the slowest decides."""

    rings: int
    """Largest number of rings between nodes that pass through one node; 0: no ring leaves a node."""
    spreads: frozenset[tuple[int, int]]
    """Pairs of (nodes that a group touches, members in the fullest of them), of all groups."""


@cache
def group_spread(node: int, inner: int, size: int, devices: int) -> GroupSpread:
    """Return how groups of `size` devices with a stride of `inner` spread over `devices` devices in nodes of `node`.

    Nodes are consecutive devices, and so are blocks of `inner` interleaved groups. A block's spread depends only on the
    offset in its node at which it begins, and these offsets repeat.
    """
    span = inner * size
    if node % span == 0 or devices <= node:
        return GroupSpread(0, frozenset({(1, size)}))
    if inner >= node:  # every device of a node is in another ring
        return GroupSpread(node, frozenset({(size, 1)}))
    begins = [block * span for block in range(min(devices // span, node // gcd(node, span)))]
    spreads = frozenset(
        _spread(node, inner, size, (begin + offset) % node) for begin in begins for offset in range(inner)
    )
    # Offsets repeat, so only the nodes in which these blocks begin are counted, and the last, which may be partial.
    looked_at = {begin // node for begin in begins} | {(devices - 1) // node}
    return GroupSpread(max(_rings(node, inner, size, devices, at) for at in looked_at), spreads)


def _spread(node: int, inner: int, size: int, first: int) -> tuple[int, int]:
    """Return the nodes of a group whose first member has offset `first`, and its members in the fullest node."""
    nodes = (first + (size - 1) * inner) // node + 1
    # Members before each node; from the second on their number repeats after at most `inner` nodes.
    counts = [min(size, max(0, -(-(at * node - first) // inner))) for at in range(min(nodes, inner + 1) + 1)]
    return nodes, max(count - earlier for earlier, count in pairwise(counts))


def _rings(node: int, inner: int, size: int, devices: int, at: int) -> int:
    """Return the number of groups with members both inside and outside of node `at`."""
    low, high = at * node, min((at + 1) * node, devices)
    span = inner * size
    # A node holds the tail of a block that begins in an earlier node and the head of one that ends in a later node;
    # blocks that lie inside the node do not leave it.
    tail = min(-low % span, high - low)
    head = (high - low - tail) % span
    return sum(min(inner, part) - max(0, part - (size - 1) * inner) for part in (tail, head))


def copies(grid: GridShape, node: int, devices: int) -> int:
    """Return how many blocks of `devices` devices differ in their offset in a node; further blocks repeat these."""
    return 1 if node % devices == 0 else min(grid.devices // devices, node // gcd(node, devices))


class GroupLinks:
    """The groups of one grid on a machine, `x` fastest: neighbours along the fastest axes share a node."""

    def __init__(self, grid: GridShape, machine: Machine):
        self.machine = machine
        self.sizes = {axis: int(getattr(grid, axis)) for axis in MESH_AXES}
        self.stage_devices, self.devices = grid.stage_devices, grid.devices
        self._runs_by_axes: dict[tuple[str, ...], list[tuple[int, int]]] = {}

    def inner(self, axes: Sequence[str]) -> int:
        """Return the product of the axes that are faster than the fastest of these: the stride of their groups."""
        fastest = max(MESH_AXES.index(axis) for axis in axes)
        return prod(self.sizes[axis] for axis in MESH_AXES[fastest + 1 :])

    def _runs(self, axes: Sequence[str]) -> list[tuple[int, int]]:
        """Return (stride, size) of every run of adjacent axes.

        There is usually one run. The gradients of positions, which are reduced over `data` and `y` if `y` splits the
        sequence, have two: they are as slow as the slower run and have the hops of both.
        """
        key = tuple(axes)
        if key in self._runs_by_axes:
            return self._runs_by_axes[key]
        runs: list[list[str]] = []
        for axis in sorted((axis for axis in axes if self.sizes[axis] > 1), key=MESH_AXES.index):
            if runs and self.inner(runs[-1]) == self.inner([axis]) * self.sizes[axis]:
                runs[-1].append(axis)
            else:
                runs.append([axis])
        self._runs_by_axes[key] = [(self.inner(run), prod(self.sizes[axis] for axis in run)) for run in runs]
        return self._runs_by_axes[key]

    def _group_spread(self, inner: int, size: int) -> GroupSpread:
        return group_spread(self.machine.node.devices, inner, size, self.devices)

    def near(self, axes: Sequence[str]) -> bool:
        """Return True if all groups over these axes stay inside a node."""
        return not any(self._group_spread(*run).rings for run in self._runs(axes))

    def rate(self, axes: Sequence[str]) -> float:
        """Return the bytes/s that a device sends in a ring collective over these axes, with all sibling groups at once.

        A measurement in the machine file takes precedence. Otherwise a group inside a node has the links of a device,
        and rings that leave a node share its rate: beta_inter / min(G_node, inner) where groups and nodes are nested.
        """
        return min((self._rate(*run) for run in self._runs(axes)), default=self.machine.node.bytes_per_s)

    def _rate(self, inner: int, size: int) -> float:
        node, rings = self.machine.node, self._group_spread(inner, size).rings
        measured_rate = self.machine.measured(inner, size, across=rings > 0)
        # Measurements across nodes cover nested groups only: groups of nodes, or groups that divide a node.
        nested = inner >= node.devices or (node.devices % inner == 0 and inner * size % node.devices == 0)
        if rings == 0 or (measured_rate is not None and nested):
            return measured_rate or node.bytes_per_s
        return min(measured_rate or node.bytes_per_s, self.machine.network.bytes_per_s / rings)

    def curve(self, kind: CollectiveKind, axes: Sequence[str]) -> Curve:
        """Return the measured seconds of a collective over these axes by the bytes of its buffer.

        The curve is empty without measurements and for groups that cross nodes, as it is measured inside a node.
        """
        runs = self._runs(axes)
        return self.machine.curve(kind, *runs[0]) if len(runs) == 1 and self.near(axes) else ()

    def latency(self, kind: CollectiveKind, axes: Sequence[str]) -> float:
        """Return the latency of a collective in seconds: a launch, then the hops of the slowest group.

        A ring has `size - 1` hops, of which `nodes - 1` cross between nodes. An all-reduce goes up and down a binary
        tree, as communication libraries do where latency matters.
        """
        near, far = self.machine.node.latency_s, self.machine.network.latency_s
        seconds = self.machine.device.launch_s
        for inner, size in self._runs(axes):
            spreads = self._group_spread(inner, size).spreads
            if kind == "all-reduce":
                seconds += max(2 * ceil(log2(most)) * near + 2 * ceil(log2(nodes)) * far for nodes, most in spreads)
            else:
                seconds += max((size - nodes) * near + (nodes - 1) * far for nodes, _ in spreads)
        return seconds

    def neighbour_rate(self) -> float:
        """Return the bytes/s of a device's messages to the next pipeline stage, with all devices of a node sending.

        `pipe` is the slowest axis, so the next stage is `stage_devices` further, and a pipeline longer than a node has
        neighbours in different nodes. The slowest link counts, because every microbatch waits for it.
        """
        node, span = self.machine.node, self.stage_devices
        inside = max((message.bytes_per_s for message in self.machine.messages), default=node.bytes_per_s)
        if self.devices <= max(node.devices, span):
            return inside
        # The last `span` devices of a node send to the next node, except those of the pipeline's last stage.
        leaving = min(node.devices, self.devices - span) - max(0, node.devices - span)
        across = min(node.bytes_per_s, self.machine.network.bytes_per_s / leaving)
        return across if span >= node.devices else min(inside, across)

    def neighbour_latency(self) -> float:
        """Return the latency in seconds of a message to the next stage, over the slowest of a pipeline's links."""
        node, across = self.machine.node, self.machine.network.latency_s
        inside = min((message.latency_s for message in self.machine.messages), default=node.latency_s)
        if self.devices <= node.devices:
            return inside
        return across if self.stage_devices >= node.devices else max(inside, across)
