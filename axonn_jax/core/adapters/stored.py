"""Metadata of the adapters in a checkpoint: their settings and the location of their base."""

from pathlib import Path

from axonn_jax.core.adapters.config import LORA, StoredLora, stored_in
from axonn_jax.core.checkpoint.manifest import MANIFEST, CorruptCheckpoint
from axonn_jax.core.checkpoint.naming import PARAMS
from axonn_jax.core.checkpoint.restore import Checkpoint, check_stored
from axonn_jax.core.errors import UserError


def adapters_in(checkpoint: Checkpoint, field: str) -> StoredLora | None:
    """Return the metadata of a checkpoint's adapters; None if it holds a full model.

    Raises:
        UserError: The metadata is damaged, or its rank differs from that of the stored arrays.
    """
    try:
        if (stored := stored_in(checkpoint.manifest.run)) is None:
            return None
        arrays = checkpoint.manifest.arrays
        names = [name for name in arrays if name.startswith(PARAMS) and name.endswith(".adapter.b")]
        # Compare with the headers before anything is allocated by a rank that the manifest merely claims.
        for name in names:
            if (shape := arrays[name].shape)[:1] != (stored.rank,):
                raise ValueError(f"{LORA}.rank = {stored.rank}, but {name} is {shape}")
        check_stored(checkpoint, names)
        return stored
    except (ValueError, CorruptCheckpoint) as error:
        raise UserError(field, str(checkpoint.path), f"a valid checkpoint; {MANIFEST}: {error}") from None


def adapters_only_error(checkpoint: Checkpoint, field: str) -> UserError:
    """Return the error for a checkpoint of adapters where a full model is expected."""
    accepted = "a whole model, as `axonn-jax convert --merge` makes of it; this checkpoint has adapters alone"
    return UserError(field, str(checkpoint.path), accepted)


def base_of(stored: StoredLora, checkpoint: Checkpoint, field: str) -> Path:
    """Return the directory of the base of a checkpoint's adapters; raises ``UserError`` if it no longer exists."""
    if not stored.base or not Path(stored.base).is_dir():
        cause = f"it is no longer at {stored.base}" if stored.base else "it was given from Python"
        instead = "--base DIR of generate, evaluate and convert --merge names another place"
        raise UserError(field, str(checkpoint.path), f"adapters whose base is there; {cause}; {instead}")
    return Path(stored.base)
