"""Weights of an engine, copied out or loaded from checkpoints, and the identity of its adapters' base."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import jax
from jax.sharding import NamedSharding

from axonn_jax.core.adapters.checksum import checksum
from axonn_jax.core.adapters.config import IDENTITY, LORA, LoraConfig, StoredLora
from axonn_jax.core.adapters.layers import settings_of
from axonn_jax.core.adapters.stored import adapters_in, adapters_only_error
from axonn_jax.core.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.core.checkpoint.naming import AVERAGE, CARRIED, MASKS, PARAMS, SCALE, State
from axonn_jax.core.checkpoint.restore import Checkpoint, check_model, check_shapes, load, load_averaged
from axonn_jax.core.distributed.host_sync import HostSync, together
from axonn_jax.core.engines.engine import Engine
from axonn_jax.core.engines.pruning import prune_for
from axonn_jax.core.errors import UserError
from axonn_jax.core.experts.upcycle import dense_sources, is_of_router, unused_biases, upcycled
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.vocabulary import padding_of, without_padding
from axonn_jax.core.tensor.params import Params


class HasEngine(Protocol):
    """Object, as a trainer, that an engine runs the steps of."""

    @property
    def engine(self) -> Engine:
        """The engine."""


P = ParamSpec("P")
T = TypeVar("T")
Owner = TypeVar("Owner", bound=HasEngine)


def under_mesh(method: Callable[Concatenate[Owner, P], T]) -> Callable[Concatenate[Owner, P], T]:
    """Run a method under the mesh of its engine's grid, whatever mesh the caller has set."""

    @wraps(method)
    def entered(self: Owner, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.engine.grid.entered():
            return method(self, *args, **kwargs)

    return entered


def shape_of(engine: Engine) -> ModelShape | None:
    """Return the shape of an engine's transformer, or None for any other model."""
    shape = getattr(engine.parts.merge(engine.parts.params), "shape", None)
    return shape if isinstance(shape, ModelShape) else None


def adapters_of(engine: Engine) -> LoraConfig | None:
    """Return the settings of an engine's adapters, or None if all weights are trained."""
    return settings_of(engine.parts.merge(engine.parts.params)) if engine.parts.adapters else None


def copied_model(engine: Engine, params: Params) -> object:
    """Return the user's model with copies of the parameters, on the devices of their stages.

    Raises ``UserError`` if this process does not hold all parameters.
    """
    parts = engine.parts
    if len(params) < len(parts.params):
        counts = f"{len(params)} of {len(parts.params)} parameters here"
        accepted = "a pipeline of one process; else engine.params (parameters here) or trainer.save"
        raise UserError("trainer.model", counts, accepted)

    # Never alias: the next step donates the engine's arrays, and the user's model must outlive it.
    def copy(name: str, value: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(value.sharding.mesh, parts.specs[name]), may_alias=False)

    return engine.merged({name: copy(name, value) for name, value in params.items()})


def full_sizes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Return the global sizes, by checkpoint name, of the model's parameters, without adapters and padding."""
    if not engine.parts.adapters:
        return {name: size for name, size in engine.state_shapes().items() if name.startswith(PARAMS)}
    sizes = {PARAMS + name: p.shape for name, p in engine.parts.frozen.items()}
    return without_padding(sizes, padding_of(engine.parts.merge(engine.parts.params)))


def put_weights(engine: Engine, read: Callable[[State], State], should_load: Callable[[str], bool]) -> None:
    """Replace the arrays that pass `should_load` by those `read` returns, and averages by their loaded parameters.

    Args:
        engine: The engine to load into.
        read: Function from abstract arrays by checkpoint name to arrays.
        should_load: Predicate of checkpoint names; an average is loaded if its parameter is.
    """

    # Averages are read separately: a name is read once, and a parameter may have another layout than its average.
    def read_both(abstract: State) -> State:
        parameter_of = {name: PARAMS + name.removeprefix(AVERAGE) for name in abstract if name.startswith(AVERAGE)}
        averages = read({parameter_of[name]: abstract[name] for name in parameter_of}) if parameter_of else {}
        remaining = read({name: target for name, target in abstract.items() if name not in parameter_of})
        return remaining | {name: averages[parameter] for name, parameter in parameter_of.items()}

    engine.load(
        read_both, lambda name: should_load(PARAMS + name.removeprefix(AVERAGE) if name.startswith(AVERAGE) else name)
    )


def load_base(engine: Engine, read: Callable[[State], State]) -> None:
    """Replace a model's parameters, or with adapters its frozen base, by what `read` returns for checkpoint names."""
    if not engine.parts.adapters:
        put_weights(engine, read, lambda name: name.startswith(PARAMS))
        return

    def read_params(abstract: Mapping[str, object]) -> State:
        arrays = read({PARAMS + name: target for name, target in abstract.items()})
        return {name.removeprefix(PARAMS): value for name, value in arrays.items()}

    for store in engine.stores.values():
        store.frozen.load(read_params)


def take_base(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str) -> None:
    """Load a full model's checkpoint as the frozen base of an engine's adapters.

    Raises ``UserError`` if it is of another model, and ``CorruptCheckpoint`` on all processes if one cannot read it.
    """
    check_model(checkpoint, shape_of(engine), field)
    check_shapes(checkpoint, full_sizes(engine), field, only=PARAMS)
    with together(sync, CorruptCheckpoint):
        load_base(engine, lambda abstract: load_averaged(checkpoint, abstract))


def facts_of(engine: Engine, sync: HostSync, base: str) -> dict[str, object]:
    """Return what a checkpoint stores about adapters: settings, path and checksum of the base; empty without adapters.

    Every process must call it. Collectives: an all-reduce of one number per frozen parameter.
    """
    config = adapters_of(engine)
    if config is None:
        return {}
    identity = {key: getattr(config, key) for key in IDENTITY}
    return {LORA: asdict(StoredLora(**identity, base=base, checksum=_checksum(engine, sync)))}


def _checksum(engine: Engine, sync: HostSync) -> str:
    numbers = {name: number for store in engine.stores.values() for name, number in store.frozen.numbers().items()}
    return checksum(numbers, engine.parts.frozen, sync)


def check_adapters(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str, *, weights_only: bool) -> None:
    """Raise ``UserError`` on all processes if a checkpoint's adapters do not fit an engine's settings and base."""
    stored, config = adapters_in(checkpoint, field), adapters_of(engine)
    path = str(checkpoint.path)
    if stored is None:
        if config is not None and not weights_only:
            raise UserError(field, path, "a checkpoint of adapters, as [lora] asks for; this one is of a whole model")
        return
    if config is None:
        raise adapters_only_error(checkpoint, field)
    for key in IDENTITY:
        if (then := getattr(stored, key)) != (value := getattr(config, key)):
            raise UserError(f"lora.{key}", _shown(value), f"{_shown(then)}, as in {path}")
    if stored.checksum != _checksum(engine, sync):
        theirs = stored.base or "given from Python"
        raise UserError(field, path, f"adapters of this base, by its checksum; theirs was {theirs}")


def _shown(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value


def take(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str, *, weights_only: bool) -> int:
    """Load a valid checkpoint into an engine; return the number of kernels copied to experts.

    Args:
        engine: The engine to load into.
        checkpoint: A valid checkpoint.
        sync: Messages between the run's processes; all must call this.
        field: The setting that named the checkpoint, for messages.
        weights_only: Load only weights, which with `train.ema` are their averages, and not the optimizer state.

    Raises:
        UserError: The checkpoint does not fit the engine.
        CorruptCheckpoint: A process cannot read it; raised on all processes.
    """
    check_adapters(engine, checkpoint, sync, field, weights_only=weights_only)
    if engine.parts.adapters and LORA not in checkpoint.manifest.run:
        take_base(engine, checkpoint, sync, field)
        return 0
    only = (PARAMS, CARRIED) if weights_only else ""
    stored = checkpoint.manifest.arrays
    if not weights_only:
        if checkpoint.averaged != any(name.startswith(AVERAGE) for name in engine.state_shapes()):
            accepted = f"a checkpoint of a run with{'out' * checkpoint.averaged} train.ema, as this one"
            raise UserError(field, str(checkpoint.path), accepted)
        # Prune before comparing names and shapes, since the masks are part of a pruned engine's state.
        prune_for(engine, stored)

    # Loss scale and masks may be missing: runs of another precision, or dense ones, do not have them.
    def should_load(name: str) -> bool:
        return name.startswith(only) and (name in stored or not name.startswith((SCALE, MASKS)))

    names = {name: shape for name, shape in engine.state_shapes().items() if should_load(name)}
    sources = dense_sources(names, {name: array.shape for name, array in stored.items()}) if weights_only else {}
    if biases := unused_biases(sources, stored):
        accepted = f"a dense run with model.bias = none or qkv, as experts have no biases; {biases[0]} is there"
        raise UserError(field, str(checkpoint.path), accepted)
    # A dense checkpoint has no routers, which keep their initial weights.
    if sources:
        unchanged = {name: shape for name, shape in names.items() if name not in sources and not is_of_router(name)}
        names = unchanged | {dense: stored[dense].shape for dense in sources.values()}
    check_model(checkpoint, shape_of(engine), field, upcycles=bool(sources))
    check_shapes(checkpoint, names, field, only=only)
    with together(sync, CorruptCheckpoint):
        read = upcycled(partial(load_averaged if weights_only else load, checkpoint), sources)
        if weights_only:
            put_weights(engine, read, lambda name: should_load(name) and not (sources and is_of_router(name)))
        else:
            engine.load(read, should_load)
            engine.steps_done = checkpoint.manifest.step
    return len(sources)
