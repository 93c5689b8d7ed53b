"""A run directory and prepared data with one file changed, and what the commands that read it may do."""

import ctypes
import hashlib
import json
import os
import random
import shutil
from dataclasses import dataclass
from pathlib import Path

from forking import PICTURES, TRAINING, Done, Forks
from mutations import ESCAPES, another_file, bytes_of, json_of, spelled, toml_of

from axonn_jax.pipe.timeline.spans import Span
from axonn_jax.pipe.timeline.trace import write_trace

SECRET = "SECRET-OF-ANOTHER-DIRECTORY"
CONFIG = """[model]
layers = 1
hidden = 8
heads = 2
seq_len = 8
[data]
path = "data"
[grid]
pipe = 2
[train]
steps = 2
global_batch = 2
microbatches = 2
eval_batches = 1
optimizer = "sgd"
[checkpoint]
every = 1
"""
RUN = Path("runs/run")
NEWEST = RUN / "checkpoints" / "step_00000002"
TARGETS = {
    "checkpoint": (40, ("inspect", "inspect", "generate", "train")),
    "part": (16, ("inspect", "generate", "train")),
    "older": (4, ("inspect", "train")),
    "config": (12, ("generate", "generate", "train")),
    "metrics": (10, ("train",)),
    "timeline": (16, ("timeline",)),
    "tokenizer": (8, ("generate",)),
    "memory": (1, ("inspect", "train")),
    "data": (14, ("train",)),
    "shard": (4, ("train",)),
    "machine": (12, ("plan", "simulate")),
}
"""By what is changed: how often, and the commands that read it, of which a case runs one."""
LIMIT_S, LIMIT_BYTES = 10, 2 << 30
"""Of the processors' time, and of memory; a command that hangs is ended after three times as long."""


@dataclass(frozen=True)
class Place:
    """Sound directories that cases copy, and what lies beside them."""

    sound: Path
    cases: Path
    forks: Forks

    @property
    def elsewhere(self) -> Path:
        return self.cases / "elsewhere"


def trained_place(root: Path) -> Place:
    """Prepares data and trains two steps in a pipeline of two."""
    place = untrained_place(root, TRAINING)
    sound, copies = place.sound, place.elsewhere
    shutil.rmtree(sound / RUN)
    (sound / "text").mkdir()
    for number in range(4):
        lines = [f"the grid of {number} and batch {n} weights\n" for n in range(60)]
        (sound / "text" / f"{number}.txt").write_text("".join(lines))
    (sound / "run.toml").write_text(CONFIG)
    for argv in (
        ["prepare", "text", "data", "--vocab", "280", "--include", "*.txt", "--holdout", "0.3"],
        ["train", "run.toml"],
    ):
        done = place.forks.run(argv, sound, 120)
        assert done.status == 0, done.err.decode()
    shutil.rmtree(sound / "text")
    shutil.copytree(sound / NEWEST, copies, dirs_exist_ok=True)
    for name in ("config.toml", "tokenizer.json", "metrics.jsonl", "timeline.json"):
        shutil.copyfile(sound / RUN / name, copies / name)
    return place


def untrained_place(root: Path, modules: tuple[str, ...] = PICTURES) -> Place:
    """A machine file and the timeline of a run: made in no time."""
    place = Place(root / "sound", root / "cases", Forks(root, modules, JAX_NUM_CPU_DEVICES="2"))
    (place.sound / RUN).mkdir(parents=True)
    place.elsewhere.mkdir(parents=True)
    (place.elsewhere / "secret.txt").write_text(SECRET)
    shipped = Path(__file__).parents[2] / "axonn_jax" / "planning" / "machines" / "perlmutter.toml"
    shutil.copyfile(shipped, place.sound / "machine.toml")
    ran = (("F0.0", 0, "forward"), ("F1.0", 1, "forward"), ("B1.0", 1, "backward"), ("B0.0", 0, "backward"))
    spans = [Span(rank, name, kind, at, at + 1.0, 2) for at, (name, rank, kind) in enumerate(ran)]
    write_trace(place.sound / RUN / "timeline.json", spans)
    return place


def target_of(number: int) -> str:
    """What a case changes."""
    return _drawn(number)[1]


