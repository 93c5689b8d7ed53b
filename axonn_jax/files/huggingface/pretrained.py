"""Pretrained directory, Hugging Face's or a converted one: config.json, tokenizer and other small files."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from axonn_jax.core.checkpoint.readers import ADAPTER, CONFIG, WEIGHTS, reader_of
from axonn_jax.core.documents import TOML_BYTES, check_pointer, parse_toml, read_bytes, read_json, write_atomically
from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.models.comparison import differences
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import shape_in
from axonn_jax.files.huggingface.families import shape_from_config

TOKENIZER = "tokenizer.json"
FOLDER = "pretrained"
"""Folder of a run that holds the small files of its initial model."""
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's named chat templates."""
OF_TOKENIZER = re.compile(
    r"(special_tokens_map|added_tokens|vocab)\.json|tokenizer[\w-]*\.[\w.-]+|chat_template\.(json|jinja)|merges\.txt"
    rf"|{TEMPLATES}(/[^/]+\.jinja)?"
)
"""Pattern of the names of a tokenizer's files and template folder."""
SMALL = re.compile(rf"(config|generation_config)\.json|{OF_TOKENIZER.pattern}")
"""Pattern of the names of files that are copied byte for byte."""
SPECIAL_TOKEN_KEYS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Tokenizer settings that each name a special token, in transformers' order."""
UNSPLIT = "PreTrainedTokenizerFast"
"""Tokenizer class that splits texts as specified in tokenizer.json."""
# Model types for which transformers ignores the configured class and uses this one.
_UNSPLIT = {"internlm2", "minicpm3", "ministral", "mistral", "mistral3", "mixtral", "phi3", "phimoe", "pixtral"}
ADDED, _SPECIAL = "added_tokens.json", "special_tokens_map.json"
SAVE_TOKENIZER = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
# Limits in bytes on files from untrusted directories.
_MOST_CONFIG = 16 << 20
_MOST_SMALL = 256 << 20
_MOST_MANIFEST = 64 << 20
_MERGE = "a whole model: merge the adapter into its base first, by `axonn-jax convert --merge`"


def is_pretrained(directory: Path) -> bool:
    """Return True if a directory has Hugging Face's layout, valid or not, and is not a training run."""
    return reader_of(directory) is not None


def root_of(directory: Path) -> Path:
    """Return the directory that symbolic links in `directory` may point into: itself, or the Hub's cache around it."""
    # All files of a snapshot in the cache are links to `blobs`, in the model's folder or, with huggingface_hub 2.4 and
    # later, in a folder shared by all models.
    resolved = directory.resolve()
    model = resolved.parent.parent
    if resolved.parent.name != "snapshots" or not (model / "blobs").is_dir():
        return resolved
    return model.parent if (model.parent / "blobs").is_dir() else model


def no_model(directory: Path, field: str, missing: str) -> UserError:
    """Return the error for a directory without the file `missing`; it names what the directory has instead."""
    for pickle in WEIGHTS[2:]:
        if os.path.lexists(directory / pickle) and missing != CONFIG:
            accepted = (
                "safetensors, as save_pretrained of transformers writes: a pickle may run any code and is not read"
            )
            return UserError(field, str(directory / pickle), accepted)
    for adapter in ADAPTER:
        if os.path.lexists(directory / adapter):
            return UserError(field, str(directory / adapter), _MERGE)
    if missing != CONFIG and (parts := sorted(path.name for path in directory.glob("*.safetensors"))):
        index = f"{WEIGHTS[1]}, which names the file of each tensor, beside {parts[0]}"
        return UserError(field, str(directory), f"{missing}, or {index}; there is neither")
    return UserError(field, str(directory), f"a directory with {CONFIG} and safetensors; there is no {missing}")


def read_config(directory: Path, field: str) -> dict[str, object]:
    """Return the content of config.json; raises ``UserError``, in which `field` names the directory."""
    return read_object(directory / CONFIG, field, _MOST_CONFIG, lambda: no_model(directory, field, CONFIG))


