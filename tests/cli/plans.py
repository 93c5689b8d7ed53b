"""Command lines of `plan` and `simulate`, and what they print."""

from axonn_jax.cli.main import main

PLAN = ["plan", "--model", "gpt-5b", "--machine", "perlmutter", "--devices", "16", "--batch-tokens", "262144"]
SIMULATE = ["simulate", *PLAN[1:-1], "524288"]


def output(capsys, argv, status=0):
    assert main(argv) == status
    out, err = capsys.readouterr()
    assert err == ""
    return out
