"""Export of a run's adapters in PEFT's format, for ``axonn-jax convert --adapter``."""

import re
from pathlib import Path
from typing import Any

from axonn_jax.errors import UserError
from axonn_jax.terminal import say


def write_adapter_of(source: Path, dest: Path, *, force: bool) -> dict[str, Any]:
    """Write the adapters of a run or of one of its checkpoints, and return a summary.

    Args:
        source: Run directory, or one of its step_N.
        dest: Directory to write.
        force: True to replace a directory that an earlier convert wrote.

    Raises:
        UserError: The run has no adapters, or the directory cannot be written.
    """
    from axonn_jax.adapters.config import trained_params
    from axonn_jax.adapters.export import stored_adapters
    from axonn_jax.adapters.peft import CONFIG, TENSORS, StoredAdapter, write_adapter
    from axonn_jax.adapters.stored import adapters_in
    from axonn_jax.checkpoint.restore import resolve_checkpoint, stored_shape
    from axonn_jax.data.output import OutputKind, appearing
    from axonn_jax.distributed.host_sync import LocalSync

    checkpoint = resolve_checkpoint(source, LocalSync(), say, "SOURCE")
    stored, shape = adapters_in(checkpoint, "SOURCE"), stored_shape(checkpoint, "SOURCE")
    if stored is None or shape is None:
        raise UserError("--adapter", True, f"for a run with adapters; {source} is a whole model")
    arrays = stored_adapters(checkpoint, stored, shape, "SOURCE")
    kind = OutputKind(
        "convert", "converted", "SOURCE", "DEST", re.compile(f"{re.escape(CONFIG)}|{re.escape(TENSORS)}"), CONFIG
    )
    with appearing(source.resolve(), dest.resolve(), kind, force=force) as partial:
        write_adapter(partial, StoredAdapter(stored.config, arrays, stored.base), shape)
        written = (partial / TENSORS).stat().st_size
    count = trained_params(shape, stored.config)
    return {"to": "adapter", "parameters": count, "dtype": "float32", "bytes": written, "base": stored.base}
