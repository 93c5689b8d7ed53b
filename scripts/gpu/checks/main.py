"""Options, order, time budget and output of scripts/gpu/check. Imports no jax: that would take the device's memory."""

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from axonn_jax.core.errors import UserError
from axonn_jax.models import preset_names
from checks import process
from checks.report import SECTIONS, Row, header, write_json
from checks.sizes import TrainConfig, offload_plan, offload_shape, train_plan, train_shape
from checks.summary import paste_lines

_POLICIES = ("full", "none", "dots")
_GUESS_S = {"training": 60.0, "torch": 75.0, "offload": 80.0}
"""What a row is taken to need before one was seen: start, initial weights, compilation, steps. The time for one
PyTorch row is kept back from all training rows but the first, so that the comparison is made."""
_GRACE_S = 60.0
"""How much longer than the budget a row may take that was started within it."""
_LIMITS_S = {"device": 120.0, "parity": 240.0, "matmul": 120.0, "training": 300.0, "offload": 300.0, "torch": 300.0}
"""The longest a worker may take: one that hangs must leave time for the others."""


def options(arguments: list[str]) -> argparse.Namespace:
    """Parses the command line."""
    parser = argparse.ArgumentParser(prog="scripts/gpu/check", description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, metavar="FILE.json", help="where all figures go (written as they come)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: a rehearsal, which also runs without a GPU")
    parser.add_argument("--preset", default="gpt-1.3b", help="model of the throughput rows (default: %(default)s)")
    parser.add_argument(
        "--microbatches", default=None, metavar="N,N", help="sequences to try, in this order (default: 8,16,4)"
    )
    parser.add_argument(
        "--activations",
        default=",".join(_POLICIES),
        metavar="POLICY,POLICY",
        help="in this order (default: %(default)s)",
    )
    parser.add_argument("--steps", type=int, default=None, help="timed steps a row, together (default: 10)")
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="start no row it may not finish (default: %(default)s)"
    )
    parser.add_argument("--only", default=",".join(SECTIONS), metavar="SECTION,...", help="of: %(default)s")
    parser.add_argument("--xla-flags", default="", metavar="'--xla_...'", help="added to XLA_FLAGS")
    parser.add_argument("--trace", metavar="DIR", help="write a jax.profiler trace of the first training row")
    parser.add_argument("--rehearse-torch", action="store_true", help="run the PyTorch rows without a GPU too, eagerly")
    parser.add_argument("--worker", metavar="JSON", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    given.only = given.only.split(",")
    given.activations = given.activations.split(",")
    sizes = given.microbatches or ("2" if given.quick else "8,16,4")
    given.steps = given.steps or (2 if given.quick else 10)
    if not set(given.only) <= set(SECTIONS):
        parser.error(f"--only {','.join(given.only)}: of {', '.join(SECTIONS)}")
    if not set(given.activations) <= set(_POLICIES):
        parser.error(f"--activations {','.join(given.activations)}: of {', '.join(_POLICIES)}")
    try:
        given.microbatches = [int(size) for size in sizes.split(",")]
    except ValueError:
        parser.error(f"--microbatches {sizes}: integers with commas between them")
    if min(given.microbatches) < 1 or given.steps < 1:
        parser.error("--microbatches and --steps: at least 1")
    if given.preset not in preset_names():
        parser.error(f"--preset {given.preset}: one of {', '.join(preset_names())}")
    return given


class Check:
    """One run: rows as they come, on the screen and in the file."""

    def __init__(self, given: argparse.Namespace, script: Path):
        self.given, self.script, self.trace = given, script, given.trace
        self.began = time.monotonic()
        self.rows: list[Row] = []
        self.seconds: dict[str, float] = {}
        self.longest: dict[str, float] = {}
        self.environment = process.environment(given.xla_flags)
        self.driver = process.driver()

    def left(self) -> float:
        """Seconds of the budget that are left."""
        return 60 * float(self.given.minutes) - (time.monotonic() - self.began)

    def add(self, row: Row) -> None:
        """Takes a row in; those of `program` come with the training rows and are shown at the end."""
        self.rows.append(row)
        if row.section != "program":
            print(row.line(), flush=True)
        self.save()

    def save(self, finished: bool = False) -> None:
        """Writes the file."""
        if self.given.out is None:
            return
        device = next((row.figures for row in self.rows if row.section == "device"), {})
        sections: dict[str, Any] = {}
        for row in self.rows:
            entry = sections.setdefault(row.section, {"title": SECTIONS[row.section], "rows": []})
            entry["seconds"] = self.seconds.get(row.section)
            entry["rows"].append({k: v for k, v in asdict(row).items() if k != "section"})
        given = {k: v for k, v in vars(self.given).items() if k != "worker"}
        content = {
            "finished": finished,
            "failed": self.failed(),
            "device": {**device, "nvidia_smi": self.driver},
            "options": given,
            "environment": {
                k: v for k, v in self.environment.items() if k.startswith(("XLA_", "JAX_", "CUDA_VISIBLE"))
            },
            "sections": sections,
            "summary": paste_lines(self.rows, self.given.preset, self.given.quick),
        }
        write_json(self.given.out, content)

    def failed(self) -> int:
        """How many rows failed."""
        return sum(row.status == "failed" for row in self.rows)

    def work(self, section: str, **spec: Any) -> None:
        """Runs one worker to its end."""
        limit = min(max(self.left(), 0.0) + _GRACE_S, _LIMITS_S[section])
        spec = {"section": section, "quick": self.given.quick, **spec}
        began = time.monotonic()
        process.run(
            [sys.executable, str(self.script), "--worker", json.dumps(spec)], self.environment, limit, self.add, section
        )
        self.longest[section] = max(self.longest.get(section, 0.0), time.monotonic() - began)

    def section(self, name: str) -> bool:
        """Starts a section, if it is wanted."""
        if name not in self.given.only:
            return False
        print(header(name), flush=True)
        self.seconds[name] = -time.monotonic()
        return True

    def done(self, name: str) -> None:
        """Ends a section."""
        self.seconds[name] = round(self.seconds[name] + time.monotonic(), 1)
        self.save()

    def figures(self, section: str) -> list[dict[str, Any]]:
        """Figures of a section's good rows."""
        return [row.figures for row in self.rows if row.section == section and row.status == "ok"]

    def run(self) -> int:
        """Runs everything; returns the exit status."""
        print(header("device"), flush=True)
        self.seconds["device"] = -time.monotonic()
        self.work("device")
        if self.driver:
            print(f"  nvidia-smi: {self.driver}", flush=True)
        self.done("device")
        found = self.figures("device")
        if found and (found[0]["platform"] == "gpu" or self.given.quick):
            self._measure(found[0])
        elif found:
            self.add(Row("device", "GPU", "failed", "no GPU: jax sees none here; --quick rehearses without one"))
        print("\n== paste this", *paste_lines(self.rows, self.given.preset, self.given.quick), sep="\n")
        failed = self.failed()
        print(f"\n{failed} failed, {time.monotonic() - self.began:.0f} s", flush=True)
        self.save(finished=True)
        return 1 if failed else 0

    def _measure(self, device: dict[str, Any]) -> None:
        for name in ("parity", "matmul"):
            if self.section(name):
                self.work(name)
                self.done(name)
        best = max((figures["flops_per_s"] for figures in self.figures("matmul")), default=None)
        shape = train_shape(self.given.preset, self.given.quick)
        common = {
            "shape": asdict(shape),
            "kind": device["kind"],
            "gpu": device["platform"] == "gpu",
            "ceiling": best,
            "steps": self.given.steps,
            "warm_up": 1 if self.given.quick else 2,
            "rehearse_torch": self.given.rehearse_torch,
        }
        plan = train_plan(self.given.microbatches, self.given.activations)
        later: list[TrainConfig] = []
        if self.section("training"):
            compare = "torch" in self.given.only and "torch" in device["versions"]
            later = self._train(plan, common, _GUESS_S["torch"] if compare else 0.0)
            self.done("training")
        if self.section("torch"):
            self._torch(plan, common)
            self.done("torch")
        if self.section("offload"):
            self._offload(common)
            self.done("offload")
        if later:
            print(header("training"), flush=True)
            for config in self._train(later, common, 0.0):
                self.add(Row("training", config.name, "skipped", f"no time left (--minutes {self.given.minutes:g})"))
        if self.section("program"):
            for row in self.rows:
                if row.section == "program":
                    print(row.line())
            self.done("program")

    def _train(self, plan: list[TrainConfig], common: dict[str, Any], reserve: float) -> list[TrainConfig]:
        """Runs what the time allows (the first row without keeping any back); returns the others."""
        if self.given.quick:  # one process for all: tiny programs leave no memory worth freeing
            self.work("training", configs=[asdict(config) for config in plan], trace=self.trace, **common)
            return []
        left = []
        for number, config in enumerate(plan):
            if self._too_large(config):
                self.add(Row("training", config.name, "does not fit", "a smaller microbatch did not"))
            elif self._time_for("training", reserve if number else 0.0):
                trace, self.trace = self.trace, None  # of the first row only
                self.work("training", configs=[asdict(config)], trace=trace, **common)
            else:
                left.append(config)
        return left

    def _offload(self, common: dict[str, Any]) -> None:
        """A process each, since the peak of device memory is a process's; then the ratio that matters."""
        ways = offload_plan(1 if self.given.quick else 2)
        spec = {**common, "shape": asdict(offload_shape(self.given.quick))}
        for group in [ways] if self.given.quick else [[way] for way in ways]:
            if self._time_for("offload"):
                self.work("offload", ways=group, **spec)
            else:
                self.add(
                    Row("offload", group[0]["name"], "skipped", f"no time left (--minutes {self.given.minutes:g})")
                )
        found = {row.name: row.figures for row in self.rows if row.section == "offload" and row.status == "ok"}
        for name in ("state on the host", "state with room on the device"):
            if name in found and "state on the device" in found:
                ratio = found[name]["step_s"] / found["state on the device"]["step_s"]
                note = f"step time over that with all of it on the device: {ratio:.3f} (goal: at most 1.10)"
                self.add(Row("offload", f"{name}, ratio", "ok", note, {"ratio": ratio, "step_s": None}))

    def _too_large(self, config: TrainConfig) -> bool:
        refused = {row.name for row in self.rows if row.section == "training" and row.status == "does not fit"}
        smaller = (
            TrainConfig(config.activations, size) for size in self.given.microbatches if size < config.microbatch
        )
        return any(other.name in refused for other in smaller)

    def _torch(self, plan: list[TrainConfig], common: dict[str, Any]) -> None:
        """The policies that PyTorch has too, at the microbatch of our first row for each."""
        if not (common["gpu"] or self.given.rehearse_torch):
            self.add(Row("torch", "PyTorch", "skipped", "no GPU"))
            return
        done = {row.name: row.figures for row in self.rows if row.section == "training" and row.status == "ok"}
        first = {config.activations: config for config in reversed(plan) if config.accumulate == 1}
        for policy in ("full", "none"):
            if policy not in first:
                continue
            config = first[policy]
            if policy != "full" and config.name not in done:
                self.add(Row("torch", config.name, "skipped", "ours was not measured"))
            elif not self._time_for("torch"):
                self.add(Row("torch", config.name, "skipped", f"no time left (--minutes {self.given.minutes:g})"))
            else:
                self.work("torch", configs=[asdict(config)], ours=[done.get(config.name)], **common)

    def _time_for(self, section: str, reserve: float = 0.0) -> bool:
        """Whether one more row like the section's longest so far fits into the budget."""
        need = 1.1 * self.longest[section] if section in self.longest else _GUESS_S[section]
        return self.given.quick or self.left() - reserve >= need


def main(script: Path) -> int:
    """Entry: the run itself, or one of its workers."""
    given = options(sys.argv[1:])
    if given.worker is not None:
        from checks import worker

        return worker.run(given.worker)
    try:
        return Check(given, script).run()
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
