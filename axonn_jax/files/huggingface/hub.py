"""Hugging Face Hub: download of models and data sets by name into the cache, and upload of models."""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from axonn_jax.core.errors import UserError
from axonn_jax.core.terminal import redraws

# Every process of a run downloads by itself, because settings are checked before the processes are connected. The cache
# locks each file, so one of the processes that share it downloads and the others wait. All end up with the same commit:
# a run whose processes' settings differ is stopped.

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?!.*(?:--|\.\.))([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?", re.ASCII)
_FOLDER = re.compile(r"(?:model|dataset)s--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
"""Patterns of config, tokenizer and template files in a repository."""
# No pickles, which may run code, and no weights in formats that are not read.
_MODEL = (*SMALL_FILES, "model*.safetensors", "model.safetensors.index.json")
_NOUNS = {"model": "a model", "dataset": "a data set"}


class HubName(NamedTuple):
    """Name of a repository on the Hub."""

    repo: str
    """Owner and name, separated by a slash."""
    revision: str | None
    """Branch, tag or commit; None: the default branch."""


def hub_name(text: str | Path) -> HubName | None:
    """Parse org/name or org/name@revision; None for any other text, and for paths.

    A text is a path if it exists, or has no revision and its parent folder exists, such as the mistyped runs/typo.
    """
    match = _NAME.fullmatch(str(text))
    if match is None or os.path.lexists(text) or (not match[2] and os.path.isdir(os.path.dirname(text))):
        return None
    return HubName(match[1], match[2])


def resolve_path(
    text: str | Path, field: str, accepted: str, kind: Kind = "model", patterns: Sequence[str] = _MODEL
) -> Path:
    """Return a path unchanged, or the cache directory of a name on the Hub after downloading its files.

    Args:
        text: A path, or org/name or org/name@revision.
        field: Name of the text in errors.
        accepted: Paths that would be accepted, for errors.
        kind: Kind of the repository.
        patterns: Patterns of the files to download, matched against paths in the repository.

    Raises:
        UserError: The download fails, and not all files are in the cache.
    """
    if (name := hub_name(text)) is None:
        return Path(text)
    with _asking(name, field, str(text), f"{accepted}, or {_NOUNS[kind]} on the Hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        class Silent(tqdm):  # type: ignore[misc, type-arg]
            def __init__(self, *args: object, **options: object):
                super().__init__(*args, **{**options, "disable": True})

        shown = kind == "model" and redraws(sys.stderr)  # `prepare` shows the progress of data itself
        folder = snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=[*patterns],
            tqdm_class=tqdm if shown else Silent,
        )
        return Path(folder)


def commit_of(folder: Path) -> str:
    """Return org/name@commit of a directory in the cache; an empty string for any other directory."""
    match = _FOLDER.fullmatch("/".join(folder.resolve().parts[-3:]))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else ""


def check_push(text: str, field: str) -> None:
    """Raise ``UserError`` unless the text names a repository and the user is logged in to the Hub."""
    match = _NAME.fullmatch(text)
    if match is None or match[2]:
        raise UserError(field, text, "the name of a model on the Hub, as org/name")
    with _asking(HubName(text, None), field, text, "a model on the Hub that you may write"):
        from huggingface_hub import HfApi

        HfApi().whoami()


def push(folder: Path, text: str, field: str) -> str:
    """Upload a directory to a model on the Hub, created as a private one if needed; return org/name@commit.

    Raises:
        UserError: The upload fails.
    """
    accepted = f"a model on the Hub that you may write; {str(folder)!r} is complete, for `hf upload`"
    with _asking(HubName(text, None), field, text, accepted):
        from huggingface_hub import HfApi

        api, full_model = HfApi(), any(folder.glob("model*.safetensors"))
        api.create_repo(text, private=True, exist_ok=True)
        # Delete weights of an earlier upload that this one does not replace. An upload of adapters deletes nothing.
        commit = api.upload_folder(
            repo_id=text,
            folder_path=folder,
            commit_message="Upload by axonn-jax convert",
            delete_patterns=["model*.safetensors", "model.safetensors.index.json"] if full_model else None,
        )
        return f"{text}@{commit.oid}"


@contextlib.contextmanager
def _asking(name: HubName, field: str, text: str, accepted: str) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UserError(field, text, f"{accepted}; for names on the Hub pip install 'axonn_jax[hub]'") from None
    except Exception as error:  # errors of the library, its HTTP client and the disk have no other common base
        raise UserError(field, text, f"{accepted}; {_why(name, error)}") from None


def _why(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return f"it is gated: ask for access on {constants.ENDPOINT}/{name.repo}, then `hf auth login`"
    if isinstance(error, errors.RepositoryNotFoundError):
        return f"{constants.ENDPOINT} has none of this name, or a private one: `hf auth login`"
    if isinstance(error, errors.RevisionNotFoundError):
        return f"it has no revision {name.revision!r}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set"
    if isinstance(error, errors.LocalEntryNotFoundError):
        cause = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} does not answer"
        return f"{cause}, and the cache {constants.HF_HUB_CACHE} does not have all of it"
    message = getattr(error, "strerror", None) or next(iter(str(error).strip().splitlines()), type(error).__name__)
    return f"{constants.ENDPOINT} fails: {message[:200]}"
