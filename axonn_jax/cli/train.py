"""``axonn-jax train``: training from a checked configuration."""

import sys
from collections.abc import Sequence

from axonn_jax.cli.arguments import help_text
from axonn_jax.core.errors import UNSET, UserError
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import read, split_argv
from axonn_jax.run.validate import check

_USAGE = "axonn-jax train CONFIG.toml"
_DESCRIPTION = """Train a model as the tables of CONFIG.toml say.
Every flag below is a key of that file, such as `steps = 100` under [train], and wins over it.
`axonn-jax launch` starts a failed run again, in one process or several.

A run goes on from the newest checkpoint of its directory. Exit status: 0 done, 1 failed, 2 bad input; told to end by
SIGTERM 143, SIGINT 130, SIGUSR1 138, SIGHUP 129, its state saved (a second signal ends it at once, unsaved).
One run at a time trains in a log.dir. Under mpirun use `axonn-jax launch`: mpirun itself kills at Ctrl-C."""


def main(argv: Sequence[str]) -> int:
    """Read and check the configuration, train, and return the exit status.

    Raises:
        UserError: The command line or the configuration is wrong; nothing has been written or started yet.
    """
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(help_text(Config, _USAGE, _DESCRIPTION, keys=True))
        return 0
    if "-n" in argv:
        raise UserError("-n", "behind train", "a flag of `axonn-jax launch`, which starts several processes")
    files, flags = split_argv(argv)
    if (restarts := dict(flags).get("restarts")) is not None:
        raise UserError("--restarts", restarts, "a flag of `axonn-jax launch`, which starts a failed job again")
    if not files:
        raise UserError("CONFIG.toml", UNSET, f"the path of a TOML file, as in `{_USAGE}`")
    if len(files) > 1:
        raise UserError("argument", files[1], f"only flags such as --train.steps 100 beside {files[0]!r}")
    config = check(read(files[0], flags))
    # Imported late: jax takes a second to import, and mistakes should be reported before that.
    from axonn_jax.run.main import train

    return train(config)
