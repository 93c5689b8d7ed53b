"""What a test does to files before it reads them: JSON changed, links and pipes in their places, bytes flipped."""

import hashlib
import json
import os


def edit_json(path, change):
    """Changes what a file's JSON says."""
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))


def render(value):
    """A manifest as a save writes it."""
    return json.dumps(value, sort_keys=True, indent=1) + "\n"


def forge(checkpoint, change):
    """Changes a checkpoint's manifest in place, or gives it a new content, and recomputes the checksum."""
    file = checkpoint / "manifest.json"
    content = json.loads(file.read_text())["content"]
    made = change(content)
    content = content if made is None else made
    file.write_text(render({"content": content, "sha256": hashlib.sha256(render(content).encode()).hexdigest()}))


def flip(path, at):
    raw = bytearray(path.read_bytes())
    raw[at] ^= 1
    path.write_bytes(raw)


def link(name, to):
    """Puts a link into a file's place, in a folder that is given later."""
    return lambda folder: ((folder / name).unlink(missing_ok=True), (folder / name).symlink_to(to))


def pipe(name):
    """As `link`, a pipe, at which a reader would wait."""
    return lambda folder: ((folder / name).unlink(missing_ok=True), os.mkfifo(folder / name))


def huge(name):
    """As `link`, a file of a tebibyte, all of it a hole."""
    return lambda folder: ((folder / name).touch(), os.truncate(folder / name, 1 << 40))
