"""Weights of an engine, taken out and put in; facts by which checkpoints know the base of its adapters again."""

from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
from jax.sharding import NamedSharding

from axonn_jax.adapters.checksum import checksum
from axonn_jax.adapters.config import IDENTITY, LORA, LoraConfig, StoredLora
from axonn_jax.adapters.layers import settings_of
from axonn_jax.adapters.stored import adapters_in, not_whole
from axonn_jax.checkpoint.manifest import CorruptCheckpoint
from axonn_jax.checkpoint.naming import AVERAGE, CARRIED, MASKS, PARAMS, SCALE, State
from axonn_jax.checkpoint.restore import Checkpoint, check_model, check_shapes, load, load_averaged
from axonn_jax.distributed.host_sync import HostSync, together
from axonn_jax.errors import UserError
from axonn_jax.experts.upcycle import biases_left_over, dense_sources, is_of_router, upcycled
from axonn_jax.models.config import ModelShape
from axonn_jax.models.vocabulary import padding_of, without_padding
from axonn_jax.tensor.params import Params
from axonn_jax.train.engines.engine import Engine
from axonn_jax.train.engines.pruning import prune_for


def shape_of(engine: Engine) -> ModelShape | None:
    """The sizes of an engine's transformer; None of another model."""
    shape = getattr(engine.parts.merge(engine.parts.params), "shape", None)
    return shape if isinstance(shape, ModelShape) else None


def adapters_of(engine: Engine) -> LoraConfig | None:
    """The settings of an engine's adapters; None where all weights are trained."""
    return settings_of(engine.parts.merge(engine.parts.params)) if engine.parts.adapters else None


def copied_model(engine: Engine, params: Params) -> Any:
    """Return the user's model with copies of parameters on the devices of their stages.

    Raises ``UserError`` where this process holds only a part of them.
    """
    parts = engine.parts
    if len(params) < len(parts.params):
        here = f"{len(params)} of {len(parts.params)} parameters here"
        accepted = "a pipeline of one process; else engine.params (parameters here) or trainer.save"
        raise UserError("trainer.model", here, accepted)

    def copied(name: str, value: Any) -> jax.Array:
        return jax.device_put(value, NamedSharding(value.sharding.mesh, parts.specs[name]), may_alias=False)

    return engine.merged({name: copied(name, value) for name, value in params.items()})


def whole_sizes(engine: Engine) -> dict[str, tuple[int, ...]]:
    """Sizes, by name of state, of a whole model's parameters: without adapters, and without padding."""
    if not engine.parts.adapters:
        return {name: size for name, size in engine.state_shapes().items() if name.startswith(PARAMS)}
    sizes = {PARAMS + name: p.shape for name, p in engine.parts.frozen.items()}
    return without_padding(sizes, padding_of(engine.parts.merge(engine.parts.params)))


def put_weights(engine: Engine, read: Callable[[State], State], wanted: Callable[[str], bool]) -> None:
    """Replace wanted arrays by what `read` makes for names of state, and averages of parameters by the parameters."""

    def both(asked: State) -> State:
        of = {name: PARAMS + name.removeprefix(AVERAGE) for name in asked if name.startswith(AVERAGE)}
        again = read({of[name]: asked[name] for name in of}) if of else {}
        own = read({name: want for name, want in asked.items() if name not in of})
        return own | {name: again[parameter] for name, parameter in of.items()}

    engine.load(both, lambda name: wanted(PARAMS + name.removeprefix(AVERAGE) if name.startswith(AVERAGE) else name))


def load_whole(engine: Engine, read: Callable[[State], State]) -> None:
    """Replace the parameters of a model, or those beside its adapters, by what `read` makes for names of state."""
    if not engine.parts.adapters:
        put_weights(engine, read, lambda name: name.startswith(PARAMS))
        return

    def named(abstract: Mapping[str, Any]) -> State:
        made = read({PARAMS + name: want for name, want in abstract.items()})
        return {name.removeprefix(PARAMS): value for name, value in made.items()}

    for store in engine.stores.values():
        store.frozen.load(named)


