"""Loading of pretrained weights and adapters into an engine, after a check on all processes."""

from pathlib import Path

import jax

from axonn_jax.core.checkpoint.naming import PARAMS, State
from axonn_jax.core.distributed.host_sync import HostSync, together
from axonn_jax.core.engines.base import full_sizes, load_base, put_weights, shape_of
from axonn_jax.core.engines.engine import Engine
from axonn_jax.core.errors import UserError
from axonn_jax.files.adapters.peft import read_adapter
from axonn_jax.files.huggingface.load import load_into
from axonn_jax.files.huggingface.pretrained import check_shape
from axonn_jax.files.huggingface.reader import Pretrained


def take_pretrained(engine: Engine, path: Path, sync: HostSync, field: str) -> None:
    """Load a pretrained directory's weights into an engine; each process reads the parts that its devices hold.

    Adapters stay unchanged. Raises ``UserError`` on all processes if one of them finds a fault, before the engine has
    changed.
    """
    with together(sync):
        if shape := shape_of(engine):
            check_shape(shape, path, field)
        pretrained = Pretrained(path, field)
        stored_sizes = {PARAMS + name: entry.size for name, entry in pretrained.entries.items()}
        model_sizes = full_sizes(engine)
        if wrong := sorted(
            name for name in stored_sizes.keys() | model_sizes.keys() if stored_sizes.get(name) != model_sizes.get(name)
        ):
            example = wrong[0].removeprefix(PARAMS)
            raise UserError(field, str(path), f"a model of the same parameters; {len(wrong)} differ, such as {example}")

    def read(abstract: State) -> State:
        loaded = load_into(pretrained, {name.removeprefix(PARAMS): target for name, target in abstract.items()})
        return {PARAMS + name: value for name, value in loaded.items()}

    # Reading can fail on one process alone: only the one with the shard sees that a head is not tied.
    with together(sync):
        load_base(engine, read)


def take_adapter(engine: Engine, path: Path, sync: HostSync, field: str) -> None:
    """Load a PEFT adapter directory into an engine with adapters.

    Raises ``UserError`` on all processes if one of them finds a fault, before the engine has changed.
    """
    shape = shape_of(engine)
    assert shape is not None
    with together(sync):
        arrays = {PARAMS + name: value for name, value in read_adapter(path, shape, field).arrays.items()}

    def shards_of(name: str, target: jax.ShapeDtypeStruct) -> jax.Array:
        values = arrays[name].astype(target.dtype)
        return jax.make_array_from_callback(target.shape, target.sharding, lambda index: values[index])

    def read(abstract: State) -> State:
        return {name: shards_of(name, target) for name, target in abstract.items()}

    put_weights(engine, read, lambda name: name.startswith(PARAMS))
