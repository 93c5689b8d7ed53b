"""Where the time of a run of tests went: minutes by folder, the ten slowest tests, and on request a file of all."""

import sys
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

SLOWEST = 10


def seconds_by_test(reports: list[Path]) -> Counter[str]:
    """Returns the seconds of every test in pytest's JUnit files, fixtures included, by its id."""
    found: Counter[str] = Counter()
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            module = case.get("classname", "").removeprefix("tests.").replace(".", "/")
            found[f"{module}::{case.get('name', '')}"] += float(case.get("time", 0))
    return found


def folder(test: str) -> str:
    """Returns the folder of tests/ that a test stands in, or its file in tests/ itself."""
    return test.partition("::")[0].partition("/")[0]


def table(tests: Counter[str]) -> list[str]:
    """Returns the lines that end a run: minutes by folder, most first, and the slowest tests."""
    by_folder: Counter[str] = Counter()
    for test, seconds in tests.items():
        by_folder[folder(test)] += seconds
    each = ", ".join(f"{name} {seconds / 60:.1f}" for name, seconds in by_folder.most_common())
    lines = [f"minutes of one worker by folder: {each}; in all {by_folder.total() / 60:.1f}", "slowest tests:"]
    return lines + [f"  {seconds:6.1f} s  {test}" for test, seconds in tests.most_common(SLOWEST)]


def main(words: list[str]) -> int:
    """Prints the table of the JUnit files in a folder; with a second word writes all seconds to that file."""
    tests = seconds_by_test(sorted(Path(words[0]).glob("*.xml")))
    if tests:
        print("\n".join(table(tests)))
    if len(words) > 1:
        rows = [f"{seconds:.2f}\t{folder(test)}\t{test}" for test, seconds in tests.most_common()]
        Path(words[1]).write_text("\n".join(["seconds\tfolder\ttest", *rows]) + "\n")
        print(f"scripts/test: seconds of {len(rows)} tests are in {words[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
