"""Corpora of a run: prepared directories that are mixed by weight, and held-out sets beside them."""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

from axonn_jax.core.errors import UserError
from axonn_jax.core.options import PathText, Positive, Seed, Settings
from axonn_jax.files.data.manifest import TOKENIZER, Manifest, checksum


@dataclass(frozen=True)
class DataConfig(Settings):
    """Source of the tokens."""

    table = "data"

    path: PathText = ""
    """Directory written by `axonn-jax prepare`, relative to the current directory; or several: `mix`."""
    mix: Mapping[PathText, Positive] = field(default_factory=dict)
    """Directories in the place of `path`, each with its weight in the training rows, such as {"runs/code" = 0.7,
    "runs/text" = 0.3}; as a flag, runs/code=0.7,runs/text=0.3."""
    held_out: Mapping[str, PathText] = field(default_factory=dict)
    """Names of further directories, whose held-out split each evaluation measures as eval_loss/NAME, such as {"math" =
    "runs/math"}; as a flag, math=runs/math."""
    seed: Seed = 0
    """Seed of the order in which training sequences are drawn."""
    verify: bool = True
    """Compare the checksums of shards and tokenizer at the start; the processes together read all data once."""

    @property
    def tokenizer(self) -> str:
        """Directory of the tokenizer that a run keeps: the first, as all have the same."""
        return self.path or next(iter(self.mix))


@dataclass(frozen=True)
class Corpus:
    """One prepared directory of a run."""

    manifest: Manifest
    name: str = ""
    """Name in the log."""
    weight: int = 1
    """Share of the training rows relative to the sum of all weights; 0 if the directory is only evaluated."""
    setting: str = "data.path"
    """Setting that lists the directory, for error messages."""

    @property
    def evaluated(self) -> bool:
        """True if the directory has held-out rows."""
        return self.manifest.splits["valid"].tokens > 0

    @property
    def targets(self) -> Fraction:
        """Share of the training targets: unlike `weight` it leaves out the tokens of packed rows that do not count."""
        split = self.manifest.splits["train"]
        return self.weight * Fraction(split.counted or split.tokens, split.tokens)

    @contextmanager
    def error_context(self) -> Iterator[None]:
        """Replace `data.path`, which a manifest raises errors for, by the directory's setting."""
        with _error_context(self.setting):
            yield


