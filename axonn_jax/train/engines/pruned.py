"""Pruned state of an engine, read from dense arrays one by one, so that only one is in memory in both forms."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.tree_util import tree_map_with_path
from optax import GradientTransformation

from axonn_jax.checkpoint.naming import MASKS, PARAMS, State, shapes
from axonn_jax.errors import UserError
from axonn_jax.memory.host_arrays import joined
from axonn_jax.memory.optimizer_traits import check_offload, check_update, owner
from axonn_jax.models.protocol import Model
from axonn_jax.pruned.config import PruneConfig
from axonn_jax.pruned.layout import PrunedArray, PrunedLayout
from axonn_jax.pruned.prune import KeptEntries
from axonn_jax.tensor.params import Params
from axonn_jax.train.config import MemoryConfig


def check_optimizer(
    optimizer: GradientTransformation, model: Model, params: Params, memory: MemoryConfig, prune: PruneConfig
) -> None:
    """Raise ``UserError`` where an optimizer asks for more than a step has, or offload or pruning of it at a time.

    Of `params` shapes are enough.
    """
    check_update(optimizer, params)
    if memory.offload != "none":
        check_offload(optimizer, "memory.offload = optimizer", params)
    if not prune.prunes:
        return
    if not model.layer_period:
        raise UserError("prune.density", prune.density, "1 with a model other than a Transformer")
    if not check_offload(optimizer, "prune.density below 1", params):
        accepted = "one that treats every element by itself where prune.density is below 1"
        raise UserError("optimizer", "a transformation that looks at whole parameters", accepted)


def dense_forms(layout: PrunedLayout, positions: Mapping[str, Any], tree: Any) -> Any:
    """A tree of state by parameters' names with a `PrunedArray` for each compressed array; nothing is copied."""

    def form(path: Any, leaf: Any) -> Any:
        name = owner(path, layout.shapes)
        return leaf if name is None or not leaf.shape else PrunedArray(layout, name, leaf, positions[name])

    return tree_map_with_path(form, tree)


def mask_forms(layout: PrunedLayout, positions: Mapping[str, Any]) -> dict[str, PrunedArray]:
    """Masks by name, of bytes that are 1 where an entry is kept."""
    return {name: PrunedArray(layout, name, None, positions[name]) for name in layout.shapes}


def compressed_state(state: State, kept: KeptEntries) -> State:
    """A dense state of which from now on some entries are kept; uses it up, one array after another."""
    out: State = {}
    for name, value in state.items():
        own = next((param for param in kept.positions if name.endswith(f".{param}")), None)
        out[name] = value if own is None else kept.compressed({own: joined(value)}, used_up=True)[own]
    return out


def read_pruned(
    state: State,
    read: Callable[[State], State],
    wanted: Callable[[str], bool],
    make_masks: Callable[[Params], Params],
    keep: Callable[[Params], KeptEntries],
) -> tuple[State, KeptEntries]:
    """Free the wanted arrays of a state, read and compress them; return the state and its kept entries.

    Masks are those read, or else made of the weights by `make_masks`, for which all weights are on the devices at once.
    Of the other arrays the kept entries stay.
    """
    asked = shapes({name: value for name, value in state.items() if wanted(name)})
    for name in asked:
        state[name].delete()
    read_before: State = {}

    def one(name: str) -> jax.Array:
        return read_before.pop(name) if name in read_before else read({name: asked[name]})[name]

    compressed = {name: value for name, value in state.items() if isinstance(value, PrunedArray)}
    masked = [name for name in asked if name.startswith(MASKS)]
    if masked:
        masks = {name.removeprefix(MASKS): one(name).astype(bool) for name in masked}
    else:
        dense = {}
        for name in (name for name in compressed if name.startswith(PARAMS)):
            read_before[name] = one(name) if name in asked else state[name].joined()
            dense[name.removeprefix(PARAMS)] = read_before[name]
        masks = make_masks(dense)
        dense.clear()
    kept = keep(masks)
    new = read({name: want for name, want in asked.items() if name not in compressed})
    for name, value in compressed.items():
        if not name.startswith(MASKS):
            dense_array = one(name) if name in asked or name in read_before else value.joined()
            new |= {name: kept.compressed({value.name: dense_array}, used_up=True)[value.name]}
    return {name: new.get(name, value) for name, value in state.items() if not name.startswith(MASKS)}, kept
