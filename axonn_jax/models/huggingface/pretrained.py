"""Pretrained directory: config.json, safetensors and the small files beside them, Hugging Face's own or a converted."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from axonn_jax.documents import TOML_BYTES, check_pointer, read_bytes, read_json, replace_whole
from axonn_jax.errors import UserError, typed_arguments
from axonn_jax.models.config import ModelShape
from axonn_jax.models.declared.comparison import differences
from axonn_jax.models.huggingface.families import shape_from_config
from axonn_jax.models.presets import shape_in
from axonn_jax.readers import ADAPTER, CONFIG, WEIGHTS, reader_of

TOKENIZER = "tokenizer.json"
FOLDER = "pretrained"
"""Folder of a run with the small files of the model that it began from."""
SETTINGS, GENERATION = "tokenizer_config.json", "generation_config.json"
TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates that have names."""
OF_TOKENIZER = re.compile(
    r"(special_tokens_map|added_tokens|vocab)\.json|tokenizer[\w-]*\.[\w.-]+|chat_template\.(json|jinja)|merges\.txt"
    rf"|{TEMPLATES}(/[^/]+\.jinja)?"
)
"""Names of the files that make a tokenizer, and of their folder."""
SMALL = re.compile(rf"(config|generation_config)\.json|{OF_TOKENIZER.pattern}")
"""Names of the files that are carried byte for byte."""
NAMED_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
"""Settings that each name a special token of any tokenizer, in transformers' order."""
UNSPLIT = "PreTrainedTokenizerFast"
"""Class of a tokenizer that splits texts as its tokenizer.json says."""
_UNSPLIT = {"internlm2", "minicpm3", "ministral", "mistral", "mistral3", "mixtral", "phi3", "phimoe", "pixtral"}
"""Types of models whose tokenizers transformers gives this class."""
ADDED, _SPECIAL = "added_tokens.json", "special_tokens_map.json"
SAVE_TOKENIZER = "AutoTokenizer.from_pretrained(...).save_pretrained(...) of transformers writes it"
_MOST_CONFIG = 16 << 20
_MOST_SMALL = 256 << 20
_MOST_MANIFEST = 64 << 20
_MERGE = "a whole model: merge the adapter into its base first, by `axonn-jax convert --merge`"


def is_pretrained(directory: Path) -> bool:
    """Return True if a directory is a model in Hugging Face's layout, sound or not, and no training run."""
    return reader_of(directory) is not None


def root_of(directory: Path) -> Path:
    """The directory that links may lead into: itself; in the Hub's cache, where all are links, the one with the files.

    That is the model's, or the whole cache where models share files (huggingface_hub from 2.4 with Xet).
    """
    resolved = directory.resolve()
    model = resolved.parent.parent
    if resolved.parent.name != "snapshots" or not (model / "blobs").is_dir():
        return resolved
    return model.parent if (model.parent / "blobs").is_dir() else model


def no_model(directory: Path, field: str, missing: str) -> UserError:
    """Return the error for a directory without a file, which names the files in its place."""
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


def read_config(directory: Path, field: str) -> dict[str, Any]:
    """The content of config.json; raises ``UserError``, which calls the directory `field`."""
    return read_object(directory / CONFIG, field, _MOST_CONFIG, lambda: no_model(directory, field, CONFIG))


def read_object(path: Path, field: str, most: int, missing: Callable[[], UserError] | None = None) -> dict[str, Any]:
    """The object in a JSON file of at most `most` bytes; raises ``UserError``, or `missing` where there is no file."""
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
    """The sizes of the model in a directory: a pretrained one's, a run's, or those of a checkpoint (a step_N).

    Raises ``UserError``, which calls the directory `field`, where it is none of them, or its sizes cannot be read.
    """
    path = Path(directory)
    if is_pretrained(path):
        return shape_from_config(read_config(path, field))
    shape, why = None, "an existing directory left by `axonn-jax train`, with config.toml; a pretrained one or a step_N"
    try:
        if (path / "config.toml").is_file():
            shape = shape_in({"config": read_bytes(path / "config.toml", TOML_BYTES, inside=path).decode("utf-8-sig")})
        elif (path / "manifest.json").is_file():
            manifest = read_json(path / "manifest.json", _MOST_MANIFEST, inside=path)
            shape = shape_in(manifest["content"]["run"]) if "content" in manifest else None  # that of prepared data
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        why = f"a directory with the sizes of a model; {error}"
    if shape is None:
        raise UserError(field, str(path), why)
    return shape


