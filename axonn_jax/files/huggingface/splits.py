"""Data sets on the Hub: selection and download of a split's files."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import NamedTuple

from axonn_jax.core.errors import UserError, first_of, refused
from axonn_jax.files.huggingface.hub import commit_of, hub_name, resolve_path

# Splits are those listed in the data set's card, or else inferred from file names. No code of a data set is run.

_ACCEPTED = "an existing folder or file, or a pattern that matches files"
_CARD = "README.md"
_SMALL = (_CARD, ".gitattributes")  # every repository has the latter, even if nothing else matches
_SPLIT = re.compile(r"(?:([\w.-]+)/)?(\w[\w.-]*)")
_BETWEEN = "[-._0-9 /]"  # separators between the words of a path
_ENDINGS = [f".{kind}{packed}" for kind, packed in product(("parquet", "jsonl", "ndjson"), ("", ".gz", ".zst"))]


class DataFiles(NamedTuple):
    """Files that hold documents."""

    source: Path
    """Folder of the files; for local data also a single file or a glob."""
    include: Sequence[str]
    """Patterns of the files to read."""
    facts: Mapping[str, str]
    """Data set on the Hub with its commit, and the split; empty for local data."""

    @property
    def paths(self) -> list[Path]:
        """Sorted paths of a Hub data set's files; the source itself for local data."""
        if not self.facts:
            return [self.source]
        paths = {path.relative_to(self.source).as_posix(): path for path in self.source.rglob("*") if path.is_file()}
        return [paths[name] for name in sorted(paths) if any(fnmatchcase(name, pattern) for pattern in self.include)]


def files_of(
    source: Path, split: str | None, include: Sequence[str], report: Callable[[str, int, int], None]
) -> DataFiles:
    """Return the files of a source, after downloading those of a data set on the Hub.

    Args:
        source: A path, or org/name or org/name@revision.
        split: SPLIT or CONFIG/SPLIT of a data set on the Hub; None: train.
        include: Patterns of files to read instead of a split.
        report: Progress callback, called with "downloading" and two zeros before a download.

    Raises:
        UserError: The download fails, or the data set has no such split.
    """
    name = hub_name(source)
    if split is not None and (name is None or include):
        accepted = "left out with --include, which names files" if name else "left out: SOURCE is no name on the Hub"
        raise UserError("--split", split, accepted)
    if name is None:
        return DataFiles(source, include, {})
    report("downloading", 0, 0)
    # The card first: it lists the splits, and pins the commit that the data files are then downloaded from.
    card = resolve_path(source, "SOURCE", _ACCEPTED, "dataset", _SMALL)
    facts = {"hub": commit_of(card)}
    if include:
        globs = [pattern if "/" in pattern else f"*{pattern}*" for pattern in include]  # `scan` filters further
        return DataFiles(resolve_path(facts["hub"], "SOURCE", _ACCEPTED, "dataset", [*globs, *_SMALL]), include, facts)
    facts["split"] = split or "train"
    patterns = [*_patterns(card / _CARD, facts["split"])]
    folder = resolve_path(facts["hub"], "SOURCE", _ACCEPTED, "dataset", [*patterns, *_SMALL])
    if not (files := DataFiles(folder, patterns, facts)).paths:
        alternatives = (
            "--include names other files, and org/name@refs/convert/parquet the Hub's own tables of most formats"
        )
        raise UserError("--split", facts["split"], f"a split with tables or JSON Lines; {alternatives}")
    return files


def _patterns(card: Path, split: str) -> Iterator[str]:
    # Every pattern contains a slash, so that it is matched against paths rather than file names.
    if (match := _SPLIT.fullmatch(split)) is None:
        raise UserError("--split", split, "the name of a split, such as train, or CONFIG/train")
    config, name = match.groups()
    below = f"{config}/" if config else ""
    if configs := _configs(card):
        if (config_entry := _select_config(configs, config)) is None:
            raise UserError("--split", split, f"CONFIG/{name}, with CONFIG one of {first_of([*configs])}")
        below = f"{folder}/" if isinstance(folder := config_entry.get("data_dir"), str) else ""
        if splits := _splits(config_entry.get("data_files")):
            if name not in splits:
                raise UserError("--split", split, f"one of {first_of([*splits])}")
            yield from (_with_slash(f"{below}{path}".replace("**/", "*")) for path in splits[name])
            return
    for head, tail, ending in product(("", f"*{_BETWEEN}"), ("", f"{_BETWEEN}*"), _ENDINGS):
        yield _with_slash(f"{below}{head}{name}{tail}{ending}")


def _with_slash(pattern: str) -> str:
    # A slash in a character class makes no difference to the paths that match.
    return pattern if "/" in pattern or not pattern[:1].isalnum() else f"[{pattern[0]}/]{pattern[1:]}"


def _configs(card: Path) -> dict[str, Mapping[str, object]]:
    if not card.is_file():
        return {}
    from huggingface_hub import metadata_load

    with refused("SOURCE", str(card), "a data set whose card can be read"):
        listed = (metadata_load(card) or {}).get("configs")
    entries = listed if isinstance(listed, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, dict)}


def _select_config(configs: Mapping[str, Mapping[str, object]], config: str | None) -> Mapping[str, object] | None:
    # Without a name: the config marked as default, or named default, or the only one.
    if config is not None:
        return configs.get(config)
    marked = [entry for entry in configs.values() if entry.get("default") is True]
    only_config = [*configs.values()] if len(configs) == 1 else []
    return next(iter([*marked, *filter(None, [configs.get("default")]), *only_config]), None)


def _splits(files: object) -> dict[str, list[str]]:
    # Patterns by split. Entries without a split belong to train.
    splits = dict[str, list[str]]()
    for entry in files if isinstance(files, list) else [files]:
        spec = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = spec.get("path")
        texts = [path for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]
        if texts:
            splits.setdefault(str(spec.get("split")), []).extend(texts)
    return splits
