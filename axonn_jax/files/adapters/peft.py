"""Reader and writer of PEFT's `adapter_config.json` and `adapter_model.safetensors`; no torch."""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.adapters.config import (
    PLACES,
    TARGETS,
    AdaptedLayer,
    LoraConfig,
    Target,
    check_shape,
    layers_of,
    targets_of,
)
from axonn_jax.core.errors import UserError, nearest
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.options import typed
from axonn_jax.files.adapters.export import Arrays
from axonn_jax.files.huggingface.entries import entries_of
from axonn_jax.files.huggingface.files import TensorFiles
from axonn_jax.files.huggingface.pretrained import read_object
from axonn_jax.files.huggingface.tensor_map import Bounds, TensorMap

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_MOST_CONFIG = 1 << 20
_MODULES: Mapping[Target, str] = {target: f"{target}_proj" for target in TARGETS}
# Keys that do not change the function. `layers_to_transform` is among them because a layer it leaves out has no arrays,
# which is an error of its own.
_IDLE = frozenset({
    "auto_mapping", "base_model_name_or_path", "inference_mode", "layers_pattern", "layers_to_transform",
    "megatron_core", "peft_version", "qalora_group_size", "revision", "task_type",
})  # fmt: skip
_READ = ("peft_type", "r", "lora_alpha", "lora_dropout", "target_modules", "use_rslora", "init_lora_weights", "bias")
# Initializations that leave the base unchanged; others, such as "pissa", modify its weights.
_PLAIN_STARTS = (True, False, "gaussian")


class StoredAdapter(NamedTuple):
    """Adapter read from, or to be written to, PEFT's files."""

    config: LoraConfig
    arrays: Arrays
    base: str
    """Name or path of the base as recorded in the adapter; empty if there is none."""


def is_adapter(directory: Path) -> bool:
    """Return True if the directory holds a PEFT adapter."""
    return os.path.lexists(directory / CONFIG)


def read_config(directory: Path, field: str) -> tuple[LoraConfig, str]:
    """Return the settings of a stored adapter and its base; raises ``UserError`` for unsupported settings."""
    raw = read_object(directory / CONFIG, field, _MOST_CONFIG)
    if raw.get("peft_type") != "LORA":
        raise UserError(f"{field}: peft_type", raw.get("peft_type"), "LORA: no other adapters are applied")
    for key, value in raw.items():
        if key not in _READ and key not in _IDLE and value:
            accepted = "null, false or empty: what it asks for is not applied here"
            raise UserError(f"{field}: {key}", value, accepted)
    if raw.get("bias", "none") != "none":
        raise UserError(f"{field}: bias", raw["bias"], "none: biases of adapters are not applied here")
    if (start := raw.get("init_lora_weights", True)) not in _PLAIN_STARTS:
        accepted = "true, false or gaussian: others change the base too, which is not applied here"
        raise UserError(f"{field}: init_lora_weights", start, accepted)
    targets = raw.get("target_modules")
    if targets == "all-linear":  # PEFT's shorthand excludes the head
        targets = [*_MODULES.values()]
    elif isinstance(targets, str) and targets:
        # A regular expression. Its matches are the modules with stored arrays, so it need not be evaluated.
        stored = {name.removesuffix(".lora_A.weight") for name in TensorFiles(directory, field, TENSORS).tensors}
        targets = [name for name in _MODULES.values() if any(module.endswith(f".{name}") for module in stored)]
    if not isinstance(targets, list) or not targets:
        accepted = "a list of names or a regular expression, as PEFT saves it, of layers whose arrays are there"
        raise UserError(f"{field}: target_modules", raw.get("target_modules"), accepted)
    targets_by_module = {name: target for target, name in _MODULES.items()}
    for name in targets:
        if name not in targets_by_module:
            accepted = f"among {', '.join(targets_by_module)}{nearest(str(name), targets_by_module)}"
            raise UserError(f"{field}: target_modules", name, accepted)
    settings = {"rank": raw.get("r"), "alpha": raw.get("lora_alpha"), "rslora": raw.get("use_rslora", False)}
    settings["dropout"] = raw.get("lora_dropout", 0.0)
    target_names = [target for target, name in _MODULES.items() if name in targets]
    config = typed(LoraConfig, {**settings, "targets": target_names}, f"{field}: {CONFIG}")
    if not config.adapts:
        raise UserError(f"{field}: r", config.rank, "at least 1")
    base = raw.get("base_model_name_or_path")
    return config, base if isinstance(base, str) else ""


