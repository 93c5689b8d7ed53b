"""`axonn-jax train CONFIG.toml [--table.key value ...]`: from a checked config to a run."""

import contextlib
import re
import sys
from collections.abc import Sequence

from axonn_jax.cli.restarts import Restarts, take_restarts
from axonn_jax.errors import NOT_GIVEN, UserError
from axonn_jax.train.config import Config
from axonn_jax.train.toml import read, split_argv

_USAGE = "axonn-jax train CONFIG.toml"
_DESCRIPTION = """Train a model as the tables of CONFIG.toml say.
Every flag below is a key of that file, such as `steps = 100` under [train], and wins over it.
`--restarts N`: start again from the last complete checkpoint, up to N times, when the run fails.

A run goes on from the newest checkpoint of its directory. Exit status: 0 done, 1 failed, 2 bad input; told to end by
SIGTERM 143, SIGINT 130, SIGUSR1 138, SIGHUP 129, its state saved (a second signal ends it at once, unsaved).
One run at a time trains in a log.dir. Under mpirun use `axonn-jax launch`: mpirun itself kills at Ctrl-C."""


def main(argv: Sequence[str]) -> int:
    """Reads and checks the configuration, trains, and returns the exit status.

    Raises:
        UserError: the command line or the configuration is wrong; nothing has been written or started then.
    """
    if any(word in ("-h", "--help") for word in argv):
        sys.stdout.write(help_text())
        return 0
    argv, restarts = take_restarts(argv)
    if restarts:
        return Restarts(argv, restarts).run()
    files, flags = split_argv(argv)
    if not files:
        raise UserError("CONFIG.toml", NOT_GIVEN, f"the path of a TOML file, as in `{_USAGE}`")
    if len(files) > 1:
        raise UserError("argument", files[1], f"only flags such as --train.steps 100 beside {files[0]!r}")
    config = read(files[0], flags).check()
    from axonn_jax.train.run import train

    return train(config)


def help_text() -> str:
    """Returns the help of every key."""
    import tyro

    from axonn_jax.cli.parse import captured, columns

    with columns(), captured() as (out, _), contextlib.suppress(SystemExit):
        tyro.cli(
            Config,
            prog=_USAGE,
            description=_DESCRIPTION,
            args=["--help"],
            use_underscores=True,
            config=(tyro.conf.FlagConversionOff,),
        )
    return _as_toml(out.getvalue())


def _as_toml(text: str) -> str:
    """Shows types and defaults as they are typed, in the same number of columns."""

    def keep_width(match: re.Match[str]) -> str:
        shown = match[0].replace("{None}|", "").replace("None,", "")
        shown = shown.replace("True", "true").replace("False", "false")
        return shown + " " * (len(match[0]) - len(shown))

    return re.sub(r"\{None[^\s\x1b]*|\{True,False\}|\(default: (True|False)\)", keep_width, text)
