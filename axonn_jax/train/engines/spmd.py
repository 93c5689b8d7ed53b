"""SPMD engine: one compiled program a step on one mesh, parameters and optimizer state donated to it."""

import contextlib
from collections.abc import Callable
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

from axonn_jax.backend.cpu_allocator import TemporariesInPlace
from axonn_jax.checkpoint.naming import MASKS, State, flatten, unflatten, unflatten_scale
from axonn_jax.distributed.bounded import InFlight
from axonn_jax.grid import Grid
from axonn_jax.memory.host_arrays import joined
from axonn_jax.memory.report import all_finite, counted, report
from axonn_jax.models.protocol import check_model
from axonn_jax.models.vocabulary import fit_vocabulary, padding_of, without_padding
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.pruned.prune import KeptEntries, keep, make_masks, prunable
from axonn_jax.tensor.params import Params, placed, shapes_of, split_module
from axonn_jax.train.config import MemoryConfig, TensorConfig
from axonn_jax.train.engines.engine import BatchShards, read_anew
from axonn_jax.train.engines.offloaded import OffloadedStep
from axonn_jax.train.engines.program import exposed
from axonn_jax.train.engines.pruned import check_optimizer, compressed_state, dense_forms, mask_forms, read_pruned
from axonn_jax.train.engines.scan_layers import stack_state, unstack_params, unstack_state
from axonn_jax.train.engines.step import StepMetrics, TrainState, build_step


