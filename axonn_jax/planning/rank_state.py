"""Ranks of a pipeline: their share of the model, and its state in bytes; no jax."""

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from axonn_jax.core.grid import MESH_AXES, GridShape
from axonn_jax.core.ops.costs import forward_flops, parameters
from axonn_jax.core.ops.language import Param
from axonn_jax.planning import memory as formulas
from axonn_jax.planning.declared.adapters import describe_single_device
from axonn_jax.planning.request import PlanRequest, StatePlacement


@dataclass(frozen=True)
class Load:
    """Load of a rank of the pipeline."""

    rank: int
    blocks: float
    """Number of blocks; a half is attention or MLP alone."""
    first: bool
    """True if the rank has the embedding."""
    last: bool
    """True if the rank has the head."""
    tables: int
    """Number of vocabulary tables; a tied table is at both ends of a pipeline."""
    params: float
    """Parameters of the rank, without experts."""
    experts: float
    """Parameters of its experts."""
    moment: float
    """Bytes of optimizer state per trained parameter, without experts."""


class RankState(NamedTuple):
    """Bytes of a rank's model state on each of its devices."""

    weights: float
    gradients: float
    optimizer: float
    device: float
    """Bytes on the device."""
    host: float
    """Bytes on the host, for each device."""
    update_buffers: float
    """Further bytes after the backward pass, for reduction and update."""


