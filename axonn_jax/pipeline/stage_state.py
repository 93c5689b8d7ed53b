"""State of a pipe rank: the store of its own parameters, made alone."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from axonn_jax.memory.offload import OffloadedOptimizer
from axonn_jax.memory.optimizer_state import DeviceOptimizer
from axonn_jax.memory.precision import Precisions
from axonn_jax.memory.zero import split_over_replicas
from axonn_jax.models.stacked import Stack, unstacked
from axonn_jax.pruned.layout import PrunedLayout
from axonn_jax.pruned.prune import Pruner
from axonn_jax.state.param_store import ParamStore, Placement
from axonn_jax.tensor.params import Params, Specs, SplitModule, split_module


@dataclass(frozen=True)
class StateOptions:
    """Options of every pipe rank's state."""

    optimizer: optax.GradientTransformation
    precisions: Precisions
    bucket: int
    """Elements that are communicated together."""
    offload: bool
    """True if optimizer state is in host memory."""
    resident: int | None
    """Bytes of such state that stay on each device; None: those that the first update leaves room for."""
    split: bool
    """True if masters and optimizer state are split over `data`."""
    chooser: Callable[[Specs, Mesh], Pruner] | None = None
    """Function of a rank's layouts and mesh that returns the choice of its parameters' forms; None: plain arrays."""
    progress: Callable[[str], None] = lambda what: None
    """Callback with a line of text for each step of a long update."""


def stage_store(
    parts: SplitModule, names: Sequence[str], shared: Collection[str], mesh: Mesh, options: StateOptions, model: Any
) -> ParamStore:
    """Return the store of a pipe rank's parameters.

    Args:
        parts: The whole model, with abstract parameters.
        names: Parameters of the rank.
        shared: Parameters that other ranks have too; these have programs of their own, the same on all ranks, so that
            copies stay equal to the bit.
        mesh: Mesh of the rank.
        options: Options of the state.
        model: The model, or a function that makes it; then only the rank's parameters are made.
    """
    specs = {name: parts.specs[name] for name in names}
    own = parts._replace(params={name: parts.params[name] for name in names}, specs=specs)
    sizes = {name: p.shape for name, p in own.trained.items()}
    trained = {name: specs[name] for name in sizes}

    def build(forms: PrunedLayout | None) -> tuple[Stack, Placement]:
        held = sizes if forms is None else sizes | dict(forms.value_shapes)
        state_specs = split_over_replicas(held, trained, mesh) if options.split else trained
        settings = (options.precisions, options.bucket, forms)
        update = DeviceOptimizer(options.optimizer, mesh, held, trained, state_specs, *settings)
        if not options.offload or not sizes:  # all of this rank's weights may be frozen
            return unstacked(own), update
        return unstacked(own), OffloadedOptimizer(
            update, resident=options.resident, shared=shared, progress=options.progress
        )

    chooser = None if options.chooser is None else options.chooser(specs, mesh)
    owned = not isinstance(model, nnx.Module)
    dtype = options.precisions.compute
    return ParamStore(_made(model, specs, mesh, shared), options.optimizer, build, chooser, owned=owned, dtype=dtype)


def _made(model: Any, specs: Specs, mesh: Mesh, shared: Collection[str]) -> Params:
    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    if isinstance(model, nnx.Module):
        params = split_module(model).params
        return jax.device_put({name: params[name] for name in shardings}, shardings)

    def make(layouts: dict[str, NamedSharding]) -> Params:
        def chosen() -> Params:
            made = split_module(model()).params
            return {name: made[name] for name in layouts}  # XLA drops unused results

        return jax.jit(chosen, out_shardings=layouts)()  # type: ignore[no-any-return]

    made = make({name: layout for name, layout in shardings.items() if name not in shared})
    made |= make({name: shardings[name] for name in sorted(shared)}) if shared else {}
    return {name: made[name] for name in shardings}
