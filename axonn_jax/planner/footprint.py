"""What a choice needs of device and host memory, rank by rank."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import NamedTuple

from axonn_jax.grid import GridShape
from axonn_jax.models.inner import Inner
from axonn_jax.planner import memory as formulas
from axonn_jax.planner.attention import scores_bytes
from axonn_jax.planner.job import Choice, Job, Memory, Place
from axonn_jax.schedule.groups import group_count, group_size
from axonn_jax.schedule.policies import live_bound, waiting_bound
from axonn_jax.schedule.tasks import Layout
from axonn_jax.tensor.chunks import loss_chunk

_FP32 = 4


@dataclass(frozen=True)
class Load:
    """What a rank of the pipeline holds."""

    rank: int
    blocks: float
    """A half is attention or MLP alone."""
    first: bool
    """The embedding."""
    last: bool
    """The head."""
    tables: int
    """Of the vocabulary: a tied one is held at both ends of a pipeline."""
    params: float
    """Parameters of the whole rank."""


class State(NamedTuple):
    """Bytes of a rank's model state on each of its devices."""

    weights: float
    gradients: float
    optimizer: float
    device: float
    """All of it on the device."""
    host: float
    """On the host, for each device."""
    later: float
    """Beside it once the backward pass is over: of reduction and update."""


