"""Ranks of a pipeline: their share of the model, and its state in bytes; no jax."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

from axonn_jax.grid import GridShape
from axonn_jax.models.declared.transformer import describe_alone
from axonn_jax.ops.costs import forward_flops, parameters
from axonn_jax.planner import memory as formulas
from axonn_jax.planner.request import PlanRequest, StatePlacement


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
    """Number of vocabulary tables; a tied one is held at both ends of a pipeline."""
    params: float
    """Parameters of the whole rank, experts aside."""
    experts: float
    """Parameters of its experts."""


class RankState(NamedTuple):
    """Bytes of a rank's model state on each of its devices."""

    weights: float
    gradients: float
    optimizer: float
    device: float
    """Bytes on the device."""
    host: float
    """Bytes on the host, for each device."""
    later: float
    """Further bytes after the backward pass, for reduction and update."""


class Ranks:
    """Ranks of one request's candidates; shared results are computed once."""

    def __init__(self, request: PlanRequest):
        shape = request.shape
        self.request = request
        self.first, *blocks, self.last = describe_alone(shape)
        self.block_flops = sum(layer.count * forward_flops(layer, shape.seq_len) for layer in blocks) / shape.layers
        params = [(layer.count, param) for layer in blocks for param in layer.params]
        routed = [(count, param) for count, param in params if "expert" in param.axes]
        pruned = [(count, param) for count, param in params if param.prunable and "expert" not in param.axes]
        # Of the mean block; where layers alternate, all blocks have the same share of what some have.
        every, self.experts, self.kernels = (
            sum(count * param.elements for count, param in some) / shape.layers for some in (params, routed, pruned)
        )
        self.layer = every - self.experts
        self.loads = cache(self._loads)
        self._states: dict[GridShape, dict[tuple[int, StatePlacement], RankState]] = {}

    def _loads(self, pipe: int) -> tuple[Load, ...]:
        """The ranks that matter: the first, one between, and the last; the fullest and the busiest are among them."""
        shape = self.request.shape
        if pipe == 1:
            return (self._load(0, shape.layers, True, True),)
        head = forward_flops(self.last, shape.seq_len) / self.block_flops
        usual, last = formulas.balanced_blocks(shape.layers, head, pipe)
        between = (self._load(1, usual, False, False),) if pipe > 2 else ()
        return (self._load(0, usual, True, False), *between, self._load(pipe - 1, last, False, True))

    def _load(self, rank: int, blocks: float, first: bool, last: bool) -> Load:
        shape = self.request.shape
        params = blocks * self.layer
        params += parameters(self.first) if first else 0
        params += parameters(self.last) if last else 0
        params += shape.hidden * shape.vocab if last and not first and shape.tied else 0
        tables = first + (last and not (first and shape.tied))
        return Load(rank, blocks, first, last, tables, params, blocks * self.experts)

    def params(self, grid: GridShape, load: Load) -> float:
        """Parameters of a rank on each of its devices, with the zeros that its tables are padded with."""
        return sum(self.replicated(grid, load))

    def trained(self, grid: GridShape, load: Load) -> tuple[float, float]:
        """Return parameters on a device as `replicated`, without the pruned entries of kernels."""
        (dense, experts), density = self.replicated(grid, load), self.request.density
        return dense - (1.0 - density) * self._pruned(grid, load), experts * density

    def _pruned(self, grid: GridShape, load: Load) -> float:
        """Parameters of kernels that are pruned, of those that `data` and `expert` replicate."""
        return load.blocks * self.kernels / (grid.x * grid.y * grid.z)

    def replicated(self, grid: GridShape, load: Load) -> tuple[float, float]:
        """Return parameters on a device that `data` and `expert` replicate, and those of experts, which only `data`
        does."""
        padding = load.tables * self.request.shape.hidden * (self.vocab(grid) - self.request.shape.vocab)
        split = grid.x * grid.y * grid.z
        return (load.params + padding) / split, load.experts / split / grid.expert

    def vocab(self, grid: GridShape) -> int:
        """Rows of a table, padded to divide over `y` and `z`."""
        return self.request.shape.padded_vocab(grid.y * grid.z)

    def state(self, grid: GridShape, load: Load, placement: StatePlacement) -> RankState:
        """Model state of a rank's devices, the optimizer's in such a placement."""
        of_grid, key = self.states(grid), (load.rank, placement)
        if key not in of_grid:
            of_grid[key] = self._placed(grid, load, *placement)
        return of_grid[key]

    def states(self, grid: GridShape) -> dict[tuple[int, StatePlacement], RankState]:
        """States of a grid so far, by rank and placement."""
        return self._states.setdefault(grid, {})

    def _pruned_state(self, grid: GridShape, load: Load, offload: bool, zero: int) -> Iterator[formulas.ParamBytes]:
        """Yield the state on the device of unpruned parameters, of pruned kernels, and of experts' kernels."""
        request, pruned = self.request, self._pruned(grid, load)
        (dense, experts), replicas = self.replicated(grid, load), grid.replicas if zero else 1
        settings: dict[str, Any] = {"gradient_item": request.gradient_item, "offload": offload}
        rest = dense - pruned
        yield formulas.device_state(rest, request.precision, apart=True, replicas=replicas, **settings)
        for params, over in ((pruned, replicas), (experts, grid.data if zero else 1)):
            yield formulas.pruned_state(params, params * request.density, request.precision, replicas=over, **settings)

    def _placed(self, grid: GridShape, load: Load, offload: bool, zero: int) -> RankState:
        request, gradient_item, density = self.request, self.request.gradient_item, self.request.density
        dense, experts = self.trained(grid, load)
        parts = [(dense, grid.replicas if zero else 1), (experts, grid.data if zero else 1)]
        apart = offload or (bool(zero) and grid.replicas > 1) or density < 1.0
        if density < 1.0:
            device = list(self._pruned_state(grid, load, offload, zero))
        else:
            device = [
                formulas.device_state(
                    params,
                    request.precision,
                    gradient_item=gradient_item,
                    apart=apart,
                    offload=offload,
                    replicas=replicas,
                )
                for params, replicas in parts
            ]
        host = sum(
            formulas.host_state(params, request.precision, offload=offload, replicas=replicas).total
            for params, replicas in parts
        )
        own = sum(params / replicas for params, replicas in parts)
        later = formulas.streamed_state(min(request.bucket, own), request.precision) if offload else 0.0
        reduced = dense + (experts if grid.data > 1 else 0.0)
        reduction = formulas.bucket_buffers(reduced, request.bucket, gradient_item) if grid.replicas > 1 else 0.0
        if grid.pipe > 1 and zero and grid.replicas > 1:  # a program of its own takes the sums and gives a part
            reduction += own * gradient_item
        later = max(later, reduction)
        return RankState(
            sum(state.weights for state in device),
            sum(state.gradients for state in device),
            sum(state.master + state.moments + state.positions for state in device),
            sum(state.total for state in device),
            host,
            later,
        )
