"""``axonn-jax prune``: a new run from a run's newest checkpoint, with its kernels pruned."""

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from axonn_jax.cli.arguments import Arg
from axonn_jax.cli.prepare import terminated
from axonn_jax.core.documents import write_atomically
from axonn_jax.core.errors import UserError
from axonn_jax.core.options import PruneScope
from axonn_jax.core.terminal import Ticker
from axonn_jax.files.data.output import OutputKind, appearing

if TYPE_CHECKING:
    from axonn_jax.run.config import Config


@dataclass(frozen=True)
class Prune:
    """Prune a trained run's kernels to their largest entries, in a new run directory for `axonn-jax train`.

    Optimizer state, step and data position are kept. One device holds the dense weights and the state of the kept
    entries. `axonn-jax train OUT_DIR/config.toml` trains the kept entries.
    """

    run_dir: Annotated[Path, Arg(positional="RUN_DIR")]
    """A directory left by `axonn-jax train`."""
    out_dir: Annotated[Path, Arg(positional="OUT_DIR")]
    """The run directory to write; new or empty. Appears complete or not at all."""
    density: float = 0.1
    """Share of entries kept."""
    scope: PruneScope = "layer"
    """Scope of the share: every kernel (layer), or all kernels together (global)."""
    mask_file: str = ""
    """An .npz file with an array of booleans by the parameter's name, in the place of density and scope."""
    json: bool = False
    """Print one JSON object with the result."""


def run(args: Prune) -> int:
    """Prune, print the result and return the exit status.

    Raises:
        UserError: RUN_DIR holds no run, OUT_DIR is not empty, or an option is out of range.
    """
    from axonn_jax.core.engines.rules import RunSettings, check_rules
    from axonn_jax.core.pruned.config import PruneConfig
    from axonn_jax.run.config_file import read
    from axonn_jax.run.validate import check_masks

    if not 0 < args.density < 1 and not args.mask_file:
        raise UserError("--density", args.density, "a number above 0 and below 1")
    if not (args.run_dir / "config.toml").is_file():
        accepted = "an existing directory left by `axonn-jax train`, with a config.toml"
        raise UserError("RUN_DIR", str(args.run_dir), accepted)
    settings = (
        {"mask_file": args.mask_file, "method": "file"}
        if args.mask_file
        else {"density": args.density, "scope": args.scope}
    )
    prune = PruneConfig(**settings)  # type: ignore[arg-type]
    config = read(args.run_dir / "config.toml")
    # The written configuration must be one that `train` accepts.
    check_rules(RunSettings(config.grid, prune=prune, train=config.train))
    check_masks(args.mask_file)
    config = replace(config, prune=prune, log=replace(config.log, dir=str(args.out_dir)))
    began = time.monotonic()
    with terminated(), Ticker("reading") as ticker:
        step, remaining, total = _pruned(config, args.run_dir, args.out_dir, ticker.now)
    seconds = time.monotonic() - began
    result = {"path": str(args.out_dir), "step": step, "kept": remaining, "of": total, "seconds": round(seconds, 3)}
    line = f"kept {remaining:,} of {total:,} entries of the kernels of step {step}; {args.out_dir} in {seconds:.1f} s"
    print(json.dumps(result) if args.json else line)
    return 0


def _pruned(config: "Config", source: Path, target: Path, progress: Callable[[str], None]) -> tuple[int, int, int]:
    # Returns the step, and the numbers of remaining and of all entries. `config` is that of the new run. Refusals in
    # `appearing` leave no directory behind.
    from axonn_jax.core.checkpoint.manifest import FOLDER
    from axonn_jax.core.checkpoint.naming import MASKS
    from axonn_jax.core.checkpoint.restore import resolve_checkpoint
    from axonn_jax.core.distributed.host_sync import host_sync
    from axonn_jax.core.distributed.initialize import start
    from axonn_jax.core.engines.optimizer import make_optimizer
    from axonn_jax.core.engines.pruning import mask_counts
    from axonn_jax.core.engines.saving import save_as
    from axonn_jax.core.grid import GridShape
    from axonn_jax.core.settings import MemoryConfig, TensorConfig
    from axonn_jax.files.huggingface.pretrained import FOLDER as PRETRAINED
    from axonn_jax.files.huggingface.pretrained import OF_TOKENIZER
    from axonn_jax.run.config_file import to_toml
    from axonn_jax.run.main import model_of
    from axonn_jax.trainer import Trainer

    small = re.compile(rf"{PRETRAINED}|{OF_TOKENIZER.pattern}")
    ours = re.compile(rf"config\.toml|{FOLDER}|{small.pattern}")
    kind = OutputKind("prune", "pruned", "RUN_DIR", "OUT_DIR", ours)
    with appearing(source.resolve(), target.resolve(), kind) as partial:
        _, grid = start(GridShape())
        sync = host_sync(grid)
        checkpoint = resolve_checkpoint(source, sync, lambda line: None, "RUN_DIR")
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
            for name in filter(small.fullmatch, os.listdir(source)):
                if (source / name).is_dir():
                    shutil.copytree(source / name, partial / name)
                else:
                    shutil.copyfile(source / name, partial / name)
            write_atomically(partial / "config.toml", to_toml(config).encode())
            try:
                save_as(engine, partial / FOLDER, step, checkpoint.manifest.run)
            except OSError as error:
                why = str(error).replace(str(partial), str(target))
                raise UserError("OUT_DIR", str(target), f"a place that can be written; {why}") from None
            counts = mask_counts(engine, sync, config.prune.density)
    return step, counts.entries, counts.of