def check_shape(shape: ModelShape, directory: Path, field: str) -> None:
    """Raise ``UserError`` unless a directory holds the model of these sizes; one line lists the fields that differ.

    Sequences may be shorter where positions are rotary, not longer.
    """
    stored = shape_from_config(read_config(directory, field))
    wrong = differences(shape, stored)
    if stored.positions == "rope" and shape.seq_len > stored.seq_len:
        wrong.append(f"model.seq_len = {shape.seq_len} ({stored.seq_len} there)")
    if wrong:
        raise UserError(field, str(directory), f"a model as [model] says; {', '.join(wrong)}")


def template_names(directory: Path) -> list[str]:
    """Return the names of a directory's chat templates in a folder; raise ``OSError`` for an unreadable folder."""
    names = os.listdir(directory / TEMPLATES) if (directory / TEMPLATES).is_dir() else []
    return [f"{TEMPLATES}/{name}" for name in sorted(names) if name.endswith(".jinja")]


def small_names(directory: Path, pattern: re.Pattern[str] = SMALL) -> list[str]:
    """Return the names of config, tokenizer and templates; raise ``OSError`` for an unreadable directory."""
    names = [*sorted(os.listdir(directory)), *template_names(directory)]
    return [name for name in names if pattern.fullmatch(name) and not (directory / name).is_dir()]


def small_files(directory: Path, field: str, pattern: re.Pattern[str] = SMALL) -> Iterator[tuple[str, bytes]]:
    """Names and bytes of config, tokenizer and templates. Raises ``UserError`` for one that cannot be read."""
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
    """Write a directory's small files into a folder and return them.

    Raises ``UserError`` for one that cannot be read or written.
    """
    files = dict(small_files(source, field))
    try:
        write_small_files(folder, files)
    except OSError as error:
        accepted = f"a directory whose small files can be kept in {folder}; {error.strerror}"
        raise UserError(field, str(source), accepted) from None
    return files


def write_small_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write files into a folder that is made if needed; raise ``OSError``, which names the file, for one that fails."""
    for name, raw in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        replace_whole(folder / name, raw)


def end_tokens(directory: Path, vocab: Mapping[str, int], field: str) -> Iterator[int]:
    """Yield ids of the tokens that end a text, as a directory's files name them; the one behind a document first.

    Chat models name further ones in generation_config.json, and the end of a turn there alone. Of an empty vocabulary
    nothing is known: any id is taken.
    """
    root, numbers = root_of(directory), set(vocab.values())
    for name in (SETTINGS, CONFIG, GENERATION):
        try:
            if name == SETTINGS:
                raw: Any = tokenizer_settings(directory, field)
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


def tokenizer_settings(directory: Path, field: str) -> dict[str, Any]:
    """The settings of a tokenizer as transformers reads them; raises ``UserError`` for a file that cannot be read.

    The tokens of special_tokens_map.json and added_tokens.json count where tokenizer_config.json has no
    `added_tokens_decoder`; that key then has those of the latter. config.json may say which class splits texts.
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
        names = [settings.get(key) for key in NAMED_TOKENS] + (extra if isinstance(extra, list) else [])
        # Objects of a type's name are read later in transformers, and match no text here.
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
    """A config.json that names another dtype, in the spelling that it has; the same bytes where it names this one."""
    config = json.loads(raw)
    key = "dtype" if "dtype" in config else "torch_dtype"
    if config.get(key) == dtype:
        return raw
    return (json.dumps(config | {key: dtype}, indent=2, ensure_ascii=False) + "\n").encode()
