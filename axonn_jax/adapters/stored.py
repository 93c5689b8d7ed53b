"""Facts of the adapters in a checkpoint: their settings and where their base is."""

from pathlib import Path

from axonn_jax.adapters.config import LORA, StoredLora, stored_in
from axonn_jax.checkpoint.manifest import MANIFEST, CorruptCheckpoint
from axonn_jax.checkpoint.naming import PARAMS
from axonn_jax.checkpoint.restore import Checkpoint, check_stored
from axonn_jax.errors import UserError


def adapters_in(checkpoint: Checkpoint, field: str) -> StoredLora | None:
    """Return the facts of a checkpoint's adapters; None of a whole model's.

    Raises ``UserError`` for damaged ones, and for a rank that is not the arrays', of which headers alone are read.
    """
    try:
        if (stored := stored_in(checkpoint.manifest.run)) is None:
            return None
        arrays = checkpoint.manifest.arrays
        names = [name for name in arrays if name.startswith(PARAMS) and name.endswith(".adapter.b")]
        for name in names:
            if (shape := arrays[name].shape)[:1] != (stored.rank,):
                raise ValueError(f"{LORA}.rank = {stored.rank}, but {name} is {shape}")
        check_stored(checkpoint, names)
        return stored
    except (ValueError, CorruptCheckpoint) as error:
        raise UserError(field, str(checkpoint.path), f"a valid checkpoint; {MANIFEST}: {error}") from None


def not_whole(checkpoint: Checkpoint, field: str) -> UserError:
    """Return the refusal of a checkpoint of adapters where a whole model is wanted."""
    accepted = "a whole model, as `axonn-jax convert --merge` makes of it; this checkpoint has adapters alone"
    return UserError(field, str(checkpoint.path), accepted)


def base_of(stored: StoredLora, checkpoint: Checkpoint, field: str) -> Path:
    """Return the directory of the base of a checkpoint's adapters; raises ``UserError`` where it is not there."""
    if not stored.base or not Path(stored.base).is_dir():
        gone = f"it is no longer at {stored.base}" if stored.base else "it was given from Python"
        instead = "--base DIR of generate, evaluate and convert --merge names another place"
        raise UserError(field, str(checkpoint.path), f"adapters whose base is there; {gone}; {instead}")
    return Path(stored.base)