class SpmdEngine:
    """Engine of a model that lies whole on one mesh; `engine.Engine` describes the members.

    A step dispatches and returns: its metrics are device values, and at most two steps are in flight.
    """

    def __init__(
        self,
        model: nnx.Module | Callable[[], nnx.Module],
        optimizer: optax.GradientTransformation,
        grid: Grid,
        *,
        microbatches: int,
        clip: float,
        seed: int,
        memory: MemoryConfig,
        tensor: TensorConfig,
        prune: PruneConfig = PruneConfig(),  # noqa: B008 (frozen)
    ):
        owned = not isinstance(model, nnx.Module)
        if not isinstance(model, nnx.Module):
            model = model()
        model = fit_vocabulary(model, grid.shape)
        self._padding = padding_of(model)
        checked = check_model(model)
        checked.check_grid(grid.shape)
        self.grid, self.optimizer, self.batches = grid, optimizer, BatchShards(grid, microbatches)
        made, self._prune, self._offloads = split_module(model), prune, memory.offload != "none"
        self._specs, self._prunable = made.specs, prunable(made, checked.layer_list)
        check_optimizer(optimizer, checked, made.params, memory, prune)
        parts = shapes_of(made)  # no array of the model's may live as long as the engine
        self._build = partial(build_step, parts.merge(parts.params), parts, optimizer, grid, clip, memory, tensor)
        self._key = jax.random.key(seed) if checked.drops_out else None
        params, kept = made.params, None
        if prune.prunes and not prune.later:
            params = placed(made.params, made.specs, grid.mesh)
            kept = self._kept(self._make_masks(params))
            params = kept.compressed(params, used_up=owned)
        self._begin(kept)
        params = self._stack.shard(params, grid.mesh, used_up=owned)
        positions = self._stack.join(kept.positions, grid.mesh, used_up=True) if kept else {}
        del made  # stacked arrays are freed kind by kind
        state = self.update.start(params, positions, owned=owned)
        self.train_state = TrainState(state, self._step.first_scale())
        self.steps_done = 0
        self._in_step = False

    def _begin(self, kept: KeptEntries | None) -> None:
        """Make the programs of a step of which these entries are trained; nothing is compiled."""
        self._layout = kept and kept.layout
        self._stack, self.program, self._step = self._build(self._layout)
        self.precisions, self.parts = self._step.precisions, self._stack.per_layer
        self.offloaded = OffloadedStep(self._step, self.program) if self._offloads else None
        self.update = self.offloaded.update if self.offloaded else self._step.update
        self._compiled: dict[tuple[int, ...], jax.stages.Compiled] = {}
        self._temporaries: dict[tuple[int, ...], TemporariesInPlace] = {}
        self._last: StepMetrics | None = None
        self._loss = jax.jit(self.program.loss)
        self._in_flight = InFlight()

    def _kept(self, masks: Params) -> KeptEntries:
        return keep(masks, self._specs, self.grid.mesh, multiple=self.grid.shape.replicas)

    @property
    def params(self) -> Params:
        """The float32 weights by name, however layers are run; of scanned ones copies, with offload in host memory."""
        return joined(self._masters)  # type: ignore[no-any-return]

    @property
    def opt_state(self) -> Any:
        """The optimizer's state for `params`; of scanned layers, copies."""
        return joined(self._opt_state)

    @property
    def _masters(self) -> Params:
        """Masters by name; an array offloaded in parts is a `CutArray`, a scanned layer's a `LayerSlice`."""
        return self._forms(unstack_params(self._stack, self.update.masters(self.train_state.model)))

    @property
    def _opt_state(self) -> Any:
        """Optimizer state, in the forms of `_masters`."""
        return self._forms(unstack_state(self.optimizer, self._stack, self.update.opt_state(self.train_state.model)))

    def _forms(self, tree: Any) -> Any:
        """Return a tree of state with compressed arrays as `PrunedArray`."""
        return tree if self._layout is None else dense_forms(self._layout, self._positions, tree)

    @property
    def _positions(self) -> Params:
        return unstack_params(self._stack, self.train_state.model.positions)

    def step(self, batch: np.ndarray) -> StepMetrics:
        """Dispatch an optimizer step and return once that of the step before the last has ended.

        It waits for this one only where optimizer state is in host memory (`memory.offload`), or the CPU backend has
        large temporaries to free first (`backend.cpu_allocator`). Collectives: `StageProgram.gradients`.
        """
        if self._in_step:
            self._check_whole()
        tokens, key = self.batches.shard(batch), self._step_key(self.steps_done)
        program = self._compile(tokens, key)
        if self.offloaded is None:
            self._temporaries[tokens.shape].wait(self._last)
        run: Callable[..., Any] = program if self.offloaded is None else partial(self.offloaded.run, program)
        self._in_step = True
        # One statement: Ctrl-C comes before all of it or after.
        (self.train_state, metrics), self.steps_done = run(self.train_state, tokens, key), self.steps_done + 1
        self._in_step = False
        if self.offloaded is None:
            self._last = metrics
        return self._in_flight(metrics)  # type: ignore[no-any-return]

    def _check_whole(self) -> None:
        """Undo a step that an exception, such as Ctrl-C, interrupted.

        Raises ``RuntimeError`` if the step had used the state up.
        """
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(self.train_state)):
            raise RuntimeError(
                f"step {self.steps_done + 1} was interrupted while updating the weights; create a new Trainer and load "
                "a checkpoint"
            )
        self._in_step = False

    def compiled_step(self, batch: np.ndarray) -> jax.stages.Compiled:
        """The step's compiled program for batches of this shape; with offload that of the gradients."""
        return self._compile(self.batches.shard(batch), self._step_key(0))

    def _step_key(self, step: int) -> jax.Array | None:
        return None if self._key is None else jax.random.fold_in(self._key, step)

    def _compile(self, tokens: jax.Array, key: jax.Array | None) -> jax.stages.Compiled:
        if tokens.shape not in self._compiled:
            if self.offloaded is None:
                lowered = self._step.jitted().lower(self.train_state, tokens, key)
            else:
                lowered = self.offloaded.measured.lower(
                    self.train_state.model.read, self.train_state.scale, tokens, key
                )
            self._compiled[tokens.shape] = lowered.compile()
            self._temporaries[tokens.shape] = TemporariesInPlace(self._compiled[tokens.shape], self.grid.mesh)
        return self._compiled[tokens.shape]

    def memory(self) -> dict[int, dict[str, Any]]:  # noqa: D102
        arrays = counted(jax.tree.leaves(self.train_state.model), self.grid.mesh.local_devices[0])
        program = next(iter(self._compiled.values()), None)
        return {0: report(self.update.bytes(), arrays, self.grid.mesh, program)}

    def mean_loss(self, batch: np.ndarray) -> tuple[Any, Any]:  # noqa: D102
        return self._loss(self.train_state.model.weights, self.batches.shard(batch))  # type: ignore[no-any-return]

    def finite(self) -> bool:  # noqa: D102
        return all_finite(self.train_state.model)

    def state(self) -> State:  # noqa: D102
        state = flatten(self._masters, self._opt_state, self.train_state.scale)
        if self._layout is not None:
            state |= {MASKS + name: mask for name, mask in mask_forms(self._layout, self._positions).items()}
        return state

    def state_shapes(self) -> dict[str, tuple[int, ...]]:  # noqa: D102
        like: Any = self._stack.per_layer.params
        state = flatten(like, jax.eval_shape(self.optimizer.init, like), self.train_state.scale)
        if self._layout is not None:
            state |= {MASKS + name: like[name] for name in self._layout.shapes}
        return without_padding({name: value.shape for name, value in state.items()}, self._padding)

    def load(self, read: Callable[[State], State], wanted: Callable[[str], bool] = lambda name: True) -> None:
        """Replace the wanted arrays by those that `read` makes for their shapes, types and layouts."""
        if self._layout is None:
            self._take_over(read_anew(self.state(), read, wanted), None)
        else:
            self._take_over(*read_pruned(self.state(), read, wanted, self._make_masks, self._kept))

    def _take_over(self, state: State, kept: KeptEntries | None) -> None:
        """Take a state over, of whose parameters these entries are kept."""
        if kept is not None:
            self._begin(kept)
        like: Any = self._stack.per_layer.params
        params, opt_state = unflatten(state, like, jax.eval_shape(self.optimizer.init, like))
        masters = self._stack.join(params, self.grid.mesh, used_up=True)
        layouts = self._step.update.abstract().optimizer if kept else self.train_state.model.optimizer
        optimizer = stack_state(self._stack, opt_state, layouts, used_up=True)
        positions = self._stack.join(kept.positions, self.grid.mesh, used_up=True) if kept else {}
        model = self.update.restored(masters, optimizer, positions, owned=True)
        self.train_state = TrainState(model, unflatten_scale(state, self.train_state.scale))

    def _make_masks(self, weights: Params) -> dict[str, jax.Array]:
        return make_masks(self._prune, {name: weights[name] for name in self._prunable})

    def masks(self) -> dict[str, jax.Array]:
        """Return masks of the entries that would be kept of the present weights."""
        masters = self._masters
        return self._make_masks({name: joined(masters[name]) for name in self._prunable})

    def prune(self) -> PrunedLayout:
        """Prune the weights and their state by `masks` from now on."""
        kept = self._kept(self.masks())
        self._take_over(compressed_state(self.state(), kept), kept)
        return kept.layout

    @property
    def pruned(self) -> bool:
        """True if only some entries are trained."""
        return self._layout is not None

    @property
    def layout(self) -> PrunedLayout | None:
        """Layout of the pruned parameters, layer by layer; None where nothing is pruned."""
        return self._layout

    @property
    def kept_entries(self) -> tuple[int, int]:
        """Entries of pruned parameters that are trained, and of how many."""
        return (0, 0) if self._layout is None else (self._layout.kept, sum(map(prod, self._layout.shapes.values())))

    @property
    def prunes_later(self) -> bool:
        """True if the run begins densely and is to be pruned."""
        return self._prune.later

    def saving(self) -> contextlib.AbstractContextManager[Callable[[str], None]]:
        """Do nothing: an SPMD process has no heartbeat."""
        return contextlib.nullcontext(lambda what: None)

    def peer_failed(self) -> bool:
        """Return False: jax itself ends a process whose peer is gone."""
        return False

    def explain(self, sequences: int) -> list[str]:
        """Return lines about the communication that nothing hides in a step of so many sequences."""
        missing = [f"overlap: this XLA has no {name}, which is not set" for name in self._step.missing_options()]
        lines = exposed(self.program.sub_batches, self.grid.shape, sequences // self.batches.least)
        return [*lines, *missing]

    def write_timeline(self, directory: Path) -> list[Path]:
        """Write nothing: a step is one program."""
        return []

    def close(self) -> None:
        """Do nothing: there are no threads to end."""
