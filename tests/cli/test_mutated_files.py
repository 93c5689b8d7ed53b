"""Whatever became of a file of a run directory or of prepared data: a status, a line, in bounded time and memory."""

import os

import pytest
from mutated import prepared_place, run_case

CASES = 2000
"""A case alone: `MUTATED_CASES=17,18 pytest -m slow tests/cli/test_mutated_files.py`."""
SHARES = 20


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    made = prepared_place(tmp_path_factory.mktemp("mutated"))
    yield made
    made.forks.close()


def faults(place, numbers):
    told = []
    for number in numbers:
        changed, fault = run_case(place, number)
        if fault:
            told.append(f"{changed}\n    {fault}")
    return told


def test_a_few_mutations(place):
    told = faults(place, range(6))
    assert not told, "\n".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_mutations(place, share):
    chosen = [int(number) for number in os.environ.get("MUTATED_CASES", "").split(",") if number]
    told = faults(place, [number for number in chosen or range(CASES) if number % SHARES == share])
    assert not told, "\n".join(told)
