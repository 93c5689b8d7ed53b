"""What was measured of matmuls, kept for later runs in a file of the user's cache directory."""

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from axonn_jax.documents import read_json, typed
from axonn_jax.tensor.matmul import FORMS, Form
from axonn_jax.tuning import Measured

_FORMAT = 1
_MOST_BYTES = 10_000_000
_FORMS = {str(form): form for form in FORMS}


@dataclass(frozen=True)
class _Kept:
    form: str
    gain: float = 1.0


@dataclass(frozen=True)
class _File:
    format: int
    settings: Mapping[str, Mapping[str, _Kept]]


def cache_file() -> Path:
    """Where the choices of all machines of this user are: below `XDG_CACHE_HOME`, or `~/.cache`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "axonn_jax" / "matmuls.json"


def setting(device: Any) -> str:
    """What a measurement holds for: jax's version, the kind of device, on a CPU also its name and how many cores."""
    kind = device.device_kind
    if device.platform == "cpu":
        kind = f"{_processor()}, {len(os.sched_getaffinity(0))} cores"
    return f"jax {jax.__version__}, {kind}"


def load(file: Path, device: Any) -> tuple[dict[str, Form], str]:
    """The forms measured on such a device, by the product's name, and a line for people where a file is no use."""
    try:
        settings = _settings(file)
        return {name: _FORMS[one.form] for name, one in settings.get(setting(device), {}).items()}, ""
    except FileNotFoundError:
        return {}, ""
    except (OSError, ValueError, KeyError) as error:
        return {}, f"{file} cannot be read as matmul layouts, so it is ignored ({type(error).__name__}: {error})"


def save(file: Path, device: Any, measured: Iterable[Measured]) -> str:
    """Adds measurements to the file, or makes it; returns a line for people where that fails.

    The file is replaced as a whole: who reads it meanwhile sees the old one or the new one.
    """
    settings: dict[str, dict[str, Any]] = {}
    if not load(file, device)[1] and file.exists():
        settings = {kept: {name: asdict(one) for name, one in forms.items()} for kept, forms in _settings(file).items()}
    own = settings.setdefault(setting(device), {})
    for one in measured:
        own[str(one.product)] = {"form": str(one.best), "gain": round(one.gain(one.best), 3)}
    half = file.with_name(f"{file.name}.{os.getpid()}")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        half.write_text(json.dumps({"format": _FORMAT, "settings": settings}, indent=1) + "\n", encoding="utf-8")
        half.replace(file)
    except OSError as error:
        return f"matmul layouts are not kept for later runs: {error.strerror or error} ({file})"
    return ""


def _settings(file: Path) -> Mapping[str, Mapping[str, _Kept]]:
    found = typed(_File, read_json(file, _MOST_BYTES))
    if found.format != _FORMAT:
        raise ValueError("of another version of this package")
    return found.settings


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return "cpu"
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "cpu")