def read_object(path: Path, field: str, most: int, missing: Callable[[], UserError] | None = None) -> dict[str, object]:
    """Return the object in a JSON file of at most `most` bytes; raises ``UserError``, or `missing()` without a file."""
    try:
        content = read_json(path, most, inside=root_of(path.parent))
    except OSError as error:
        if missing is not None and isinstance(error, FileNotFoundError | NotADirectoryError):
            raise missing() from None
        raise UserError(field, str(path), f"a file that can be read; {error.strerror}") from None
    except ValueError as error:
        raise UserError(field, str(path), f"a config in JSON; {error}") from None
    if not isinstance(content, dict):
        raise UserError(field, str(path), "an object in JSON")
    return content


@typed_arguments
def shape_of(directory: str | Path, field: str = "directory") -> ModelShape:
    """Return the sizes of the model in a directory.

    Args:
        directory: A pretrained directory, a training run, or a checkpoint (step_N).
        field: Name of the directory in errors.

    Raises:
        UserError: The directory is none of these, or its sizes cannot be read.
    """
    path = Path(directory)
    if is_pretrained(path):
        return shape_from_config(read_config(path, field))
    shape, why = None, "an existing directory left by `axonn-jax train`, with config.toml; a pretrained one or a step_N"
    try:
        if (path / "config.toml").is_file():
            text = read_bytes(path / "config.toml", TOML_BYTES, inside=path).decode("utf-8-sig")
            shape = shape_in(parse_toml(text))
        elif (path / "manifest.json").is_file():
            manifest = read_json(path / "manifest.json", _MOST_MANIFEST, inside=path)
            # A manifest without content belongs to prepared data.
            shape = shape_in(manifest["content"]["run"]) if "content" in manifest else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"a directory with the sizes of a model; {error}"
    if shape is None:
        raise UserError(field, str(path), why)
    return shape


def check_shape(shape: ModelShape, directory: Path, field: str) -> None:
    """Raise ``UserError``, which lists the differing fields, unless a directory holds a model of these sizes."""
    stored = shape_from_config(read_config(directory, field))
    wrong = differences(shape, stored)
    # Rotary positions allow shorter sequences than the stored model's, but not longer ones.
    if stored.positions == "rope" and shape.seq_len > stored.seq_len:
        wrong.append(f"model.seq_len = {shape.seq_len} ({stored.seq_len} there)")
    if wrong:
        raise UserError(field, str(directory), f"a model as [model] says; {', '.join(wrong)}")


def template_names(directory: Path) -> list[str]:
    """Return the paths of a directory's named chat templates; raises ``OSError`` if their folder is unreadable."""
    names = os.listdir(directory / TEMPLATES) if (directory / TEMPLATES).is_dir() else []
    return [f"{TEMPLATES}/{name}" for name in sorted(names) if name.endswith(".jinja")]


def small_names(directory: Path, pattern: re.Pattern[str] = SMALL) -> list[str]:
    """Return the names of the small files that match; raises ``OSError`` if the directory is unreadable."""
    names = [*sorted(os.listdir(directory)), *template_names(directory)]
    return [name for name in names if pattern.fullmatch(name) and not (directory / name).is_dir()]


def small_files(directory: Path, field: str, pattern: re.Pattern[str] = SMALL) -> Iterator[tuple[str, bytes]]:
    """Yield names and bytes of the small files that match; raises ``UserError`` if one cannot be read."""
    root = root_of(directory)
    try:
        names = small_names(directory, pattern)
    except OSError as error:
        raise UserError(field, str(directory), f"a directory that can be read; {error.strerror}") from None
    if "tokenizer.model" in names and TOKENIZER not in names:
        accepted = f"{TOKENIZER}; the form of sentencepiece is not read: {SAVE_TOKENIZER}"
        raise UserError(field, str(directory / "tokenizer.model"), accepted)
    for name in names:
        try:
            raw = read_bytes(directory / name, _MOST_SMALL, inside=root)
            check_pointer(raw)
            yield name, raw
        except OSError as error:
            raise UserError(field, str(directory / name), f"a file that can be read; {error.strerror}") from None
        except ValueError as error:
            raise UserError(field, str(directory / name), f"a small file; {error}") from None