def take_base(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str) -> None:
    """Put a whole model's checkpoint beside an engine's adapters.

    Raises ``UserError`` for one of another model, ``CorruptCheckpoint`` on all processes if one cannot read.
    """
    check_model(checkpoint, shape_of(engine), field)
    check_shapes(checkpoint, whole_sizes(engine), field, only=PARAMS)
    with together(sync, CorruptCheckpoint):
        load_whole(engine, lambda abstract: load_averaged(checkpoint, abstract))


def facts_of(engine: Engine, sync: HostSync, base: str) -> dict[str, Any]:
    """Return the facts of adapters for a checkpoint: settings, path and checksum of the base; none without adapters.

    Every process must call it. Collectives: an all-reduce of a number a frozen parameter.
    """
    config = adapters_of(engine)
    if config is None:
        return {}
    own = {key: getattr(config, key) for key in IDENTITY}
    return {LORA: asdict(StoredLora(**own, base=base, checksum=_checksum(engine, sync)))}


def _checksum(engine: Engine, sync: HostSync) -> str:
    numbers = {name: number for store in engine.stores.values() for name, number in store.frozen.numbers().items()}
    return checksum(numbers, engine.parts.frozen, sync)


def check_adapters(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str, *, weights_only: bool) -> None:
    """Raise ``UserError``, on all processes, where a checkpoint's adapters are not those of an engine and its base."""
    stored, config = adapters_in(checkpoint, field), adapters_of(engine)
    path = str(checkpoint.path)
    if stored is None:
        if config is not None and not weights_only:
            raise UserError(field, path, "a checkpoint of adapters, as [lora] asks for; this one is of a whole model")
        return
    if config is None:
        raise not_whole(checkpoint, field)
    for key in IDENTITY:
        if (then := getattr(stored, key)) != (value := getattr(config, key)):
            raise UserError(f"lora.{key}", _shown(value), f"{_shown(then)}, as in {path}")
    if stored.checksum != _checksum(engine, sync):
        theirs = stored.base or "given from Python"
        raise UserError(field, path, f"adapters of this base, by its checksum; theirs was {theirs}")


def _shown(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def take(engine: Engine, checkpoint: Checkpoint, sync: HostSync, field: str, *, weights_only: bool) -> int:
    """Put a valid checkpoint's arrays into an engine; return the number of kernels copied to experts.

    Of a run with `train.ema` the weights alone are their averages.

    Raises ``CorruptCheckpoint`` on all processes if one cannot read.
    """
    check_adapters(engine, checkpoint, sync, field, weights_only=weights_only)
    if engine.parts.adapters and LORA not in checkpoint.manifest.run:
        take_base(engine, checkpoint, sync, field)
        return 0
    only = (PARAMS, CARRIED) if weights_only else ""
    has = checkpoint.manifest.arrays
    if not weights_only:
        if checkpoint.averaged != any(name.startswith(AVERAGE) for name in engine.state_shapes()):
            accepted = f"a checkpoint of a run with{'out' * checkpoint.averaged} train.ema, as this one"
            raise UserError(field, str(checkpoint.path), accepted)
        prune_for(engine, has)

    def wanted(name: str) -> bool:
        return name.startswith(only) and (name in has or not name.startswith((SCALE, MASKS)))

    names = {name: shape for name, shape in engine.state_shapes().items() if wanted(name)}
    sources = dense_sources(names, {name: array.shape for name, array in has.items()}) if weights_only else {}
    if biases := biases_left_over(sources, has):
        accepted = f"a dense run with model.bias = none or qkv, as experts have no biases; {biases[0]} is there"
        raise UserError(field, str(checkpoint.path), accepted)
    if sources:  # routers stay as they were made
        rest = {name: shape for name, shape in names.items() if name not in sources and not is_of_router(name)}
        names = rest | {dense: has[dense].shape for dense in sources.values()}
    check_model(checkpoint, shape_of(engine), field, upcycles=bool(sources))
    check_shapes(checkpoint, names, field, only=only)
    with together(sync, CorruptCheckpoint):
        read = upcycled(partial(load_averaged if weights_only else load, checkpoint), sources)
        if weights_only:
            put_weights(engine, read, lambda name: wanted(name) and not (sources and is_of_router(name)))
        else:
            engine.load(read, wanted)
            engine.steps_done = checkpoint.manifest.step
    return len(sources)
