"""Command line of scripts that draw by a seed: seed, count, numbers; what is wrong with it is one line."""

import argparse
from collections.abc import Sequence
from typing import NoReturn


class Parser(argparse.ArgumentParser):
    """A parser of `--seed`, `--count`, `--only` and `--list`, whose errors are one line."""

    def __init__(self, script: str, doc: str, count: int):
        super().__init__(prog=f"scripts/{script}", description=doc.splitlines()[0])
        self.add_argument("--seed", type=int, required=True, help="the same seed and sources draw the same")
        self.add_argument("--count", type=int, default=count, help=f"how many are drawn ({count})")
        self.add_argument("--only", help="run these numbers alone: 3,7")
        self.add_argument("--list", action="store_true", help="print what is drawn and run nothing")

    def error(self, message: str) -> NoReturn:
        """End the script with status 2."""
        self.exit(2, f"{self.prog}: {message}\n")

    def parsed(self, words: Sequence[str] | None) -> argparse.Namespace:
        """The arguments, with the set of `numbers` to run."""
        args = self.parse_args(words)
        if args.count < 1:
            self.error("--count must be above 0")
        numbers = (args.only or ",".join(map(str, range(1, args.count + 1)))).split(",")
        if not all(number.isdecimal() and 1 <= int(number) <= args.count for number in numbers):
            self.error(f"--only {args.only}: must be numbers from 1 to {args.count}, with commas between them")
        args.numbers = {int(number) for number in numbers}
        return args
