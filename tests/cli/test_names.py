"""Names that people bring along, of other systems or in other capitals, are answered with the names here."""

import re
from pathlib import Path
from typing import get_args

import pytest

from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.options import Optimizer, PipelinePolicy, Precision, Schedule
from axonn_jax.run.config_file import loads, tables

PAGE = Path(__file__).resolve().parents[2] / "docs/coming_from.md"
KEYS = [f"{table}.{key}" for table, of_table in tables().items() for key in of_table]


def documented():
    """Return pairs of another system's name and the keys that its row names, by the page's tables."""
    rows = [line.strip("|").split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    for theirs, ours in rows:
        keys = {key for key in KEYS if re.search(rf"`{re.escape(key)}\b", ours)}
        names = re.findall(r"`-{0,2}([A-Za-z][\w-]*)[^`.(]*`", theirs)
        yield from ((name, keys) for name in names if keys)


def test_names_of_the_page_are_answered_with_a_key_of_their_row():
    pairs = list(documented())
    assert len(pairs) > 45
    for name, keys in pairs:
        assert nearest(name, KEYS).removeprefix("; did you mean '").removesuffix("'?") in keys, name


@pytest.mark.parametrize(
    ("flag", "says"),
    [
        ("train.batch_size", "did you mean 'global_batch'"),
        ("train.save_steps", "did you mean 'checkpoint.every'"),
        ("train.bf16", "did you mean 'memory.precision'"),
        ("batch_size", "did you mean 'train.global_batch'"),
        ("grid.cp", "context parallelism is not here"),
    ],
)
def test_a_key_of_another_table_is_named_with_its_table(flag, says):
    with pytest.raises(UserError, match=rf"^{flag} = 1: .*{says}"):
        loads("", [(flag, 1)])


def test_capitals_make_no_difference():
    for kind in (Optimizer, Schedule, Precision, PipelinePolicy):
        for name in get_args(kind):
            assert nearest(name.upper(), get_args(kind)) == f"; did you mean {name!r}?"
    with pytest.raises(UserError, match=r"^memory\.precision = 'FP8': one of .*; FP8 is not here$"):
        loads("", [("memory.precision", "FP8")])
