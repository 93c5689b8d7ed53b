"""A worker: the process of one section, started by `main`; the device's memory is free again when it ends."""

import importlib
import importlib.metadata
import importlib.util
import json
from typing import Any

from checks.report import Row, attempt, to_stdout

MODULES = {"parity": "parity", "matmul": "matmul", "training": "training", "offload": "offload", "torch": "torch_gpt"}
"""The module of each section but `device`; each has a `run`."""


def run(text: str) -> int:
    """Runs the section that a JSON spec names; rows go to standard output."""
    spec: dict[str, Any] = json.loads(text)
    if spec["section"] == "device":
        attempt(to_stdout, "device", "device", device)
    else:
        importlib.import_module(f"checks.{MODULES[spec['section']]}").run(spec, to_stdout)
    return 0


def device() -> Row:
    """What jax sees, and which versions of what."""
    import jax

    found = jax.devices()[0]
    stats = found.memory_stats() or {}
    names = ("jax", "jaxlib", "flax", "optax", "numpy", "torch")
    versions = {name: importlib.metadata.version(name) for name in names if importlib.util.find_spec(name)}
    figures = {
        "platform": found.platform,
        "kind": found.device_kind,
        "devices": len(jax.devices()),
        "bytes_limit": stats.get("bytes_limit"),
        "platform_version": str(getattr(found.client, "platform_version", "")).replace("\n", " ").strip(),
        "cudnn": _cudnn_version(),
        "versions": versions,
    }
    shown = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Row("device", found.device_kind, "ok", f"{found.platform}; {shown}", figures)


def _cudnn_version() -> int | None:
    """cuDNN's version as jax knows it; the name is private, so any surprise means only that it is not shown."""
    try:
        from jax._src.lib import cuda_versions

        return None if cuda_versions is None else int(cuda_versions.cudnn_get_version())
    except Exception:
        return None
