"""Pruning of a saved run: a pruned trainer on one device reads the newest checkpoint and saves another run."""

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from axonn_jax.checkpoint.naming import MASKS
from axonn_jax.checkpoint.restore import named_checkpoint
from axonn_jax.data.output import OutputKind, appearing
from axonn_jax.distributed.host_sync import host_sync
from axonn_jax.distributed.initialize import start
from axonn_jax.documents import replace_whole
from axonn_jax.errors import UserError
from axonn_jax.grid import GridShape
from axonn_jax.models.huggingface.pretrained import FOLDER as PRETRAINED
from axonn_jax.models.huggingface.pretrained import OF_TOKENIZER
from axonn_jax.train.config import Config, MemoryConfig, TensorConfig
from axonn_jax.train.config_file import to_toml
from axonn_jax.train.engines.pruning import kept_of
from axonn_jax.train.main import model_of
from axonn_jax.train.optimizer import make_optimizer
from axonn_jax.train.resume import FOLDER, save_as
from axonn_jax.train.trainer import Trainer

_SMALL = re.compile(rf"{PRETRAINED}|{OF_TOKENIZER.pattern}")
_FILES = re.compile(rf"config\.toml|{FOLDER}|{_SMALL.pattern}")
_RUN = OutputKind("prune", "pruned", "RUN_DIR", "OUT_DIR", _FILES)


def prune_run(config: Config, source: Path, target: Path, progress: Callable[[str], None]) -> tuple[int, int, int]:
    """Write a run directory with the pruned state of another; return its step, the entries kept, and of how many.

    `config` is the new run's. Raises ``UserError``, without writing, for a missing, invalid or pruned checkpoint, and
    for a directory that is not empty or cannot be written.
    """
    with appearing(source.resolve(), target.resolve(), _RUN) as partial:
        _, grid = start(GridShape())
        sync = host_sync(grid)
        checkpoint = named_checkpoint(source, sync, lambda line: None, "RUN_DIR")
        if any(name.startswith(MASKS) for name in checkpoint.manifest.arrays):
            raise UserError("RUN_DIR", str(source), f"a run that is not pruned yet; {checkpoint.path} is")
        memory = MemoryConfig(precision=config.memory.precision)
        tensor = TensorConfig(scan_layers="no")
        optimizer = make_optimizer(config.train)
        trainer = Trainer(model_of(config), optimizer, grid, memory=memory, tensor=tensor, prune=config.prune)
        with contextlib.closing(trainer):
            progress("pruning")
            step = trainer.load(checkpoint.path)
            engine = trainer.engine
            progress("writing")
            for name in filter(_SMALL.fullmatch, os.listdir(source)):
                if (source / name).is_dir():
                    shutil.copytree(source / name, partial / name)
                else:
                    shutil.copyfile(source / name, partial / name)
            replace_whole(partial / "config.toml", to_toml(config).encode())
            try:
                save_as(engine, partial / FOLDER, step, checkpoint.manifest.run)
            except OSError as error:
                why = str(error).replace(str(partial), str(target))
                raise UserError("OUT_DIR", str(target), f"a place that can be written; {why}") from None
            held = kept_of(engine, sync, config.prune.density)
    return step, held.entries, held.of
