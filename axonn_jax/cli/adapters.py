"""Export of a run's adapters in PEFT's format, for ``axonn-jax convert --adapter``."""

import re
from pathlib import Path

from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import say


def write_adapter_of(source: Path, dest: Path, *, force: bool) -> dict[str, object]:
    """Write the adapters of a run or of one of its checkpoints, and return a summary.

    Args:
        source: Run directory, or one of its step_N.
        dest: Directory to write.
        force: True to replace a directory that an earlier convert wrote.

    Raises:
        UserError: The run has no adapters, or the directory cannot be written.
    """
    from axonn_jax.core.adapters.config import trained_params
    from axonn_jax.core.adapters.stored import adapters_in
    from axonn_jax.core.checkpoint.restore import resolve_checkpoint, stored_shape
    from axonn_jax.core.distributed.host_sync import LocalSync
    from axonn_jax.files.adapters.export import stored_adapters
    from axonn_jax.files.adapters.peft import CONFIG, TENSORS, StoredAdapter, write_adapter
    from axonn_jax.files.data.output import OutputKind, appearing

    checkpoint = resolve_checkpoint(source, LocalSync(), say, "SOURCE")
    if (stored := adapters_in(checkpoint, "SOURCE")) is None:
        raise UserError("--adapter", True, f"for a run with adapters; {source} is a whole model")
    shape = stored_shape(checkpoint, "SOURCE")
    arrays = stored_adapters(checkpoint, stored, shape, "SOURCE")
    kind = OutputKind(
        "convert", "converted", "SOURCE", "DEST", re.compile(f"{re.escape(CONFIG)}|{re.escape(TENSORS)}"), CONFIG
    )
    with appearing(source.resolve(), dest.resolve(), kind, force=force) as partial:
        write_adapter(partial, StoredAdapter(stored.config, arrays, stored.base), shape)
        written = (partial / TENSORS).stat().st_size
    count = trained_params(shape, stored.config)
    return {"to": "adapter", "parameters": count, "dtype": "float32", "bytes": written, "base": stored.base}
