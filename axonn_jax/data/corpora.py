"""Corpora of a run: prepared directories that are mixed by weight, and held-out sets beside them."""

import hashlib
import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from fractions import Fraction
from math import gcd, lcm
from pathlib import Path

from axonn_jax.data.manifest import TOKENIZER, Manifest, checksum
from axonn_jax.errors import UserError
from axonn_jax.options import PathText, Positive, Seed, Settings


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
    """Part of the training rows, out of the sum of all weights; 0 where the directory is only evaluated."""
    setting: str = "data.path"
    """Setting that the directory is of, the name in errors."""

    @property
    def evaluated(self) -> bool:
        """True if the directory has held-out rows."""
        return self.manifest.splits["valid"].tokens > 0

    @property
    def targets(self) -> Fraction:
        """Part of the training's targets, as `weight` is of its rows: of packed rows not every token is one."""
        split = self.manifest.splits["train"]
        return self.weight * Fraction(split.counted or split.tokens, split.tokens)

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name this setting in errors of the directory, which a manifest raises for `data.path`."""
        with _error_context(self.setting):
            yield


@dataclass(frozen=True)
class Corpora:
    """Prepared directories of which training takes rows by weight, and those that are only evaluated.

    Rows have one global number g = 0, 1, 2, ... Which corpus row g is of, and which of that corpus's own rows, follows
    from g and the weights alone, in a time that does not depend on g. Of the first g rows each corpus has its share, to
    at most half a row for each other corpus, so every batch and every part of a run is mixed alike.
    """

    trained: tuple[Corpus, ...]
    """Corpora by falling weight; the order in which they are written says nothing."""
    sets: tuple[Corpus, ...] = ()
    """Held-out sets."""

    @classmethod
    def load(cls, path: str, mix: Mapping[str, float], held_out: Mapping[str, str]) -> "Corpora":
        """Read the manifests and tokenizers of the directories in a run's `[data]`.

        Raises:
            UserError: not one of path and mix is given, a directory is not whole, is given twice or does not go with
                the others, or a name is a corpus's.
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
        trained.sort(key=lambda corpus: (-corpus.weight, corpus.manifest.fingerprint("train")))
        return cls(tuple(trained), tuple(sets))

    def counts(self, number: int) -> list[int]:
        """Return how many of the first `number` rows are of each corpus."""
        remaining, weights, counts = number, sum(corpus.weight for corpus in self.trained), list[int]()
        for corpus in self.trained:  # its part of what those before it leave, rounded
            counts.append((2 * remaining * corpus.weight + weights) // (2 * weights))
            remaining, weights = remaining - counts[-1], weights - corpus.weight
        return counts

    def place(self, number: int) -> tuple[int, int]:
        """Return the corpus that a row is of, by its index, and the row's own number in it, through all its epochs."""
        previous = self.counts(number)
        corpus = next(at for at, count in enumerate(self.counts(number + 1)) if count > previous[at])
        return corpus, previous[corpus]

    def epochs(self, number: int, seq_len: int) -> dict[str, float]:
        """Return the epochs of each corpus of several, by name, in the first `number` rows."""
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
        """Return the mean of values of those evaluated, by the targets of training; of sets where no corpus is."""
        weights = {corpus.name: corpus.targets for corpus in self.evaluated if corpus.weight}
        weights = weights or {corpus.name: Fraction(1) for corpus in self.evaluated}
        total = sum(weights.values())  # of any size: a quotient is a float, a product need not be one
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
        """Raise ``UserError`` where a split in use has no sequence so long, or rows of another length."""
        for corpus in self.all:
            used = [("train", corpus.weight > 0), ("valid", corpus.evaluated or not corpus.weight)]
            with corpus.named():
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
        manifest.check_tokenizer()  # small, and the run's directory gets a copy
    return Corpus(manifest, name, weight, setting)


def _integer_weights(weights: Collection[float]) -> list[int]:
    """Return the smallest whole numbers that are to each other as decimal weights, as typed, are."""
    exact = [Fraction(repr(weight)) for weight in weights]
    scale = lcm(*(weight.denominator for weight in exact))
    scaled = [int(weight * scale) for weight in exact]
    return [weight // gcd(*scaled) for weight in scaled]


def _names(paths: Collection[str], setting: str) -> list[str]:
    """Return the last parts of paths, as many as make them distinct; raise ``UserError`` for one given twice."""
    parts = [Path(os.path.abspath(path)).parts for path in paths]
    for path, components in zip(paths, parts, strict=True):
        if parts.count(components) > 1:
            raise UserError(setting, path, "directories of which none is given twice")
    ends = [[components[-length:] for length in range(1, len(components) + 1)] for components in parts]
    return [
        "/".join(next(end for end in components if sum(end in other for other in ends) == 1)) for components in ends
    ]


def _check_alike(corpus: Corpus, first: Manifest) -> None:
    """Raise ``UserError`` where data has other tokens, or other rows, than the first directory."""
    manifest, path = corpus.manifest, str(corpus.manifest.path)
    ours, theirs = ((m.tokenizer_sha256 or checksum(m.path / TOKENIZER), m.eot_id) for m in (manifest, first))
    if ours != theirs:
        accepted = f"data with the tokenizer of {first.path}, as `axonn-jax prepare --tokenizer {first.path}` takes it"
        raise UserError(corpus.setting, path, accepted)
    if manifest.row != first.row:
        kind = f"rows of {first.row - 1} tokens (`prepare --seq-len`)" if first.packed else "a stream of tokens"
        raise UserError(corpus.setting, path, f"{kind}, as {first.path} is")
