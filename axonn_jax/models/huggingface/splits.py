"""Files of a data set on the Hub: those of a split, downloaded into the cache, from which the readers stream them.

Splits are those that the data set's card lists, else those that names of files tell. Nothing of the data set runs.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from axonn_jax.errors import UserError, first_of, refused
from axonn_jax.models.huggingface.hub import commit_of, found, hub_name

_ACCEPTED = "an existing folder or file, or a pattern that matches files"
_CARD = "README.md"
_SMALL = (_CARD, ".gitattributes")  # the latter is in every repository, also where nothing else matches
_SPLIT = re.compile(r"(?:([\w.-]+)/)?(\w[\w.-]*)")
_BETWEEN = "[-._0-9 /]"  # words of a file's path
_ENDINGS = [f".{kind}{packed}" for kind, packed in product(("parquet", "jsonl", "ndjson"), ("", ".gz", ".zst"))]


class DataFiles(NamedTuple):
    """Files of documents."""

    source: Path
    """The folder of the files; or on this machine also one file, or a glob."""
    include: Sequence[str]
    """Patterns of the files to read in it."""
    facts: Mapping[str, str]
    """The data set on the Hub with its commit, and the split; empty on this machine."""

    @property
    def paths(self) -> list[Path]:
        """Paths of the files of a data set on the Hub, in order; the source on this machine."""
        if not self.facts:
            return [self.source]
        paths = {path.relative_to(self.source).as_posix(): path for path in self.source.rglob("*") if path.is_file()}
        return [paths[name] for name in sorted(paths) if any(fnmatchcase(name, pattern) for pattern in self.include)]


def files_of(
    source: Path, split: str | None, include: Sequence[str], report: Callable[[str, int, int], None]
) -> DataFiles:
    """Return the files of a source; those of a data set on the Hub are downloaded if needed.

    Args:
        source: A path, or org/name or org/name@revision.
        split: SPLIT or CONFIG/SPLIT of a data set on the Hub; None: train.
        include: Patterns of files, in the place of a split's.
        report: Called with "downloading" before that, and with two zeros.

    Raises:
        UserError: the Hub does not give the files, or the data set has none of this split.
    """
    name = hub_name(source)
    if split is not None and (name is None or include):
        accepted = "left out with --include, which names files" if name else "left out: SOURCE is no name on the Hub"
        raise UserError("--split", split, accepted)
    if name is None:
        return DataFiles(source, include, {})
    report("downloading", 0, 0)
    card = found(source, "SOURCE", _ACCEPTED, "dataset", _SMALL)
    facts = {"hub": commit_of(card)}
    if include:
        globs = [pattern if "/" in pattern else f"*{pattern}*" for pattern in include]  # of these `scan` chooses
        return DataFiles(found(facts["hub"], "SOURCE", _ACCEPTED, "dataset", [*globs, *_SMALL]), include, facts)
    facts["split"] = split or "train"
    patterns = [*_patterns(card / _CARD, facts["split"])]
    folder = found(facts["hub"], "SOURCE", _ACCEPTED, "dataset", [*patterns, *_SMALL])
    if not (files := DataFiles(folder, patterns, facts)).paths:
        alternatives = (
            "--include names other files, and org/name@refs/convert/parquet the Hub's own tables of most formats"
        )
        raise UserError("--split", facts["split"], f"a split with tables or JSON Lines; {alternatives}")
    return files


def _patterns(card: Path, split: str) -> Iterator[str]:
    """Yield patterns of a split's files, each with a slash, so that paths are compared with it."""
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
    """Return a pattern with a slash that matches the same paths."""
    return pattern if "/" in pattern or not pattern[:1].isalnum() else f"[{pattern[0]}/]{pattern[1:]}"


def _configs(card: Path) -> dict[str, Mapping[str, Any]]:
    """The configs that a data set's card lists, by name."""
    if not card.is_file():
        return {}
    from huggingface_hub import metadata_load

    with refused("SOURCE", str(card), "a data set whose card can be read"):
        listed = (metadata_load(card) or {}).get("configs")
    entries = listed if isinstance(listed, list) else []
    return {str(entry.get("config_name", "default")): entry for entry in entries if isinstance(entry, dict)}


def _select_config(configs: Mapping[str, Mapping[str, Any]], config: str | None) -> Mapping[str, Any] | None:
    """The config of a name; of no name the one marked as default, of that name, or alone."""
    if config is not None:
        return configs.get(config)
    marked = [entry for entry in configs.values() if entry.get("default") is True]
    only_config = [*configs.values()] if len(configs) == 1 else []
    return next(iter([*marked, *filter(None, [configs.get("default")]), *only_config]), None)


def _splits(files: Any) -> dict[str, list[str]]:
    """Patterns of files by split, as a config has them; without a split all are of train."""
    splits = dict[str, list[str]]()
    for entry in files if isinstance(files, list) else [files]:
        spec = entry if isinstance(entry, dict) else {"split": "train", "path": entry}
        paths = spec.get("path")
        texts = [path for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]
        if texts:
            splits.setdefault(str(spec.get("split")), []).extend(texts)
    return splits