class Footprint:
    """Memory of one job's choices; what they have in common is worked out once."""

    def __init__(self, job: Job):
        self.job = job
        self._item, self._layer = formulas.itemsize(job.precision), job.shape.layer_params()
        self._loads: dict[int, tuple[Load, ...]] = {}
        self._states: dict[GridShape, dict[tuple[int, Place], State]] = {}
        self._blocks: dict[tuple[int, int, str, Inner], formulas.Block] = {}
        self._kernel = job.attention_form.kernel
        self._passes: dict[tuple[object, ...], tuple[float, float, float, float]] = {}
        self._bounds: dict[tuple[int, int, int, int, int, bool], float] = {}

    def loads(self, pipe: int) -> tuple[Load, ...]:
        """The ranks that matter: the first, one between, and the last; the fullest and the busiest are among them."""
        if pipe not in self._loads:
            self._loads[pipe] = self._cut(pipe)
        return self._loads[pipe]

    def _cut(self, pipe: int) -> tuple[Load, ...]:
        shape = self.job.shape
        if pipe == 1:
            return (self._load(0, shape.layers, True, True),)
        usual, last = balanced_blocks(shape.layers, shape.head_forward_flops(1) / shape.layer_forward_flops(1), pipe)
        between = (self._load(1, usual, False, False),) if pipe > 2 else ()
        return (self._load(0, usual, True, False), *between, self._load(pipe - 1, last, False, True))

    def _load(self, rank: int, blocks: float, first: bool, last: bool) -> Load:
        shape = self.job.shape
        params = blocks * shape.layer_params()
        params += shape.embedding_params() if first else 0
        params += shape.head_params() if last else 0
        params += shape.hidden * shape.vocab if last and not first and shape.tied else 0
        tables = first + (last and not (first and shape.tied))
        return Load(rank, blocks, first, last, tables, params)

    def params(self, grid: GridShape, load: Load) -> float:
        """Parameters of a rank on each of its devices, with the zeros that its tables are padded with."""
        padding = load.tables * self.job.shape.hidden * (self._vocab(grid) - self.job.shape.vocab)
        return (load.params + padding) / (grid.x * grid.y * grid.z)

    def _vocab(self, grid: GridShape) -> int:
        """Rows of a table, padded to divide over `y` and `z`."""
        return self.job.shape.padded_vocab(grid.y * grid.z)

    def totals(self, base: Choice, places: Sequence[Place]) -> list[tuple[float, float]]:
        """Bytes of the fullest device and its share of the host's, for `base` with the optimizer's state elsewhere."""
        found, loops = [(0.0, 0.0)] * len(places), base.loops
        of_grid = self._states.setdefault(base.grid, {})
        for load in self.loads(base.grid.pipe):
            activations, gathered, outside = self._backward(base, load)
            activations += gathered
            whole, apart = self._whole_sums(base, load), self._whole_gradients(base, load)
            for at, place in enumerate(places):
                state = of_grid.get((load.rank, place)) or self._state(base.grid, load, place)
                beside = apart or (state.weights if loops else 0.0)
                total = state.device + max(activations + beside + whole, state.later)
                if total > found[at][0]:
                    found[at] = (total, state.host + outside)
        return found

    def memory(self, choice: Choice) -> Memory:
        """The fullest device's bytes."""
        return max((self._memory(choice, load) for load in self.loads(choice.grid.pipe)), key=lambda one: one.total)

    def _memory(self, choice: Choice, load: Load) -> Memory:
        state = self._state(choice.grid, load, choice.place)
        activations, gathered, outside = self._backward(choice, load)
        beside = self._whole_gradients(choice, load) or (state.weights if choice.loops else 0.0)
        beside += self._whole_sums(choice, load)
        buffers = beside + max(0.0, state.later - activations - gathered - beside)
        own = (state.weights, state.gradients, state.optimizer)
        return Memory(*own, activations, gathered, buffers, state.host + outside)

    def _whole_gradients(self, choice: Choice, load: Load) -> float:
        """Bytes of a microbatch's gradients of weights that were gathered for a step, beside the sums of those before.

        Else a microbatch's gradients need as much as the weights, in whose dtype they come; with one microbatch they
        are the sums, and a pipeline adds them up one by one.
        """
        if choice.once and choice.grid.z > 1:
            return self.params(choice.grid, load) * choice.grid.z * self._item
        return 0.0

    def _whole_sums(self, choice: Choice, load: Load) -> float:
        """Bytes that sums of gradients need beside the device's own shards where they are scattered once a step."""
        if not choice.once:
            return 0.0
        return self.params(choice.grid, load) * (choice.grid.z - 1) * self.job.accumulate

    def _backward(self, choice: Choice, load: Load) -> tuple[float, float, float]:
        """Bytes of activations, of gathered weights, and on the host, when a microbatch's passes need the most.

        That is at the head, in a block's backward pass, or in that of the lookup. What a program of all layers has of
        gradients grows meanwhile: none at the head, all but those of the lookup's table in the blocks.
        """
        shape, grid, item = self.job.shape, choice.grid, self._item
        kept, working, head, outside = self._activations(choice, load)
        split, whole = grid.x * grid.y, grid.pipe == 1
        table = shape.hidden * self._vocab(grid) / split
        tied, tables = self._tables(choice, load, table * item)
        gathered = self._gathered(choice, load) + tied
        block = kept + working + gathered
        block -= _FP32 * table / grid.z if whole and not shape.tied else 0.0
        head *= load.last
        if load.last:
            if not shape.tied and grid.z > 1:  # its weights beside all logits, or its gradient too beside the logits'
                tokens = choice.sequences(self.job.batch) * shape.seq_len
                logits = tokens * self._vocab(grid) / grid.y * _FP32
                parts = self._in_parts(tokens, grid)
                head = table * item + (head if parts else max(head, head - 2 * logits + table * item))
            head += kept
            head += gathered if choice.activations == "none" else 0.0
            head -= _FP32 * self.params(grid, load) if whole else 0.0
        # A lookup's gradient is scattered into zeros, whole over `z`; a reduce-scatter sends a copy.
        lookup = _FP32 * table * (1 if grid.z == 1 else 2) if load.first and whole else 0.0
        most = max(block, head, lookup)
        gathered = min(gathered, most)
        return most - gathered, gathered + tables, outside

    def _tables(self, choice: Choice, load: Load, table: float) -> tuple[float, float]:
        """Bytes of a tied table's gradient that waits for the table's second use, and of tables gathered beforehand.

        A loop over microbatches gathers its tables once, before it.
        """
        tied = self.job.shape.tied
        if choice.grid.z == 1:
            return 0.0, 0.0
        count = (1 if tied else 2) if choice.loops else 0
        return (table if tied and (load.first or load.last) else 0.0), count * table

    def _gathered(self, choice: Choice, load: Load) -> float:
        """Bytes of weights gathered over `z`: those of all blocks where they are kept, else of one with its gradients.

        A pipeline's programs keep none of them for one another.
        """
        grid, item = choice.grid, self._item
        block = self._layer / (grid.x * grid.y)
        if grid.z == 1:  # a loop over layers reads a copy of one layer's
            return block * _FP32 if grid.pipe == 1 and choice.activations != "none" else 0.0
        if choice.activations == "none" and grid.pipe == 1:
            return load.blocks * block * item
        if not choice.again and grid.pipe == 1:
            return (load.blocks + 1) * block * item
        return formulas.gathered_weights(block, item)

    def _state(self, grid: GridShape, load: Load, place: Place) -> State:
        """Model state of a rank's devices, the optimizer's in such a place."""
        of_grid, key = self._states.setdefault(grid, {}), (load.rank, place)
        if key not in of_grid:
            of_grid[key] = self._placed(grid, load, *place)
        return of_grid[key]

    def _placed(self, grid: GridShape, load: Load, offload: bool, zero: int) -> State:
        job, params, replicas = self.job, self.params(grid, load), grid.data if zero else 1
        device = formulas.device_state(
            params, job.precision, accumulate=job.accumulate, offload=offload, replicas=replicas
        )
        host = formulas.host_state(params, job.precision, offload=offload, replicas=replicas)
        later = formulas.streamed_state(min(job.bucket, params / replicas), job.precision) if offload else 0.0
        reduction = formulas.bucket_buffers(params, job.bucket, job.accumulate) if grid.data > 1 else 0.0
        if grid.pipe > 1 and replicas > 1:  # a program of its own takes the sums and gives a part of the gradients
            reduction += params / replicas * job.accumulate
        later = max(later, reduction)
        optimizer = device.master + device.moments
        return State(device.weights, device.gradients, optimizer, device.total, host.total, later)

    def _activations(self, choice: Choice, load: Load) -> tuple[float, float, float, float]:
        """As `_kept`, worked out once for all grids that divide `data` times `z` differently."""
        grid, each = choice.grid, (choice.microbatches, choice.virtual_stages, choice.activations, choice.in_flight)
        inner = self.job.inner(grid, choice.activations)  # which `z` decides too
        key = (grid.pipe, grid.batch_shards, grid.y, grid.x, self._vocab(grid), inner, *each, load.rank)
        if key not in self._passes:
            self._passes[key] = self._kept(choice, load)
        return self._passes[key]

    def _kept(self, choice: Choice, load: Load) -> tuple[float, float, float, float]:
        """Bytes that microbatches in flight keep, that a backward pass adds at work, that the head adds, on the host.

        What a policy computes again is one block's where one program loops over layers. In a pipeline it is all that a
        group of layers holds (`schedule.groups`), from its input on: its forward pass is run again as a whole. Under
        `none` a stage keeps what no elementwise operation gives, and of the head one array of logits, or the gradients
        of a loss in parts. Where a weight gradient waits, a stage keeps what its products read in place of that, but
        the first one, which has no input gradient to be ahead of.
        """
        block, shape = self._block(choice.grid, choice.activations), self.job.shape
        tokens = choice.sequences(self.job.batch) * shape.seq_len
        columns = self._vocab(choice.grid) // choice.grid.y
        head = formulas.head_activations(shape, choice.grid.x, columns, self._item, tokens)
        scores = max(0.0, self._scores(choice) - tokens * block.spare)
        if choice.grid.pipe == 1:
            kept = load.blocks * block.kept
            return tokens * kept, tokens * block.working + scores, head, tokens * load.blocks * block.host
        live, stages = self.live(choice, load.rank), choice.virtual_stages
        late = self._late(choice, load.rank) / stages
        logits = float(columns) if load.last else 0.0
        if self._in_parts(tokens, choice.grid):  # gradients are handed over in their place: the weight's, in float32
            logits *= shape.hidden / choice.grid.x / tokens
        layers = load.blocks / stages
        groups = group_count(layers)
        together = layers if groups == 1 else group_size(int(layers))
        inputs = stages * groups - (load.first and stages * groups == 1) + (load.last and groups > 1)
        entering = inputs * block.entry
        host, working = (live * entering if block.host else 0.0), block.working
        if choice.activations == "none":
            one = load.blocks * (block.kept - block.shown)
            kept = live * one + (live - 1.0) * logits * (self._item if late and stages == 1 else _FP32)
            working += block.shown
            working += together * block.released if late and entering else 0.0
        else:
            one = load.blocks * max(0.0, block.kept - block.entry) + entering - host / live
            kept = live * one
            working += (together - 1.0) * block.again
        if late:
            behind = (stages - 1.0) / stages if load.first else 1.0
            kept += late * behind * max(0.0, load.blocks * block.waiting - one)
            if choice.activations != "none":
                kept += (late - 1.0) * logits * self._item
            working += logits * self._item
        return tokens * kept, tokens * working + scores, head, tokens * host

    def _in_parts(self, tokens: int, grid: GridShape) -> bool:
        """Whether the loss runs in parts of a device's tokens."""
        return loss_chunk(tokens, self._vocab(grid) // grid.y) < tokens

    def _block(self, grid: GridShape, activations: formulas.Policy) -> formulas.Block:
        """Bytes a token needs in a block."""
        inner = self.job.inner(grid, activations)
        key = (grid.x, grid.y, activations, inner)
        if key not in self._blocks:
            job, where = self.job, (grid.x, grid.y, self._item)
            split = job.sequence_parallel and grid.y > 1
            how = (job.shape, *where, activations, self._kernel)
            self._blocks[key] = formulas.block_activations(*how, sequence_parallel=split, inner=inner)
        return self._blocks[key]

    def _scores(self, choice: Choice) -> float:
        """Bytes of scores at work in a block's backward pass."""
        job, grid = self.job, choice.grid
        over = grid.y * grid.x if job.inner(grid, choice.activations).attention else grid.y
        heads = job.shape.heads // over * choice.sequences(job.batch)
        return scores_bytes(self._kernel, job.machine.device.platform, heads, job.shape.seq_len)

    def live(self, choice: Choice, rank: int) -> float:
        """Microbatches whose activations a rank keeps at once."""
        if choice.grid.pipe == 1:
            return 1.0
        split = self.job.splits(choice.activations)
        key = (choice.grid.pipe, choice.microbatches, choice.virtual_stages, rank, choice.in_flight, split)
        if key not in self._bounds:
            bound = live_bound(self.job.policy, Layout(*key[:3]), rank, choice.in_flight, split)
            self._bounds[key] = bound / choice.virtual_stages
        return self._bounds[key]

    def _late(self, choice: Choice, rank: int) -> int:
        """Pairs of stage and microbatch that may wait on a rank for their weight gradient alone."""
        layout = Layout(choice.grid.pipe, choice.microbatches, choice.virtual_stages)
        return waiting_bound(self.job.policy, layout, rank, choice.in_flight, self.job.splits(choice.activations))


def balanced_blocks(layers: int, head: float, pipe: int) -> tuple[float, float]:
    """Blocks of the busiest rank and of the last one, which also has the head, `head` blocks long.

    Stages are cut at halves of blocks.
    """
    usual = ceil(2 * (layers + head) / pipe) / 2
    last = max(0.0, min(int(2 * (usual - head)) / 2, layers - (pipe - 1) * 0.5))
    return max(ceil(2 * (layers - last) / (pipe - 1)) / 2, 0.5), last