@dataclass(frozen=True)
class Corpora:
    """Prepared directories whose rows training mixes by weight, and held-out sets that are only evaluated.

    Rows have one global number g = 0, 1, 2, ... The corpus of row g and the row's number in it only depend on g and the
    weights, and are computed in constant time. Among the first g rows each corpus has its share to within half a row
    for each other corpus, so every batch and every part of a run is mixed in the same proportions.
    """

    trained: tuple[Corpus, ...]
    """Corpora by descending weight, independent of the order in the configuration."""
    sets: tuple[Corpus, ...] = ()
    """Held-out sets."""

    @classmethod
    def load(cls, path: str, mix: Mapping[str, float], held_out: Mapping[str, str]) -> "Corpora":
        """Read the manifests and tokenizers of the directories in a run's `[data]`.

        Raises:
            UserError: Neither or both of path and mix are set, a directory is damaged, listed twice or incompatible
                with the others, or a held-out set has the name of a corpus.
        """
        if bool(mix) == bool(path):
            conflict = "one of data.path and data.mix, the other left out, as --data.path= and --data.mix= do"
            accepted = (
                conflict if path else "a directory written by `axonn-jax prepare`; or several with weights, data.mix"
            )
            raise UserError("data.path", path, accepted)
        setting, weights = ("data.mix", mix) if mix else ("data.path", {path: 1.0})
        names = _names(weights, setting)
        if clashes := [name for name in held_out if name in names]:
            raise UserError("data.held_out", clashes[0], f"another name than that of a directory of {setting}")
        trained = list(map(_read, weights, names, _integer_weights(weights.values()), [setting] * len(names)))
        sets = [_read(where, name, 0, "data.held_out") for name, where in held_out.items()]
        for corpus in (*trained[1:], *sets):
            _check_alike(corpus, trained[0].manifest)
        # Sort by weight and content, so that the order of the configuration does not change which rows are drawn.
        trained.sort(key=lambda corpus: (-corpus.weight, corpus.manifest.fingerprint("train")))
        return cls(tuple(trained), tuple(sets))

    def counts(self, number: int) -> list[int]:
        """Return how many of the first `number` rows are of each corpus."""
        remaining, weights, counts = number, sum(corpus.weight for corpus in self.trained), list[int]()
        # Each corpus takes its rounded share of the rows that the previous ones leave, so the counts always add up.
        for corpus in self.trained:
            counts.append((2 * remaining * corpus.weight + weights) // (2 * weights))
            remaining, weights = remaining - counts[-1], weights - corpus.weight
        return counts

    def place(self, number: int) -> tuple[int, int]:
        """Return the index of a row's corpus, and the row's number in that corpus, counted through all epochs."""
        previous = self.counts(number)
        corpus = next(at for at, count in enumerate(self.counts(number + 1)) if count > previous[at])
        return corpus, previous[corpus]

    def epochs(self, number: int, seq_len: int) -> dict[str, float]:
        """Return by name the epochs of each corpus in the first `number` rows; empty for a single corpus."""
        counts = zip(self.trained, self.counts(number), strict=True) if len(self.trained) > 1 else ()
        return {corpus.name: count / corpus.manifest.rows("train", seq_len) for corpus, count in counts}

    @property
    def all(self) -> tuple[Corpus, ...]:
        """Every directory."""
        return (*self.trained, *self.sets)

    @property
    def evaluated(self) -> list[Corpus]:
        """Corpora and sets with held-out rows."""
        return [corpus for corpus in self.all if corpus.evaluated]

    def mean(self, values: Mapping[str, float]) -> float:
        """Return the mean of values weighted by training targets; of the sets if no corpus is evaluated."""
        weights = {corpus.name: corpus.targets for corpus in self.evaluated if corpus.weight}
        weights = weights or {corpus.name: Fraction(1) for corpus in self.evaluated}
        # Weights are integers of any size: only their quotients are sure to fit a float.
        total = sum(weights.values())
        return sum(float(weight / total) * values[name] for name, weight in weights.items())

    @property
    def unigram_entropy(self) -> float:
        """The `mean` of the entropies of held-out splits."""
        return self.mean({corpus.name: corpus.manifest.unigram_entropy for corpus in self.evaluated})

    @property
    def packed(self) -> bool:
        """True if the data is rows of `models.packed`."""
        return self.trained[0].manifest.packed

    def rows(self, seq_len: int) -> int:
        """Return the training rows of all corpora together."""
        return sum(corpus.manifest.rows("train", seq_len) for corpus in self.trained)

    def fingerprint(self) -> str:
        """Return the SHA-256 of the training data; of several corpora, with their weights."""
        prints = [corpus.manifest.fingerprint("train") for corpus in self.trained]
        mixed = " ".join(f"{corpus.weight} {digest}" for corpus, digest in zip(self.trained, prints, strict=True))
        return hashlib.sha256(mixed.encode()).hexdigest() if len(prints) > 1 else prints[0]

    def check_seq_len(self, seq_len: int) -> None:
        """Raise ``UserError`` if a split in use is shorter than a sequence or has rows of another length."""
        for corpus in self.all:
            used = [("train", corpus.weight > 0), ("valid", corpus.evaluated or not corpus.weight)]
            with corpus.error_context():
                corpus.manifest.check_seq_len(seq_len, [split for split, needed in used if needed])


@contextmanager
def _error_context(setting: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        name = setting if error.field == "data.path" else error.field
        raise UserError(name, error.value, error.accepted) from None


def _read(path: str, name: str, weight: int, setting: str) -> Corpus:
    with _error_context(setting):
        manifest = Manifest.load(path)
        # Checked even without data.verify: it is small, and the run's directory gets a copy.
        manifest.check_tokenizer()
    return Corpus(manifest, name, weight, setting)


def _integer_weights(weights: Collection[float]) -> list[int]:
    """Return the smallest integers with the same ratios as the weights."""
    # repr is the decimal that the user typed; the binary float would give huge integers.
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    return [weight // gcd(*scaled) for weight in scaled]


def _names(paths: Collection[str], setting: str) -> list[str]:
    """Return the shortest distinct suffixes of the paths; raise ``UserError`` for a duplicate path."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for path, components in zip(paths, parts, strict=True):
        if parts.count(components) > 1:
            raise UserError(setting, path, "directories of which none is given twice")
    ends = [[components[-length:] for length in range(1, len(components) + 1)] for components in parts]
    return [
        "/".join(next(end for end in components if sum(end in other for other in ends) == 1)) for components in ends
    ]


def _check_alike(corpus: Corpus, first: Manifest) -> None:
    """Raise ``UserError`` if a corpus has another tokenizer or other rows than the first directory."""
    manifest, path = corpus.manifest, str(corpus.manifest.path)
    ours, theirs = ((m.tokenizer_sha256 or checksum(m.path / TOKENIZER), m.eot_id) for m in (manifest, first))
    if ours != theirs:
        accepted = f"data with the tokenizer of {first.path}, as `axonn-jax prepare --tokenizer {first.path}` takes it"
        raise UserError(corpus.setting, path, accepted)
    if manifest.row != first.row:
        kind = f"rows of {first.row - 1} tokens (`prepare --seq-len`)" if first.packed else "a stream of tokens"
        raise UserError(corpus.setting, path, f"{kind}, as {first.path} is")
