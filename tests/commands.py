"""Commands in this process: what they print, the line of a refusal, and the words of some of them."""

import io
import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout

import jax
import numpy as np
from jax.sharding import Mesh
from launched import finished, flags

from axonn_jax.cli.main import main

PLAN = ["plan", "--model", "gpt-5b", "--machine", "perlmutter", "--devices", "16", "--batch-tokens", "262144"]
IMPORTED = """
import sys
from axonn_jax.cli.main import main
status = main(sys.argv[2:])
print([name for name in sys.argv[1].split() if name in sys.modules], file=sys.stderr)
sys.exit(status)
"""
SIMULATE = ["simulate", *PLAN[1:-1], "524288"]


def output(capsys, argv, status=0):
    """What a command prints that has nothing to say on standard error."""
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out


def said(*words, status=0):
    """What a command prints, here or on standard error, without a test's own capture; it has no mesh from before."""
    out, err = io.StringIO(), io.StringIO()
    mesh = Mesh(np.empty((), object), ())
    with redirect_stdout(out), redirect_stderr(err), jax.set_mesh(mesh):
        got = main([*map(str, words)])
    assert got == status, err.getvalue()
    return out.getvalue(), err.getvalue()


def alone(*words, heavy="jax jaxlib flax mpi4py", cwd=None):
    """What becomes of a command in a process of its own; on standard error at last those of `heavy` that it loads."""
    return finished([sys.executable, "-c", IMPORTED, heavy, *words], cwd=cwd)


def trained(config, run, status=0, **options):
    """What a run says; `grid_data=2` is the flag `--grid.data 2`."""
    return said("train", config, *flags({"log_dir": run, **options}), status=status)[1]


def answer(capsys, *words):
    """The JSON that a command prints."""
    capsys.readouterr()
    assert main([*map(str, words), "--json"]) == 0
    out, _ = capsys.readouterr()
    assert out.count("\n") == 1
    return json.loads(out)


def refusal(capsys, *words, alone=True):
    """The line with which a command refuses what it is given; others may stand above it if it is not `alone`."""
    capsys.readouterr()
    status = main([*map(str, words)])
    out, err = capsys.readouterr()
    err = re.sub(r"\A(\w+, \d+:\d\d\n)+", "", err)  # of a machine that has been reading for some seconds
    assert (status, out) == (2, ""), err
    line = err.splitlines()[-1]
    assert line.startswith("error: "), err
    assert err.endswith(f"{line}\n")
    assert err.count("\n") == 1 or not alone, err
    return line