def _drawn(number: int) -> tuple[random.Random, str]:
    draw = random.Random(f"case {number}")
    return draw, draw.choices(list(TARGETS), [weight for weight, _ in TARGETS.values()])[0]


def command(random: random.Random, name: str, more: bool = False) -> list[str]:
    """A command line; `train` mostly finds nothing left to do, which reads as much, or does one step with `more`."""
    options = {
        "inspect": [str(RUN), *random.choice([[], [], ["--json"], ["--fast"], ["--fast", "--json"]])],
        "generate": [str(RUN), "--prompt", "the grid", "--tokens", "2", "--json"],
        "train": ["run.toml", "--grid.pipe", "1", "--train.steps", "3" if more else "1"],
        "timeline": [str(RUN), *random.choice([[], ["--json"], ["--replay", "1f1b"]])],
        "plan": ["--model", "gpt2", "--devices", "8", "--machine", "machine.toml", "--batch-tokens", "65536"],
        "simulate": ["--model", "gpt2", "--devices", "8", "--machine", "machine.toml", "--batch-tokens", "65536"],
    }
    return [name, *options[name]]


def run_case(place: Place, number: int) -> tuple[str, str]:
    """Changes one file as the case's number says and runs what reads it; returns what changed and what went wrong."""
    draw, target = _drawn(number)
    folder = place.cases / "case"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.sound, folder)
    changed = f"case {number}: {_change(draw, target, folder, place.elsewhere)}"
    before, names = _content(place.elsewhere), sorted(os.listdir(place.cases))
    more = draw.random() < 0.03
    with Watch(place.elsewhere) as watch:
        limit = LIMIT_S * (2 if more else 1)  # compiling a step takes longer
        done = place.forks.run(command(draw, draw.choice(TARGETS[target][1]), more), folder, 3 * limit)
    fault = _fault(done, limit)
    linked = changed.endswith("elsewhere") and target not in ("checkpoint", "part", "older")
    if not linked and watch.touched():
        fault = fault or f"read {', '.join(watch.touched())} outside its directory"
    if _content(place.elsewhere) != before or sorted(os.listdir(place.cases)) != names:
        fault = fault or "wrote outside its directory"
    return changed, f"{' '.join(done.argv)}: {fault}" if fault else ""


def _change(draw: random.Random, target: str, folder: Path, elsewhere: Path) -> str:
    files = {
        "checkpoint": NEWEST / "manifest.json",
        "older": RUN / "checkpoints" / "step_00000001" / "manifest.json",
        "config": RUN / "config.toml",
        "metrics": RUN / "metrics.jsonl",
        "timeline": RUN / "timeline.json",
        "tokenizer": RUN / "tokenizer.json",
        "memory": RUN / "memory.json",
        "data": Path("data") / draw.choice(["manifest.json", "manifest.json", "tokenizer.json"]),
        "shard": Path("data") / draw.choice(["train-00000.bin", "valid-00000.bin"]),
        "machine": Path("machine.toml"),
    }
    if target == "part":
        parts = (folder / NEWEST / "part_000").rglob("*")
        files["part"] = draw.choice(sorted(p.relative_to(folder) for p in parts if p.is_file()))
    path = folder / files[target]
    raw = path.read_bytes()
    kind = draw.choices(["file", "bytes", "structure"], [2, 3, 6])[0]
    if kind == "file" and path.name != "machine.toml":
        copy = elsewhere / path.name
        other = copy if copy.exists() else elsewhere / "secret.txt"
        return f"{files[target]}: {another_file(draw, path, other)}"
    structure = path.suffix in (".json", ".jsonl", ".toml") and kind == "structure"
    what, changed = _structured(draw, path, raw) if structure else bytes_of(draw, raw)
    path.write_bytes(changed)
    forged = target in ("part", "shard") and draw.random() < 0.5
    if forged:
        _forge(folder, path)
    return f"{files[target]}: {what}{' (forged)' if forged else ''}"


