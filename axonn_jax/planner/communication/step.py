"""A training step whose communication is asked for, and one collective of it."""

from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

from axonn_jax.experts.shape import MoeConfig
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.models.config import ModelShape
from axonn_jax.ops.costs import Phase, StepPolicy
from axonn_jax.ops.language import FLOAT32
from axonn_jax.options import Activations, ReshardAfter
from axonn_jax.planner.machines.network import CollectiveKind, ring_bytes

DATA, EXPERT, Z, Y, X = "data", "expert", "z", "y", "x"


@dataclass(frozen=True)
class StepSpec:
    """A training step whose communication is asked for."""

    shape: ModelShape
    """The model."""
    grid: GridShape
    """The mesh; `pipe` is 1."""
    sequences: int
    """Sequences a step over all devices, a multiple of data * expert * z * microbatches."""
    microbatches: int = 1
    """Parts the step runs in, one after the other."""
    itemsize: int = FLOAT32
    """Bytes of an element of activations and gathered weights (2: bf16); norms and loss have 4."""
    activations: Activations = "none"
    """Activation policy; `full`, `dots` and `offload` communicate the same, `save_collectives` only gathers again."""
    scanned: bool = False
    """True if layers are a loop's body (`tensor.scan_layers`): their weights are then gathered for every microbatch."""
    reshard_after: ReshardAfter = "forward"
    """When gathered weights are let go: after `forward` they are gathered again in recomputation; with several
    microbatches `step` gathers, and reduce-scatters sums of gradients, once a step."""
    comm: BlockComm = ALL_REDUCE
    """Communication of blocks with the residual stream."""
    gradient_item: int = FLOAT32
    """Bytes of an element of gradients on their way over `z`."""
    density: float = 1.0
    """Share of the entries of the blocks' kernels that is trained; slots to spare are left out."""

    moe: MoeConfig = field(default_factory=MoeConfig)
    """Training of experts, with their dispatch."""
    duplicates: bool = False
    """True if devices along `y` send the tokens that they have in common each (capacity), for comparison."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a device."""
        return self.sequences // (self.microbatches * self.grid.batch_shards) * self.shape.seq_len

    @cached_property
    def policy(self) -> StepPolicy:
        """The way in which the step runs its layers."""
        return StepPolicy(
            self.microbatches, self.activations != "none", self.activations == "save_collectives", self.scanned,
            self.reshard_after != "forward", self.reshard_after == "step" and self.microbatches > 1,
            self.gradient_item, self.density,
        )  # fmt: skip

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: getattr(self.grid, axis) for axis in (DATA, EXPERT, Z, Y, X)}

    def row(
        self, name: str, phase: Phase, kind: CollectiveKind, axes: tuple[str, ...], buffer: int, times: int
    ) -> "Predicted":
        """A collective of so many bytes over those of the axes, slowest first, that are larger than one."""
        sizes = self.sizes
        live = tuple([axis for axis in axes if sizes[axis] > 1])
        return Predicted(name, phase, kind, live, prod([sizes[axis] for axis in live]), buffer, times)


class Predicted(NamedTuple):
    """One collective of the algorithm."""

    name: str
    """Name of the layer; all blocks together are one entry."""
    phase: Phase
    """Phase of the step."""
    kind: CollectiveKind
    """Kind of the collective."""
    axes: tuple[str, ...]
    """Mesh axes larger than one that it runs over, slowest first."""
    group: int
    """Devices in a group: the product of the axes."""
    whole: int
    """Bytes of the whole buffer: gathered, or to be reduced."""
    times: int
    """Runs in a step."""

    @property
    def over(self) -> str:
        """The axes joined by `*`."""
        return "*".join(self.axes)

    @property
    def bytes(self) -> Fraction:
        """Bytes a device sends in a step, on a ring."""
        return self.times * ring_bytes(self.kind, self.whole, self.group)
