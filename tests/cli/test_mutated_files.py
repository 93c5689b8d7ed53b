"""Whatever became of a file of a run directory or of prepared data: a status, a line, in bounded time and memory."""

import os

import pytest
from mutated import run_case, target_of, trained_place, untrained_place

CASES = 2000
"""Cases alone: `MUTATED_CASES=17,18 pytest -m slow tests/cli/test_mutated_files.py`."""
SHARES = 20


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    place = trained_place(tmp_path_factory.mktemp("trained"))
    yield place
    place.forks.close()


@pytest.fixture(scope="module")
def untrained(tmp_path_factory):
    place = untrained_place(tmp_path_factory.mktemp("untrained"))
    yield place
    place.forks.close()


def faults(place, numbers):
    told = []
    for number in numbers:
        changed, fault = run_case(place, number)
        if fault:
            told.append(f"{changed}\n    {fault}")
    return told


def test_a_few_mutations(untrained):
    numbers = [number for number in range(100) if target_of(number) in ("timeline", "machine")][:8]
    told = faults(untrained, numbers)
    assert not told, "\n".join(told)


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_mutations(trained, share):
    chosen = [int(number) for number in os.environ.get("MUTATED_CASES", "").split(",") if number]
    told = faults(trained, [number for number in chosen or range(CASES) if number % SHARES == share])
    assert not told, "\n".join(told)
