"""Pruning of a run at rest: its newest checkpoint, read by a pruned trainer on one device, saved as another run."""

import shutil
from collections.abc import Callable
from pathlib import Path

from axonn_jax.checkpoint.naming import MASKS
from axonn_jax.checkpoint.restore import named_checkpoint
from axonn_jax.distributed.host_sync import host_sync
from axonn_jax.distributed.initialize import start
from axonn_jax.documents import replace_whole
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.huggingface.pretrained import FOLDER as PRETRAINED
from axonn_jax.train.config import Config, MemoryConfig, TensorConfig
from axonn_jax.train.config_file import to_toml
from axonn_jax.train.engines.spmd import SpmdEngine
from axonn_jax.train.main import model_of
from axonn_jax.train.optimizer import make_optimizer
from axonn_jax.train.resume import FOLDER, save_as
from axonn_jax.train.trainer import Trainer


def prune_run(config: Config, source: Path, target: Path, progress: Callable[[str], None]) -> tuple[int, int, int]:
    """Writes a run directory with the pruned state of another; returns its step, the entries kept, and of how many.

    `config` is the new run's. Raises ``UserError`` where there is no valid checkpoint, or one that is pruned already.
    """
    _, grid = start(GridShape())
    sync = host_sync(grid)
    checkpoint = named_checkpoint(source, sync, lambda line: None, "RUN_DIR")
    if any(name.startswith(MASKS) for name in checkpoint.manifest.arrays):
        raise UserError("RUN_DIR", str(source), f"a run that is not pruned yet; {checkpoint.path} is")
    memory = MemoryConfig(precision=config.memory.precision)
    tensor = TensorConfig(scan_layers="no")
    optimizer = make_optimizer(config.train)
    trainer = Trainer(model_of(config), optimizer, grid, memory=memory, tensor=tensor, prune=config.prune)
    progress("pruning")
    step = trainer.load(checkpoint.path)
    engine = trainer.engine
    assert isinstance(engine, SpmdEngine)
    progress("writing")
    target.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", PRETRAINED):
        if (source / name).is_dir():
            shutil.copytree(source / name, target / name)
        elif (source / name).exists():
            shutil.copyfile(source / name, target / name)
    replace_whole(target / "config.toml", to_toml(config).encode())
    save_as(engine, target / FOLDER, step, checkpoint.manifest.run)
    trainer.close()
    kept, of = engine.kept_entries
    return step, kept, of
