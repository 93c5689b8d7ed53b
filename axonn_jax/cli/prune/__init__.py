"""``axonn-jax prune``: a run's newest checkpoint as a new run, with only some entries of its kernels."""

import json
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

from axonn_jax.cli.prepare import terminated
from axonn_jax.cli_args import Arg
from axonn_jax.errors import UserError
from axonn_jax.options import PruneScope
from axonn_jax.terminal import Ticker


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
        UserError: RUN_DIR is no run's, OUT_DIR is not empty, or an option is out of range.
    """
    from axonn_jax.train.config import PruneConfig
    from axonn_jax.train.config_file import read
    from axonn_jax.train.validate import check_prune

    if not 0 < args.density < 1 and not args.mask_file:
        raise UserError("--density", args.density, "a number above 0 and below 1")
    if not (args.run_dir / "config.toml").is_file():
        raise UserError("RUN_DIR", str(args.run_dir), "a directory left by `axonn-jax train`, with a config.toml")
    given = (
        {"mask_file": args.mask_file, "method": "file"}
        if args.mask_file
        else {"density": args.density, "scope": args.scope}
    )
    prune = PruneConfig(**given)  # type: ignore[arg-type]
    config = read(args.run_dir / "config.toml")
    check_prune(prune, config.grid.pipe)  # train accepts the written config
    config = replace(config, prune=prune, log=replace(config.log, dir=str(args.out_dir)))
    began = time.monotonic()
    with terminated(), Ticker("reading") as ticker:
        from axonn_jax.cli.prune.at_rest import prune_run

        step, kept, of = prune_run(config, args.run_dir, args.out_dir, ticker.now)
    seconds = time.monotonic() - began
    result = {"path": str(args.out_dir), "step": step, "kept": kept, "of": of, "seconds": round(seconds, 3)}
    line = f"kept {kept:,} of {of:,} entries of the kernels of step {step}; {args.out_dir} in {seconds:.1f} s"
    print(json.dumps(result) if args.json else line)
    return 0