class Ranks:
    """Ranks of one request's candidates; shared results are computed once."""

    def __init__(self, request: PlanRequest):
        shape = request.shape
        self.request = request
        self.first, *blocks, self.last = describe_single_device(shape, request.lora)
        self.block_flops = sum(layer.count * forward_flops(layer, shape.seq_len) for layer in blocks) / shape.layers
        every_param = [(layer.count, param) for layer in blocks for param in layer.params]
        self.adapters = [(count / shape.layers, param) for count, param in every_param if param.partial]
        """Adapters of the mean block."""
        params = [(count, param) for count, param in every_param if not param.partial]
        routed = [(count, param) for count, param in params if "expert" in param.axes]
        pruned = [(count, param) for count, param in params if param.prunable and "expert" not in param.axes]
        self.blocks = [(count / shape.layers, param) for count, param in every_param if "expert" not in param.axes]
        """Parameters of the mean block without experts, with their number per block."""
        # Where layers alternate, each block gets the mean share of what only some blocks have.
        every, self.experts, self.kernels = (
            sum(count * param.elements for count, param in some) / shape.layers for some in (params, routed, pruned)
        )
        self.layer = every - self.experts
        self.expert_moment = _moment(request, routed)
        self.loads = cache(self._loads)
        self._states: dict[GridShape, dict[tuple[int, StatePlacement], RankState]] = {}

    def _loads(self, pipe: int) -> tuple[Load, ...]:
        """Return the first rank, a middle rank and the last rank; the fullest and the busiest are among them."""
        shape = self.request.shape
        if pipe == 1:
            return (self._load(0, shape.layers, True, True),)
        head = forward_flops(self.last, shape.seq_len) / self.block_flops
        usual, last = formulas.balanced_blocks(shape.layers, head, pipe)
        # Middle ranks have equal loads, so a single one represents them.
        between = (self._load(1, usual, False, False),) if pipe > 2 else ()
        return (self._load(0, usual, True, False), *between, self._load(pipe - 1, last, False, True))

    def _load(self, rank: int, blocks: float, first: bool, last: bool) -> Load:
        shape = self.request.shape
        params = blocks * self.layer
        params += parameters(self.first) if first else 0
        params += parameters(self.last) if last else 0
        params += shape.hidden * shape.vocab if last and not first and shape.tied else 0
        tables = first + (last and not (first and shape.tied))
        counted = [(blocks * share, param) for share, param in self.blocks]
        counted += [(1.0, param) for param in self.first.params] if first else []
        counted += [(1.0, param) for param in self.last.params] if last else []
        moment = _moment(self.request, counted)
        return Load(rank, blocks, first, last, tables, params, blocks * self.experts, moment)

    def params(self, grid: GridShape, load: Load) -> float:
        """Return the parameters of a rank on each of its devices, including the padding of its tables."""
        return sum(self.replicated(grid, load))

    def trained(self, grid: GridShape, load: Load) -> tuple[float, float]:
        """Return the trained parameters on a device like `replicated`: without pruned entries, or only adapters."""
        if self.request.lora.adapts:
            sizes = {axis: getattr(grid, axis) for axis in MESH_AXES}
            return load.blocks * sum(n * p.elements / prod(sizes[a] for a in p.axes) for n, p in self.adapters), 0.0
        (dense, experts), density = self.replicated(grid, load), self.request.density
        return dense - (1.0 - density) * self._pruned(grid, load), experts * density

    def _pruned(self, grid: GridShape, load: Load) -> float:
        """Return the entries of prunable kernels among the parameters that `data` and `expert` replicate."""
        return load.blocks * self.kernels / (grid.x * grid.y * grid.z)

    def replicated(self, grid: GridShape, load: Load) -> tuple[float, float]:
        """Return the parameters on a device replicated by `data` and `expert`, and the experts', only by `data`."""
        padding = load.tables * self.request.shape.hidden * (self.vocab(grid) - self.request.shape.vocab)
        split = grid.x * grid.y * grid.z
        return (load.params + padding) / split, load.experts / split / grid.expert

    def vocab(self, grid: GridShape) -> int:
        """Return the rows of a table, padded to divide over `y` and `z`."""
        return self.request.shape.padded_vocab(grid.y * grid.z)

    def state(self, grid: GridShape, load: Load, placement: StatePlacement) -> RankState:
        """Return the model state on a rank's devices with the optimizer's state in `placement`, computed once."""
        of_grid, key = self.states(grid), (load.rank, placement)
        if key not in of_grid:
            of_grid[key] = self._model_state(grid, load, *placement)
        return of_grid[key]

    def states(self, grid: GridShape) -> dict[tuple[int, StatePlacement], RankState]:
        """Return the states of a grid computed so far, by rank and placement."""
        return self._states.setdefault(grid, {})

    def _model_state(self, grid: GridShape, load: Load, offload: bool, zero: int) -> RankState:
        request, gradient_item, density = self.request, self.request.gradient_item, self.request.density
        adapts = request.lora.adapts
        # Adapters are float32 in every precision, and the frozen model's weights have no masters.
        precision: formulas.Precision = "fp32" if adapts else request.precision
        (dense, experts), pruned = self.replicated(grid, load), self._pruned(grid, load)
        frozen = (dense + experts) * formulas.itemsize(request.precision) if adapts else 0.0
        of_dense, of_experts = (grid.replicas, grid.data) if zero else (1, 1)
        trained, of_routed = self.trained(grid, load)
        items = (load.moment, self.expert_moment)
        groups: list[tuple[float, float | None, int, float]]
        groups = [(trained, None, of_dense, items[0]), (of_routed, None, of_experts, items[1])]
        if density < 1.0:
            groups = [(dense - pruned, None, of_dense, items[0]), (pruned, pruned * density, of_dense, items[0])]
            groups.append((experts, of_routed, of_experts, items[1]))
        device = [
            formulas.device_state(
                params, precision, unpruned=unpruned, gradient_item=gradient_item, offload=offload, replicas=replicas,
                moment=moment, separate_masters=(bool(zero) and grid.replicas > 1) or density < 1.0,
            )
            for params, unpruned, replicas, moment in groups
        ]  # fmt: skip
        dense, experts = trained, of_routed
        parts = [(dense, of_dense, items[0]), (experts, of_experts, items[1])]
        host = sum(formulas.host_state(params, precision, of, item) for params, of, item in parts) * offload
        local_params = sum(params / replicas for params, replicas, _ in parts)
        update_buffers = (
            formulas.streamed_state(min(request.bucket, local_params), precision, items[0]) if offload else 0.0
        )
        # A reduction holds a bucket of gradients and its reduced copy at the same time.
        if grid.replicas > 1:
            reduction = 2 * gradient_item * min(dense + (experts if grid.data > 1 else 0.0), request.bucket)
            # In a pipeline ZeRO-1 scatters in a separate program, whose input and output are both resident.
            if grid.pipe > 1 and zero:
                reduction += local_params * gradient_item
            update_buffers = max(update_buffers, reduction)
        return RankState(
            frozen + sum(state.weights for state in device),
            sum(state.gradients for state in device),
            sum(state.master + state.moments + state.positions for state in device),
            frozen + sum(state.total for state in device),
            host,
            update_buffers,
        )


def _moment(request: PlanRequest, params: Iterable[tuple[float, Param]]) -> float:
    """Return the mean bytes of optimizer state for an element of those parameters that are trained."""
    sizes = [(count * param.elements, request.state_item(param)) for count, param in params if param.trained]
    return sum(size * item for size, item in sizes) / max(sum(size for size, _ in sizes), 1.0)