def keep_small_files(source: Path, folder: Path, field: str) -> dict[str, bytes]:
    """Copy a directory's small files to a folder, and return their bytes by name.

    Raises:
        UserError: A file cannot be read or written.
    """
    files = dict(small_files(source, field))
    try:
        write_small_files(folder, files)
    except OSError as error:
        accepted = f"a directory whose small files can be kept in {folder}; {error.strerror}"
        raise UserError(field, str(source), accepted) from None
    return files


def write_small_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files to a folder, which is created if needed; raises ``OSError`` naming the file that failed."""
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write_atomically(folder / name, raw)


def end_tokens(directory: Path, vocab: Mapping[str, int], field: str) -> Iterator[int]:
    """Yield ids of the tokens that end a text, that of the end of a document first.

    Args:
        directory: Directory of the model or tokenizer.
        vocab: Ids by token, to resolve and check names and ids; if empty, any id is accepted.
        field: Name of the directory in errors.
    """
    # generation_config.json comes last: chat models add ids there, such as that of the end of a turn.
    root, numbers = root_of(directory), set(vocab.values())
    for name in (SETTINGS, CONFIG, GENERATION):
        try:
            if name == SETTINGS:
                raw = tokenizer_settings(directory, field)
            else:
                raw = read_json(directory / name, _MOST_CONFIG, inside=root)
        except OSError:
            continue
        except ValueError as error:
            raise UserError(field, str(directory / name), f"an object in JSON; {error}") from None
        for key in ("eos_token", "eos_token_id"):
            value = raw.get(key) if isinstance(raw, dict) else None
            for entry in value if isinstance(value, list) else [value]:
                end = entry.get("content") if isinstance(entry, dict) else entry
                end = vocab.get(end) if isinstance(end, str) else end
                if type(end) is int and (end in numbers or not vocab):
                    yield end


def tokenizer_settings(directory: Path, field: str) -> dict[str, object]:
    """Return the settings of a tokenizer as transformers reads them; raises ``UserError`` for an unreadable file.

    Without `added_tokens_decoder` in tokenizer_config.json, it is built from special_tokens_map.json and
    added_tokens.json. The model type in config.json may override the tokenizer's class.
    """
    paths = (directory / name for name in (SETTINGS, _SPECIAL, ADDED, CONFIG))
    settings, special, added, config = (
        read_object(path, field, _MOST_CONFIG) if os.path.lexists(path) else {} for path in paths
    )
    if not settings.get("extra_special_tokens") and "additional_special_tokens" in settings:
        settings["extra_special_tokens"] = settings.pop("additional_special_tokens")
    if wrong := [number for number in added.values() if type(number) is not int]:
        raise UserError(field, str(directory / ADDED), f"a whole number by each token; this one has {wrong[0]!r:.40}")
    if "added_tokens_decoder" not in settings:
        extra, more = settings.get("extra_special_tokens"), special.get("extra_special_tokens")
        settings |= special
        if isinstance(more, list):
            settings["extra_special_tokens"] = [*(extra if isinstance(extra, list) else []), *more]
        extra = settings.get("extra_special_tokens")
        names = [settings.get(key) for key in SPECIAL_TOKEN_KEYS] + (extra if isinstance(extra, list) else [])
        # Entries with a `__type` are only converted to tokens later in transformers, and match no text at this point.
        texts = [
            entry.get("content") if isinstance(entry, dict) and "__type" not in entry else entry for entry in names
        ]
        settings["added_tokens_decoder"] = {
            number: {"content": text, "special": text in texts, "normalized": text not in texts}
            for text, number in added.items()
        }
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    return {**settings, ADDED: added, "tokenizer_class": UNSPLIT if str(config.get("model_type")) in _UNSPLIT else kind}


def with_dtype(raw: bytes, dtype: str) -> bytes:
    """Return a config.json with its dtype replaced, under the key that it uses; unchanged if it has this dtype."""
    config = json.loads(raw)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) == dtype:
        return raw
    return (json.dumps(config | {key: dtype}, indent=2, ensure_ascii=False) + "\n").encode()
