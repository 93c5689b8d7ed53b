"""How long collectives take on a machine: ring bandwidth of nested groups, node boundaries, latency."""

from collections.abc import Sequence
from math import ceil, log2, prod

from axonn_jax.grid import MESH_AXES, GridShape
from axonn_jax.planner.machine import Machine
from axonn_jax.planner.measured import Curve
from axonn_jax.planner.ring import Kind


class Links:
    """The groups of one grid on a machine, `x` fastest: neighbours along the fastest axes share a node."""

    def __init__(self, grid: GridShape, machine: Machine):
        self.machine = machine
        self.sizes = {axis: int(getattr(grid, axis)) for axis in MESH_AXES}
        self.stage_devices = grid.stage_devices

    def inner(self, axes: Sequence[str]) -> int:
        """Product of the axes inside (faster than) the fastest of these."""
        fastest = max(MESH_AXES.index(axis) for axis in axes)
        return prod(self.sizes[axis] for axis in MESH_AXES[fastest + 1 :])

    def near(self, axes: Sequence[str]) -> bool:
        """Whether groups over these axes stay inside a node."""
        return self.inner(axes) * prod(self.sizes[axis] for axis in axes) <= self.machine.node.devices

    def rate(self, axes: Sequence[str]) -> float:
        """Bytes/s a device sends in a ring collective over these axes, all its sibling groups at once.

        Measured where the machine file has it. Else a group inside a node has the links of a device; one across nodes
        shares what a node sends: beta_inter / min(G_node, inner), as its siblings' rings leave the node too.
        """
        size, inner = prod(self.sizes[axis] for axis in axes), self.inner(axes)
        node = self.machine.node
        if (found := self.machine.measured(inner, size)) is not None:
            return found
        if inner * size <= node.devices:
            return node.bytes_per_s
        return min(node.bytes_per_s, self.machine.network.bytes_per_s / min(node.devices, inner))

    def curve(self, kind: Kind, axes: Sequence[str]) -> Curve:
        """Measured seconds of a collective over these axes by the bytes of its buffer.

        Empty where there are none, and across nodes: what was measured is taken to be one node.
        """
        size, inner = prod(self.sizes[axis] for axis in axes), self.inner(axes)
        return self.machine.curve(kind, inner, size) if inner * size <= self.machine.node.devices else ()

    def latency(self, kind: Kind, axes: Sequence[str]) -> float:
        """Seconds before the first byte of a collective counts: a launch, then its hops.

        A ring has `size - 1` hops, as many between nodes as nodes take part less one; an all-reduce goes up and down a
        binary tree, as communication libraries do where latency matters.
        """
        size, inner = prod(self.sizes[axis] for axis in axes), self.inner(axes)
        per_node = max(1, self.machine.node.devices // inner)  # members of a group in a node
        nodes = ceil(size / per_node)
        near, far = self.machine.node.latency_s, self.machine.network.latency_s
        if kind == "all-reduce":
            inside = 2 * ceil(log2(min(size, per_node))) if per_node > 1 else 0
            return self.machine.device.launch_s + inside * near + 2 * ceil(log2(nodes)) * far
        return self.machine.device.launch_s + (size - nodes) * near + (nodes - 1) * far

    def neighbour_rate(self) -> float:
        """Bytes/s of a device's messages to the next pipeline stage, all devices of a node sending at once."""
        node, measured = self.machine.node, self.machine.messages
        if 2 * self.stage_devices <= node.devices:
            return max((one.bytes_per_s for one in measured), default=node.bytes_per_s)
        return min(node.bytes_per_s, self.machine.network.bytes_per_s / min(node.devices, self.stage_devices))

    def neighbour_latency(self) -> float:
        """Seconds a message to the next stage takes at least."""
        if 2 * self.stage_devices > self.machine.node.devices:
            return self.machine.network.latency_s
        return min((one.latency_s for one in self.machine.messages), default=self.machine.node.latency_s)
