"""Communication of a training step, collective by collective, from formulas; no jax.

The count covers one program: forward, backward and optimizer of a model on one mesh. Three rules go beyond the algebra:

* A weight that is gathered outside of recomputation depends on nothing but parameters, so the compiler gathers it once
  a step, not once a microbatch (XLA's loop-invariant code motion); recomputed gathers stay with their microbatch, and
  so do those of scanned layers, unless the program itself gathers once a step.
* A tied table is gathered once for embedding and head, and the sum of its two gradients is reduce-scattered once.
* Recomputation leaves out results that the backward pass does not read: the all-reduce of a block's last matmul, and
  all of embedding, final norm, head and loss, which are outside of the blocks.

With the stream split along its sequence over `y`, a matmul's input is all-gathered and its dX reduce-scattered,
additions to the stream are reduce-scattered and their gradient all-gathered, each half the bytes of an all-reduce.
Blocks gather once more in the backward pass, under `none` too, where only the part is kept till then.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from math import prod
from typing import NamedTuple

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import MESH_AXES, GridShape
from axonn_jax.core.models.block_comm import ALL_REDUCE, BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.ops.costs import Phase, StepPolicy, collectives, update_collectives
from axonn_jax.core.ops.language import FLOAT32, Layer
from axonn_jax.core.ops.layers import Place
from axonn_jax.planning.declared.adapters import describe_trained
from axonn_jax.planning.machines.network import CollectiveKind, ring_bytes


@dataclass(frozen=True)
class StepSpec:
    """A training step whose communication is asked for."""

    shape: ModelShape
    """The model."""
    grid: GridShape
    """The mesh; `pipe` is 1."""
    sequences: int
    """Sequences a step over all devices, a multiple of data * expert * z * microbatches."""
    policy: StepPolicy = field(default_factory=StepPolicy)
    """The way in which the step runs its layers."""
    itemsize: int = FLOAT32
    """Bytes of an element of activations and gathered weights (2: bf16); norms and loss have 4."""
    comm: BlockComm = ALL_REDUCE
    """Communication of blocks with the residual stream."""
    moe: MoeConfig = field(default_factory=MoeConfig)
    """Training of experts, with their dispatch."""
    lora: LoraConfig = field(default_factory=LoraConfig)
    """Adapters, which alone are trained if there are any."""

    @property
    def tokens(self) -> int:
        """Tokens of a microbatch on a device."""
        return self.sequences // (self.policy.microbatches * self.grid.batch_shards) * self.shape.seq_len

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Devices along each axis."""
        return {axis: getattr(self.grid, axis) for axis in MESH_AXES}

    def row(
        self, name: str, phase: Phase, kind: CollectiveKind, axes: tuple[str, ...], buffer: int, times: int
    ) -> "Predicted":
        """Return a collective of `buffer` bytes over the `axes`, slowest first, that are larger than one."""
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
    buffer_bytes: int
    """Bytes of the full buffer: the gathered result, or what is reduced."""
    times: int
    """Number of runs in a step."""

    @property
    def over(self) -> str:
        """The axes joined by `*`."""
        return "*".join(self.axes)

    @property
    def bytes(self) -> Fraction:
        """Bytes that a device sends in a step with the ring algorithm."""
        return self.times * ring_bytes(self.kind, self.buffer_bytes, self.group)


def predict(work: StepSpec) -> tuple[Predicted, ...]:
    """Return every collective of a step whose group is larger than one; needs neither jax nor a device.

    Raises:
        UserError: Model or batch do not divide over the grid.
    """
    work.shape.check_grid(work.grid, sequence_split=work.comm.sequence_split)
    work.comm.check(work.shape, work.grid)
    work.grid.check_batch(work.sequences, work.policy.microbatches)
    # A group of one device sends nothing.
    return tuple(sent for sent in (*predict_microbatch(work), *predict_update(work)) if sent.group > 1)


def predict_microbatch(work: StepSpec) -> Iterator[Predicted]:
    """Yield the collectives before the update of a step that divides over its grid, groups of one device included."""
    for row in collectives(_layers(work), work.policy):
        yield work.row(*row)


def predict_update(work: StepSpec) -> Iterator[Predicted]:
    """Yield the collectives once a step, groups of one device included.

    Gradients in float32, over `data` and `expert`, and over `z` too where a parameter is replicated there; with the
    sequence split over `y` as well: norms, biases added to the stream, positions. Buckets change the number of
    messages, not their bytes. Then the number of targets that count, the mean loss and the global norm: a scalar each.
    """
    batch = ("data", "expert", "z")
    over = (*batch, "y") if work.comm.sequence_split else batch
    for row in update_collectives(_layers(work), work.policy, work.sizes, over):
        yield work.row(*row)
    yield work.row("targets", "update", "all-reduce", batch, FLOAT32, 1)
    yield work.row("mean loss", "update", "all-reduce", batch, FLOAT32, 1)
    # Expert gradients differ along `expert`, so their norm is reduced there; dense ones are replicated.
    norms = ("expert", "z", "y", "x") if work.shape.routed_layers else ("z", "y", "x")
    yield work.row("global norm", "update", "all-reduce", norms, FLOAT32, 1)


def _layers(work: StepSpec) -> tuple[Layer, ...]:
    grid, split = work.grid, work.comm.sequence_split
    at = Place(grid.expert, grid.z, grid.y, grid.x, work.tokens, work.itemsize, split)
    return describe_trained(work.shape, work.lora, at, work.comm, work.moe, scanned=work.policy.scanned)
