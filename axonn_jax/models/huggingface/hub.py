"""Hub: Hugging Face's models and data sets by name, downloaded into its cache, and models uploaded.

Every process of a run asks for itself. The cache locks each file, so of the processes that share a cache one downloads
and the others wait for it, with no exchange between them: a run's settings are checked before its processes have met.
All are then held to one commit, as settings that differ end a run.
"""

import contextlib
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from axonn_jax.errors import UserError
from axonn_jax.terminal import redraws

Kind = Literal["model", "dataset"]
_NAME = re.compile(r"(?!.*(?:--|\.\.))([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(?:@(\S+))?", re.ASCII)
_FOLDER = re.compile(r"(?:model|dataset)s--([^/]+)--([^/]+)/snapshots/([0-9a-f]{40})")
SMALL_FILES = (
    *("config.json", "generation_config.json", "tokenizer*.json", "tokenizer.model", "special_tokens_map.json"),
    *("added_tokens.json", "vocab.json", "merges.txt", "chat_template.json", "chat_template.jinja"),
    "additional_chat_templates/*.jinja",
)
"""Patterns of config, tokenizer and templates in a repository."""
_MODEL = (*SMALL_FILES, "model*.safetensors", "model.safetensors.index.json")  # no pickles, no weights of other formats
_NOUNS = {"model": "a model", "dataset": "a data set"}


class HubName(NamedTuple):
    """Name of a repository on the Hub."""

    repo: str
    """Owner and name, with a slash."""
    revision: str | None
    """Branch, tag or commit; None for the default branch."""


def hub_name(text: str | Path) -> HubName | None:
    """Return the parts of a text of the form org/name or org/name@revision; None for others, and for paths.

    Paths are those that exist, and without a revision also those in a folder that exists, as runs/typo.
    """
    match = _NAME.fullmatch(str(text))
    if match is None or os.path.lexists(text) or (not match[2] and os.path.isdir(os.path.dirname(text))):
        return None
    return HubName(match[1], match[2])


def found(text: str | Path, field: str, accepted: str, kind: Kind = "model", wanted: Sequence[str] = _MODEL) -> Path:
    """Return a path as it is, or the directory in the cache of a name on the Hub, whose files are downloaded if needed.

    Args:
        text: A path, or org/name or org/name@revision.
        field: The name of the text in errors.
        accepted: The paths that would be accepted, for errors.
        kind: The kind of the repository.
        wanted: Patterns of the files to download, compared with paths in the repository.

    Raises:
        UserError: the Hub does not give the files, and they are not all in the cache.
    """
    if (name := hub_name(text)) is None:
        return Path(text)
    with _asking(name, field, str(text), f"{accepted}, or {_NOUNS[kind]} on the Hub"):
        from huggingface_hub import snapshot_download
        from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

        class Silent(tqdm):  # type: ignore[misc, type-arg]
            def __init__(self, *args: Any, **options: Any):
                super().__init__(*args, **{**options, "disable": True})

        shown = kind == "model" and redraws(sys.stderr)  # of data `prepare` shows a line of its own
        folder = snapshot_download(
            name.repo,
            repo_type=kind,
            revision=name.revision,
            allow_patterns=[*wanted],
            tqdm_class=tqdm if shown else Silent,
        )
        return Path(folder)


def commit_of(folder: Path) -> str:
    """Return org/name@commit of a directory in the cache, an empty text for any other directory."""
    match = _FOLDER.fullmatch("/".join(folder.resolve().parts[-3:]))
    return f"{match[1]}/{match[2]}@{match[3]}" if match else ""


def check_push(text: str, field: str) -> None:
    """Raise ``UserError`` for a text that is no name of a repository, and where the Hub does not know who asks."""
    match = _NAME.fullmatch(text)
    if match is None or match[2]:
        raise UserError(field, text, "the name of a model on the Hub, as org/name")
    with _asking(HubName(text, None), field, text, "a model on the Hub that you may write"):
        from huggingface_hub import HfApi

        HfApi().whoami()


def push(folder: Path, text: str, field: str) -> str:
    """Upload a directory to a model on the Hub, a new and private one if there is none; return org/name@commit.

    Of a whole model those weights are removed that an earlier upload left and this one does not have.

    Raises:
        UserError: the Hub does not take the files.
    """
    accepted = f"a model on the Hub that you may write; {str(folder)!r} is complete, for `hf upload`"
    with _asking(HubName(text, None), field, text, accepted):
        from huggingface_hub import HfApi

        api, full_model = HfApi(), any(folder.glob("model*.safetensors"))
        api.create_repo(text, private=True, exist_ok=True)
        commit = api.upload_folder(
            repo_id=text,
            folder_path=folder,
            commit_message="Upload by axonn-jax convert",
            delete_patterns=["model*.safetensors", "model.safetensors.index.json"] if full_model else None,
        )
        return f"{text}@{commit.oid}"


@contextlib.contextmanager
def _asking(name: HubName, field: str, text: str, accepted: str) -> Iterator[None]:
    """Make a ``UserError`` of whatever the library raises where it is missing, offline or refused."""
    try:
        yield
    except ImportError:
        raise UserError(field, text, f"{accepted}; for names on the Hub pip install 'axonn_jax[hub]'") from None
    except Exception as error:  # the library's, its HTTP client's and the disk's share no other base
        raise UserError(field, text, f"{accepted}; {_why(name, error)}") from None


def _why(name: HubName, error: Exception) -> str:
    """Return one line on why the Hub does not do as asked."""
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
