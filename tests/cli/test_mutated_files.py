"""Whatever became of a file of a run directory or of prepared data: a status, a line, in bounded time and memory."""

import os
import shutil

import pytest
from mutated import RUN, run_case, target_of, trained_place, untrained_place

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
def test_a_run_follows_no_link_in_its_directory(trained):
    """What a run writes beside its checkpoints replaces what stands there."""
    folder = trained.cases / "links"
    shutil.copytree(trained.sound, folder)
    (folder / "mine.txt").write_text("mine")
    for name in ("config.toml", "tokenizer.json", "loss.png", ".metrics.jsonl.part"):
        (folder / RUN / name).unlink(missing_ok=True)
        (folder / RUN / name).symlink_to(folder / "mine.txt")
    done = trained.forks.run(["train", "run.toml", "--grid.pipe", "1", "--train.steps", "3"], folder, 120)
    assert done.status == 0, done.err.decode()
    assert (folder / "mine.txt").read_text() == "mine"
    assert not [path for path in (folder / RUN).iterdir() if path.is_symlink()]


@pytest.mark.slow
@pytest.mark.parametrize("share", range(SHARES))
def test_mutations(trained, share):
    chosen = [int(number) for number in os.environ.get("MUTATED_CASES", "").split(",") if number]
    told = faults(trained, [number for number in chosen or range(CASES) if number % SHARES == share])
    assert not told, "\n".join(told)
