"""Checkpoints that tests copy and damage."""

import pytest
from saved import saver, state


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """A folder with the checkpoints of steps 2 and 4."""
    folder = tmp_path_factory.mktemp("two")
    with saver(folder) as made:
        for step in (2, 4):
            made.save(step, state(step), {"position": step})
    return folder
