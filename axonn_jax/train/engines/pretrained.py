"""Pretrained weights and adapters in an engine: checked on all processes before anything changes, then read by each."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from axonn_jax.adapters.peft import read_adapter
from axonn_jax.checkpoint.naming import PARAMS
from axonn_jax.distributed.host_sync import HostSync, together
from axonn_jax.errors import UserError
from axonn_jax.models.huggingface.load import load_into
from axonn_jax.models.huggingface.pretrained import check_shape
from axonn_jax.models.huggingface.reader import Pretrained
from axonn_jax.train.engines.base import load_whole, put_weights, shape_of, whole_sizes
from axonn_jax.train.engines.engine import Engine


def take_pretrained(engine: Engine, path: Path, sync: HostSync, field: str) -> None:
    """Put a pretrained directory's weights into an engine, each process the parts that its devices hold.

    Adapters stay as they are. Raises ``UserError`` on all processes where one finds a fault, before anything of the
    engine's has changed.
    """
    with together(sync):
        if shape := shape_of(engine):
            check_shape(shape, path, field)
        pretrained = Pretrained(path, field)
        theirs = {PARAMS + name: entry.size for name, entry in pretrained.entries.items()}
        ours = whole_sizes(engine)
        if wrong := sorted(name for name in theirs.keys() | ours.keys() if theirs.get(name) != ours.get(name)):
            least = wrong[0].removeprefix(PARAMS)
            raise UserError(field, str(path), f"a model of the same parameters; {len(wrong)} differ, such as {least}")

    def read(abstract: Mapping[str, Any]) -> dict[str, Any]:
        loaded = load_into(pretrained, {name.removeprefix(PARAMS): want for name, want in abstract.items()})
        return {PARAMS + name: value for name, value in loaded.items()}

    with together(sync):  # a head may not be tied, in a shard of one process
        load_whole(engine, read)


def take_adapter(engine: Engine, path: Path, sync: HostSync, field: str) -> None:
    """Put PEFT's adapter of a directory into an engine of adapters.

    Raises ``UserError`` on all processes where one finds a fault, before anything of the engine's has changed.
    """
    shape = shape_of(engine)
    assert shape is not None
    with together(sync):
        arrays = {PARAMS + name: value for name, value in read_adapter(path, shape, field).arrays.items()}

    def placed(name: str, want: Any) -> jax.Array:
        values = arrays[name].astype(want.dtype)
        return jax.make_array_from_callback(want.shape, want.sharding, lambda index: values[index])

    def read(abstract: Mapping[str, Any]) -> dict[str, Any]:
        return {name: placed(name, want) for name, want in abstract.items()}

    put_weights(engine, read, lambda name: name.startswith(PARAMS))