def read_adapter(directory: Path, shape: ModelShape, field: str) -> StoredAdapter:
    """Return a stored adapter for a model of these sizes; raises ``UserError`` as `checked_files` does."""
    config, base, files = checked_files(directory, shape, field)
    arrays = dict[str, NDArray[np.generic]]()

    def read_full(name: str) -> NDArray[np.generic]:
        return files.read(name, tuple((0, length) for length in files.tensors[name].shape)).astype(np.float32)

    for layer, _, theirs, columns in _targets(shape, config):
        a, b = layer.arrays
        first = read_full(f"{_PREFIX}{theirs}.lora_A.weight")
        second = {theirs: read_full(f"{_PREFIX}{theirs}.lora_B.weight")}
        arrays[a] = np.concatenate([*([arrays[a]] if a in arrays else []), first.T], 1)
        bounds = tuple((0, size) for size in columns.size)
        zero = np.zeros(1, np.float32)

        def read(name: str, bounds: Bounds, tensors: Mapping[str, np.ndarray] = second) -> np.ndarray:
            shape = tuple(stop - start for start, stop in bounds)
            return (
                tensors[name][tuple(slice(*ends) for ends in bounds)]
                if name in tensors
                else np.zeros(shape, np.float32)
            )

        arrays[b] = arrays.get(b, zero) + columns.read(bounds, read, np.dtype(np.float32))
    return StoredAdapter(config, arrays, base)


def checked_files(directory: Path, shape: ModelShape, field: str) -> tuple[LoraConfig, str, TensorFiles]:
    """Return the settings, base and files of a stored adapter; reads headers but no tensors.

    Raises:
        UserError: A setting is not supported, or a tensor is missing, unexpected or of the wrong size for a model of
            these sizes.
    """
    config, base = read_config(directory, field)
    check_shape(shape, config)
    files = TensorFiles(directory, field, TENSORS)
    unused = set(files.tensors)
    for layer, _, theirs, columns in _targets(shape, config):
        for end, size in (("A", (config.rank, layer.a[0])), ("B", columns.theirs[theirs])):
            name = f"{_PREFIX}{theirs}.lora_{end}.weight"
            if name not in files.tensors:
                raise UserError(f"{field}: tensor {name}", None, f"an array of shape {size}")
            if (stored := files.tensors[name].shape) != size:
                raise UserError(f"{field}: shape of {name}", stored, f"{size}, for an adapter of this base")
            unused.discard(name)
    if unused:
        raise UserError(f"{field}: tensor {min(unused)}", "not applied", "only those of the adapters of target_modules")
    return config, base, files


def write_adapter(folder: Path, adapter: StoredAdapter, shape: ModelShape) -> None:
    """Write an adapter in PEFT's format; raises ``UserError`` for a family whose modules PEFT names differently."""
    from safetensors.numpy import save

    config, arrays = adapter.config, adapter.arrays
    tensors = {}
    for layer, number, theirs, columns in _targets(shape, config):
        a, b = (arrays[name] for name in layer.arrays)
        a_rows = a[:, number * config.rank : (number + 1) * config.rank].T
        parts = dict(zip(columns.theirs, columns.split(b), strict=True))
        tensors[f"{_PREFIX}{theirs}.lora_A.weight"] = np.ascontiguousarray(a_rows, np.float32)
        tensors[f"{_PREFIX}{theirs}.lora_B.weight"] = np.ascontiguousarray(parts[theirs], np.float32)
    # Not `save_file`, which creates files that only their owner can read.
    (folder / TENSORS).write_bytes(save(tensors, metadata={"format": "pt"}))
    alpha, available = config.alpha, targets_of(shape)
    written = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": adapter.base or None,
        "r": config.rank,
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "target_modules": [_MODULES[target] for target in TARGETS if target in config.targets and target in available],
        "use_rslora": config.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / CONFIG).write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")


def _targets(shape: ModelShape, config: LoraConfig) -> Iterator[tuple[AdaptedLayer, int, str, TensorMap]]:
    # For each target of each layer: its index within the layer, the name of PEFT's module, and the map of B.
    entries = {entry.ours: entry for entry in entries_of(shape)}
    for layer in layers_of(shape, config):
        entry = entries[f"{layer.name}.kernel"]
        assert isinstance(entry, TensorMap)
        if not entry.transposed:
            raise UserError("adapter", "a model of GPT-2's family", "one whose projections PEFT knows by _proj names")
        names = {name.removesuffix(".weight"): (size[0], config.rank) for name, size in entry.theirs.items()}
        b = replace(entry, size=layer.b, theirs=names)
        theirs = dict(zip(PLACES[layer.path], names, strict=True))
        for number, target in enumerate(layer.targets):
            yield layer, number, theirs[target], b