def _structured(draw: random.Random, path: Path, raw: bytes) -> tuple[str, bytes]:
    if path.suffix == ".toml":
        what, text = toml_of(draw, raw.decode())
        return what, text.encode()
    if path.suffix == ".jsonl":
        lines = raw.decode().splitlines()
        at = draw.randrange(len(lines))
        what, value = json_of(draw, json.loads(lines[at]))
        lines[at] = spelled(value)
        return what, ("\n".join(lines) + "\n").encode()
    value = json.loads(raw)
    if path.parent.name.startswith("step_") and draw.random() < 0.9:
        what, content = json_of(draw, value["content"])
        return what, _signed(content)
    what, value = json_of(draw, value)
    if path.name == "timeline.json":  # an event a line, as it is written
        events = value.get("traceEvents", [])
        if isinstance(events, list):
            lines = ",\n".join(map(spelled, events))
            return what, f'{{"displayTimeUnit": "ms", "traceEvents": [\n{lines}\n]}}\n'.encode()
    return what, spelled(value).encode()


def _signed(content: object) -> bytes:
    """A checkpoint's manifest with the checksum of its content."""
    spelling = {"sort_keys": True, "indent": 1}
    digest = hashlib.sha256((spelled(content, **spelling) + "\n").encode()).hexdigest()
    return (spelled({"content": content, "sha256": digest}, **spelling) + "\n").encode()


def _forge(folder: Path, path: Path) -> None:
    """Writes the sizes and checksums of a changed file into the manifest above it."""
    size, digest = path.stat().st_size, hashlib.sha256(path.read_bytes()).hexdigest()
    if path.is_relative_to(folder / NEWEST):
        manifest = folder / NEWEST / "manifest.json"
        content = json.loads(manifest.read_bytes())["content"]
        content["files"][path.relative_to(folder / NEWEST).as_posix()] = {"bytes": size, "sha256": digest}
        manifest.write_bytes(_signed(content))
        return
    manifest = folder / "data" / "manifest.json"
    value = json.loads(manifest.read_bytes())
    for split in value["splits"].values():
        for shard in split["shards"]:
            if shard["name"] == path.name:
                shard |= {"sha256": digest, "tokens": size // 2}
        split["tokens"] = sum(shard["tokens"] for shard in split["shards"])
    manifest.write_text(json.dumps(value))


def _fault(done: Done, limit_s: float) -> str:
    out, err = done.out.decode("utf-8", "replace"), done.err.decode("utf-8", "replace")
    errors = [line for line in err.splitlines() if line.startswith("error")]
    if done.ended:
        return done.ended
    if done.status not in ((0, 1, 2) if done.argv[0] == "inspect" else (0, 2)):
        return f"status {done.status}: {err[-300:]}"
    if "Traceback" in err or len(errors) > 1 or (done.status == 2) != bool(errors):
        return f"status {done.status}, {len(errors)} error lines: {err[-600:]}"
    if done.cpu_s > limit_s or done.peak_bytes > LIMIT_BYTES:
        return f"{done.cpu_s:.1f} s, {done.peak_bytes >> 20} MiB"
    if len(done.out) + len(done.err) > 100_000:
        return f"{len(done.out)} and {len(done.err)} bytes of output: {err[:200]!r}"
    if raw := sorted({char for char in out + err if not char.isprintable() and char != "\n"} - {"\r"}):
        return f"raw {raw} in {out + err!r:.600}"
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    return "told a secret" if SECRET in out + err or digest in out + err or ESCAPES in out + err else ""


def _content(folder: Path) -> dict[str, tuple[int, str]]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(p): (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}


class Watch:
    """Whether any process opens a file of a directory, which the kernel tells (inotify)."""

    _OPENED = 0x20

    def __init__(self, folder: Path):
        self._folder = folder

    def __enter__(self) -> "Watch":
        libc = ctypes.CDLL(None, use_errno=True)
        self._queue = libc.inotify_init1(os.O_NONBLOCK)
        for path in (self._folder, *(p for p in self._folder.rglob("*") if p.is_dir())):
            assert libc.inotify_add_watch(self._queue, os.fsencode(path), self._OPENED) >= 0
        return self

    def __exit__(self, *_: object) -> None:
        try:
            events = os.read(self._queue, 1 << 16)
        except BlockingIOError:
            events = b""
        os.close(self._queue)
        self._names, at = set(), 0
        while at < len(events):
            length = int.from_bytes(events[at + 12 : at + 16], "little")
            self._names.add(events[at + 16 : at + 16 + length].rstrip(b"\0").decode() or ".")
            at += 16 + length

    def touched(self) -> list[str]:
        """Names of files that were opened."""
        return sorted(self._names)
