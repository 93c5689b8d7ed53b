"""Pretrained directory: config.json, safetensors and the small files beside them, Hugging Face's own or a converted."""

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from axonn_jax.documents import read_bytes, read_json
from axonn_jax.errors import UserError
from axonn_jax.models.config import ModelShape
from axonn_jax.models.huggingface.families import differences, shape_from_config

CONFIG, TOKENIZER = "config.json", "tokenizer.json"
FOLDER = "pretrained"
"""Where a run keeps the small files of the model that it began from."""
SMALL = re.compile(
    r"(config|generation_config|special_tokens_map|added_tokens|vocab)\.json"
    r"|tokenizer[\w.-]*|chat_template\.(json|jinja)|merges\.txt"
)
"""Names of the files that are carried byte for byte."""
SAVE_TOKENIZER = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
_MOST_CONFIG = 16 << 20
_MOST_SMALL = 256 << 20
_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
_ADAPTERS = ("adapter_config.json", "adapter_model.safetensors")


def is_pretrained(directory: Path) -> bool:
    """Whether a directory is a model in Hugging Face's layout, sound or not, and no training run."""
    names = (CONFIG, *_WEIGHTS, *_ADAPTERS)
    return not (directory / "checkpoints").is_dir() and any(os.path.lexists(directory / name) for name in names)


def root_of(directory: Path) -> Path:
    """The directory that links may lead into: itself, or that of a model in the Hub's cache, where all are links."""
    resolved = directory.resolve()
    cached = resolved.parent.name == "snapshots" and (resolved.parent.parent / "blobs").is_dir()
    return resolved.parent.parent if cached else resolved


def no_model(directory: Path, field: str, missing: str) -> UserError:
    """The refusal of a directory without a file, which says what there is in its place."""
    for pickle in _WEIGHTS[2:]:
        if os.path.lexists(directory / pickle) and missing != CONFIG:
            accepted = (
                "safetensors, as save_pretrained of transformers writes: a pickle may run any code and is not read"
            )
            return UserError(field, str(directory / pickle), accepted)
    for adapter in _ADAPTERS:
        if os.path.lexists(directory / adapter):
            return UserError(field, str(directory / adapter), "a whole model: merge the adapter into its base first")
    return UserError(field, str(directory), f"a directory with {CONFIG} and safetensors; there is no {missing}")


def read_config(directory: Path, field: str) -> dict[str, Any]:
    """The content of config.json; raises ``UserError``, which calls the directory `field`."""
    path = directory / CONFIG
    try:
        config = read_json(path, _MOST_CONFIG, inside=root_of(directory))
    except (FileNotFoundError, NotADirectoryError):
        raise no_model(directory, field, CONFIG) from None
    except OSError as error:
        raise UserError(field, str(path), f"a file that can be read; {error.strerror}") from None
    except ValueError as error:
        raise UserError(field, str(path), f"a config in JSON; {error}") from None
    if not isinstance(config, dict):
        raise UserError(field, str(path), "an object in JSON")
    return config


def check_shape(given: ModelShape, directory: Path, field: str) -> None:
    """Raises ``UserError`` unless a directory holds a model of these sizes; one line lists the fields that differ."""
    stored = shape_from_config(read_config(directory, field))
    if wrong := differences(given, stored):
        raise UserError(field, str(directory), f"a model as [model] says; {', '.join(wrong)}")


def small_files(directory: Path, field: str) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of config, tokenizer and templates. Raises ``UserError`` for one that cannot be read."""
    root = root_of(directory)
    try:
        names = sorted(name for name in os.listdir(directory) if SMALL.fullmatch(name))
    except OSError as error:
        raise UserError(field, str(directory), f"a directory that can be read; {error.strerror}") from None
    if "tokenizer.model" in names and TOKENIZER not in names:
        accepted = f"{TOKENIZER}; the form of sentencepiece is not read: {SAVE_TOKENIZER}"
        raise UserError(field, str(directory / "tokenizer.model"), accepted)
    for name in names:
        try:
            yield name, read_bytes(directory / name, _MOST_SMALL, inside=root)
        except OSError as error:
            raise UserError(field, str(directory / name), f"a file that can be read; {error.strerror}") from None
        except ValueError as error:
            raise UserError(field, str(directory / name), f"a small file; {error}") from None


def end_token(directory: Path, vocab: dict[str, int], field: str) -> int | None:
    """The id of the token behind a text, as tokenizer_config.json or config.json names it; None where neither does."""
    root = root_of(directory)
    for name, key in (("tokenizer_config.json", "eos_token"), (CONFIG, "eos_token_id")):
        try:
            raw = read_json(directory / name, _MOST_CONFIG, inside=root)
        except OSError:
            continue
        except ValueError as error:
            raise UserError(field, str(directory / name), f"an object in JSON; {error}") from None
        value = raw.get(key) if isinstance(raw, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        value = value[0] if isinstance(value, list) and value else value
        if isinstance(value, str) and value in vocab:
            return vocab[value]
        if type(value) is int and 0 <= value < len(vocab):
            return value
    return None


def with_dtype(raw: bytes, dtype: str) -> bytes:
    """A config.json that names another dtype, in the spelling that it has; the same bytes where it names this one."""
    config = json.loads(raw)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) == dtype:
        return raw
    return (json.dumps(config | {key: dtype}, indent=2, ensure_ascii=False) + "\n").encode()
