"""Memory of a candidate on devices and hosts, rank by rank."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.ops.language import FLOAT32
from axonn_jax.core.options import Activations
from axonn_jax.pipe.schedule.partition import group_count, group_size
from axonn_jax.planning import memory as formulas
from axonn_jax.planning.block_memory import BlockBytes, block_activations, mean_block
from axonn_jax.planning.rank_state import Load, Ranks, RankState
from axonn_jax.planning.request import Candidate, MemoryUse, PlanRequest, StatePlacement


class MemoryModel:
    """Memory of one request's candidates; shared results are computed once."""

    def __init__(self, request: PlanRequest):
        self.request, self.ranks = request, Ranks(request)
        self._item = formulas.itemsize(request.precision)
        self._trained = not request.lora.adapts
        """True if the model's own weights are trained, and not adapters."""
        self._kernel = request.attention_form.kernel
        self._block = cache(self._block_bytes)
        self._passes: dict[tuple[object, ...], tuple[float, float, float, float]] = {}

    def totals(self, base: Candidate, placements: Sequence[StatePlacement]) -> list[tuple[float, float]]:
        """Return the bytes of the fullest device, and its share of host bytes, for `base` under each placement."""
        peaks = [(0.0, 0.0)] * len(placements)
        cached_states = self.ranks.states(base.grid)
        for load in self.ranks.loads(base.grid.pipe):
            activations, gathered, outside = self._backward(base, load)
            activations += gathered
            full_grads, sum_shards = self._once_gathered(base, load)
            # Activations do not depend on the placement, so one backward pass is shared by all placements.
            for index, placement in enumerate(placements):
                state = cached_states.get((load.rank, placement)) or self.ranks.state(base.grid, load, placement)
                microbatch_grads = full_grads or self._looped(base, state)
                # Activations are freed before the update, so only the larger of the two phases counts.
                total = state.device + max(activations + microbatch_grads + sum_shards, state.update_buffers)
                if total > peaks[index][0]:
                    peaks[index] = (total, state.host + outside)
        return peaks

    def memory(self, candidate: Candidate) -> MemoryUse:
        """Return the memory use of the fullest device."""
        return max(
            (self._memory(candidate, load) for load in self.ranks.loads(candidate.grid.pipe)), key=lambda use: use.total
        )

    def _memory(self, candidate: Candidate, load: Load) -> MemoryUse:
        state = self.ranks.state(candidate.grid, load, candidate.placement)
        activations, gathered, outside = self._backward(candidate, load)
        full_grads, sum_shards = self._once_gathered(candidate, load)
        transient = (full_grads or self._looped(candidate, state)) + sum_shards
        buffers = transient + max(0.0, state.update_buffers - activations - gathered - transient)
        use = MemoryUse(*state[:3], activations, gathered, buffers, state.host + outside)
        return replace(use, staying=self.staying(state.host, use.total))

    def _looped(self, candidate: Candidate, state: RankState) -> float:
        """Return the bytes of one microbatch's gradients that a loop over microbatches keeps next to their sums."""
        if not candidate.loops:
            return 0.0
        return state.weights if self._trained else state.gradients

    def staying(self, host: float, device: float) -> float:
        """Return how many of the `host` bytes of offloaded state stay on a device that already uses `device` bytes.

        A run uses half of the remaining memory for them (`memory.report.room`), and none on CPUs.
        """
        machine = self.request.machine.device
        return 0.0 if computes_on_cores(machine.platform) else min(host, max(0.0, machine.program_bytes - device) / 2)

    def _once_gathered(self, candidate: Candidate, load: Load) -> tuple[float, float]:
        """Return the bytes of unsharded gradients and of the sums' extra shards if weights are gathered once a step.

        The sums then cover more than the device's local shards, next to one microbatch's gradients. Otherwise the
        gradients need as much as the weights, whose dtype they have (`_looped`); with one microbatch they are the sums,
        and a pipeline adds them up one by one.
        """
        if not candidate.once:
            return 0.0, 0.0
        params, z = self.ranks.params(candidate.grid, load) * self._trained, candidate.grid.z
        return (params * z * self._item if z > 1 else 0.0), params * (z - 1) * self.request.gradient_item

    def _backward(self, candidate: Candidate, load: Load) -> tuple[float, float, float]:
        """Return the bytes of activations, of gathered weights, and on the host at the peak of a microbatch.

        The peak is at the head, in a block's backward pass, or in the embedding lookup's. In a program of all layers
        gradients accumulate meanwhile: none exist yet at the head, and all but the lookup table's exist in the blocks.
        """
        shape, grid, item = self.request.shape, candidate.grid, self._item
        saved, working, head, outside = self._activations(candidate, load)
        split, unpipelined = grid.x * grid.y, grid.pipe == 1
        table = shape.hidden * self.ranks.vocab(grid) / split
        tied, tables = self._tables(candidate, load, table * item)
        gathered = self._gathered(candidate, load) + tied
        block = saved + working + gathered
        block -= FLOAT32 * table / grid.z if unpipelined and not shape.tied and self._trained else 0.0
        head *= load.last
        if load.last:
            head += saved + (table * item if not shape.tied and grid.z > 1 else 0.0)
            head += gathered if candidate.activations == "none" else 0.0
            head -= FLOAT32 * sum(self.ranks.trained(grid, load)) if unpipelined else 0.0
        # The lookup's gradient is scattered into zeros of the full table over `z`; its reduce-scatter needs a copy.
        lookup = FLOAT32 * table * (1 if grid.z == 1 else 2) if load.first and unpipelined and self._trained else 0.0
        most = max(block, head, lookup)
        gathered = min(gathered, most)
        return most - gathered, gathered + tables, outside

    def _tables(self, candidate: Candidate, load: Load, table: float) -> tuple[float, float]:
        """Return the bytes of a tied table's gradient until the table's second use, and of tables gathered ahead.

        A loop over microbatches gathers its tables once, before the loop.
        """
        tied = self.request.shape.tied
        if candidate.grid.z == 1:
            return 0.0, 0.0
        count = (1 if tied else 2) if candidate.loops else 0
        return (table if tied and self._trained and (load.first or load.last) else 0.0), count * table

    def _gathered(self, candidate: Candidate, load: Load) -> float:
        """Return the bytes of weights gathered over `z`: of all blocks if they stay, else of one with its gradients.

        A pipeline's programs do not keep gathered weights for one another. Gradients of experts are accumulated in a
        loop and copied after it.
        """
        grid, item, unpipelined = candidate.grid, self._item, candidate.grid.pipe == 1
        experts = self.ranks.experts / (grid.x * grid.y * grid.expert)
        block = self.ranks.layer / (grid.x * grid.y) + experts
        routed_block = experts * self.request.shape.layers / max(self.request.shape.routed_layers, 1)
        looped = routed_block * item * (1 if grid.z == 1 else 2 / grid.z) * self._trained
        if grid.z == 1:  # a loop over layers reads a copy of one layer's
            recomputes = unpipelined and candidate.activations != "none"
            return looped + (block - experts + routed_block) * (FLOAT32 if self._trained else item) * recomputes
        if candidate.activations == "none" and unpipelined:
            return load.blocks * block * item + looped
        if candidate.keeps_weights and unpipelined:
            return (load.blocks + 1) * block * item + looped
        return (1 + self._trained) * (block - experts + routed_block) * item + looped

    def _activations(self, candidate: Candidate, load: Load) -> tuple[float, float, float, float]:
        """Return `_activation_bytes`, cached across grids that only split `data` times `z` differently."""
        grid, settings = candidate.grid, (candidate.pipeline, candidate.activations, self.request.schedule(candidate))
        # The key has no `z`, but the communication that it influences.
        comm = self.request.comm(grid, candidate.activations)
        key = (grid.batch_shards, grid.expert, grid.y, grid.x, self.ranks.vocab(grid), comm, *settings, load.rank)
        if key not in self._passes:
            self._passes[key] = self._activation_bytes(candidate, load)
        return self._passes[key]

    def _activation_bytes(self, candidate: Candidate, load: Load) -> tuple[float, float, float, float]:
        """Return the bytes saved by microbatches in flight, used by a backward pass, added by the head, on the host.

        One program that loops over layers recomputes one block at a time. A pipeline recomputes a group of layers
        (`schedule.partition`), from the group's input on, because it repeats the forward pass as a whole. Under `none`
        a stage saves the values that elementwise operations cannot restore, and the head's gradients. While a weight
        gradient is deferred, a stage saves the inputs of its products instead, except on the first stage, which has no
        input gradient to run ahead of.
        """
        grid, shape = candidate.grid, self.request.shape
        comm = self.request.comm(grid, candidate.activations)
        block = self._block(grid.expert, grid.x, grid.y, candidate.activations, comm)
        tokens = candidate.sequences(self.request.batch) * shape.seq_len
        columns = self.ranks.vocab(grid) // grid.y
        head = formulas.head_activations(shape, grid.x, columns, self._item, tokens, trained=self._trained)
        heads = shape.heads // (grid.y * grid.x if comm.attention else grid.y) * candidate.sequences(self.request.batch)
        scores = formulas.scores_bytes(self._kernel, self.request.machine.device.platform, heads, shape.seq_len)
        scores = max(0.0, scores - tokens * block.spare)
        if grid.pipe == 1:
            saved = load.blocks * block.saved
            return tokens * saved, tokens * block.working + scores, head, tokens * load.blocks * block.host
        live, stages = self.live(candidate, load.rank), candidate.virtual_stages
        # (stage, microbatch) pairs whose only pending task is the weight gradient.
        late = self.request.schedule(candidate).waiting(candidate.pipeline, load.rank) / stages
        # The head hands over its weight gradient in float32; this is its number of elements per token.
        handed = shape.hidden / grid.x * columns / tokens if load.last and self._trained else 0.0
        layers = load.blocks / stages
        groups = group_count(layers)
        together = layers if groups == 1 else group_size(int(layers))
        inputs = stages * groups - (load.first and stages * groups == 1) + (load.last and groups > 1)
        entering = inputs * block.entry
        host, working = (live * entering if block.host else 0.0), block.working
        if candidate.activations == "none":
            per_microbatch = load.blocks * (block.saved - block.shown)
            saved = live * per_microbatch + (live - 1.0) * handed * (self._item if late and stages == 1 else FLOAT32)
            working += block.shown
            working += together * block.released if late and entering else 0.0
        else:
            per_microbatch = load.blocks * max(0.0, block.saved - block.entry) + entering - host / live
            saved = live * per_microbatch
            working += (together - 1.0) * block.recomputed
        if late:
            behind = (stages - 1.0) / stages if load.first else 1.0
            saved += late * behind * max(0.0, load.blocks * block.waiting - per_microbatch)
            if candidate.activations != "none":
                saved += (late - 1.0) * handed * self._item
            working += handed * self._item
        return tokens * saved, tokens * working + scores, head, tokens * host

    def _block_bytes(self, expert: int, x: int, y: int, activations: Activations, comm: BlockComm) -> BlockBytes:
        """Return the bytes that a token needs in a block."""
        kinds = []
        for layer, count in self.request.shape.layer_kinds():
            block = block_activations(
                self.request.shape, x, y, self._item, activations, self._kernel, comm,
                layer=layer, expert=expert, training=self.request.moe, lora=self.request.lora,
            )  # fmt: skip
            kinds.append((block, count))
        return mean_block(kinds)

    def live(self, candidate: Candidate, rank: int) -> float:
        """Return the number of microbatches whose activations a rank keeps at the same time."""
        if candidate.grid.pipe == 1:
            return 1.0
        return self.request.schedule(candidate).live(candidate.pipeline, rank) / candidate.virtual_stages
