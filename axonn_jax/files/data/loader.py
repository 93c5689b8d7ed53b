"""Batches of token sequences, the same ones in the same order whatever the grid, from any position on."""

import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from axonn_jax.core.errors import UserError, integer, nearest, typed_arguments
from axonn_jax.files.data.corpora import Corpora, Corpus
from axonn_jax.files.data.goldfish import GoldfishConfig, goldfish
from axonn_jax.files.data.manifest import SPLITS, Manifest, Shard

# Per reader, over all of its corpora: every open shard takes a file descriptor, and a process may only have 1024.
_OPEN_SHARDS = 128


class TokenSamples:
    """Random access to a split: sample ``i`` is tokens ``[i*S, i*S + S + 1)`` of a stream, or row ``i``, as int32.

    Neighbouring samples of a stream share one token: the last target of one is the first input of the next. Rows are
    those of `models.packed`. Several may share one cache of open `shards`.

    Raises:
        UserError: the directory is not a whole prepared one, the split is missing or too short, a sample has a
            token outside of the vocabulary, or a shard's file has changed since the manifest was read.
    """

    def __init__(
        self, path: str | Path | Manifest, split: str, seq_len: int, *, verify: bool = False, shards: Any = None
    ):
        if split not in SPLITS:
            raise UserError("split", split, f"one of {', '.join(SPLITS)}{nearest(split, SPLITS)}")
        integer("model.seq_len", seq_len, 1)
        self.manifest = path if isinstance(path, Manifest) else Manifest.load(path)
        self.seq_len = seq_len
        info = self.manifest.splits[split]
        self.manifest.check_seq_len(seq_len, [split])
        if verify:
            self.manifest.verify([split])
        self._stride = self.manifest.row or seq_len
        self._length = self.manifest.rows(split, seq_len)
        self._shards = info.shards
        self._starts = np.cumsum([0, *(shard.tokens for shard in info.shards)])
        self._open = _open_shards() if shards is None else shards

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> NDArray[np.int32]:
        if not 0 <= index < self._length:
            raise IndexError(f"sample {index} of {self._length}")
        sample = np.empty(self.seq_len + 1, np.int32)
        position, filled = index * self._stride, 0
        shard = int(np.searchsorted(self._starts, position, side="right")) - 1
        while filled < len(sample):
            offset = position + filled - int(self._starts[shard])
            part = self._part(self._shards[shard], offset, len(sample) - filled)
            sample[filled : filled + len(part)] = part  # of words the same bits
            filled += len(part)
            shard += 1
        return sample

    def _part(self, shard: Shard, offset: int, most: int) -> NDArray[np.generic]:
        """Read words of a shard."""
        # Not from a memory map: a file truncated during a run would kill the process with SIGBUS.
        path, size = self.manifest.path, self.manifest.storage.itemsize
        try:
            # Keep a reference while reading: if two threads open a shard at once, the cache keeps one file.
            file = self._open(path / shard.name)
            raw, now = os.pread(file.number, most * size, offset * size), os.fstat(file.number)
        except OSError as error:
            raise UserError("data.path", str(path), f"shard {shard.name} is not readable: {error.strerror}") from None
        if (now.st_size, now.st_mtime_ns) != self.manifest.marks[shard.name]:
            accepted = f"data that stays as it is while it is read; shard {shard.name} has changed"
            raise UserError("data.path", str(path), accepted)
        part = np.frombuffer(raw, self.manifest.storage)
        self.manifest.check_ids(part, shard)
        return part


class _OpenShard:
    """Open file that is closed when the last reference goes away."""

    def __init__(self, path: Path):
        self.number = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        weakref.finalize(self, os.close, self.number)


def _open_shards() -> Callable[[Path], _OpenShard]:
    """Return a cache of open shards."""
    # Not an lru_cache on a method: its reference cycle would keep files open until the garbage collector runs.
    return lru_cache(maxsize=_OPEN_SHARDS)(_OpenShard)


@dataclass(frozen=True, eq=False, repr=False)  # grain prints its source in debugging output
class _Batches:
    """Endless sequence of batches as grain's random-access source; any thread may read."""

    data: Corpora
    samples: tuple[TokenSamples, ...]
    """Samples of each corpus, in the order of `data`."""
    rows: tuple[int, ...]
    stride: int
    start: int
    seed: int | None
    """Seed of the order; None for the stream's own."""
    dropped: GoldfishConfig

    def __len__(self) -> int:
        return sys.maxsize

    def numbers(self, batch: int) -> list[int]:
        """Return the global sample numbers of a batch."""
        return [self.start + batch * self.stride + row for row in self.rows]

    def place(self, number: int) -> tuple[int, int]:
        """Return which corpus, and which sample of its split, has a global number."""
        corpus, row = self.data.place(number)
        samples = len(self.samples[corpus])
        epoch, place = divmod(row, samples)
        if self.seed is None:
            return corpus, place
        from grain.experimental import index_shuffle

        seed = _epoch_key(self.seed, epoch, corpus)
        return corpus, int(index_shuffle(place, max_index=samples - 1, seed=seed, rounds=4))

    def __getitem__(self, batch: int) -> NDArray[np.int32]:
        read = [self._read(*self.place(number)) for number in self.numbers(batch)]
        stacked = np.stack(read) if read else np.empty((0, self.samples[0].seq_len + 1), np.int32)
        if not self.dropped.k:
            return stacked
        return goldfish(stacked, self.dropped.k, self.dropped.h, packed=self.data.packed)

    def _read(self, corpus: int, sample: int) -> NDArray[np.int32]:
        with self.data.trained[corpus].error_context():
            return self.samples[corpus][sample]


@lru_cache(maxsize=64)
def _epoch_key(seed: int, epoch: int, corpus: int) -> int:
    # Not grain's seed + epoch, which makes epoch 1 of seed 0 equal to epoch 0 of seed 1. Nor the same key for every
    # corpus: two corpora of the same length, such as translations, would be drawn sample by sample in parallel.
    key = (epoch, corpus) if corpus else (epoch,)
    return int(np.random.SeedSequence(seed, spawn_key=key).generate_state(1)[0])


class Loader:
    """An endless iterator over batches ``int32 [len(rows), seq_len + 1]`` of a prepared directory.

    Samples have one global number ``g`` = 0, 1, 2, ... through all epochs. Epoch ``e = g // n`` visits each of the
    split's ``n`` samples once, in an order that depends on ``seed`` and ``e`` alone: place ``g % n`` holds the sample
    that grain's ``index_shuffle`` (a keyed permutation of ``range(n)``, so nothing is stored) gives for a key drawn by
    numpy's ``SeedSequence(seed, spawn_key=(e,))``. A batch is the samples ``position + r`` for ``r`` in ``rows``; then
    ``position`` goes up by ``global_batch``. So the next batch depends only on ``seed`` and ``position``. Of several
    corpora each has its own epochs, through its own numbers of samples (`Corpora.place`).

    Args:
        path: The directory, written by `axonn-jax prepare`, or the manifest read from it, or several as corpora.
        split: The split, train or valid.
        seq_len: Tokens of a sequence.
        global_batch: Sequences of a batch over all processes.
        rows: Sequences of the global batch that this process reads; default: all.
        seed: Seed of the order.
        position: Global number of the first sample.
        prefetch: Batches read ahead on one thread, which starts with the first batch; 0: none.
        verify: True if checksums of the data are compared.
        shuffle: False for the stream's own order in every epoch.
        dropped: Targets that do not count (`goldfish`); default: all count.

    Raises:
        UserError: An argument is out of range, or the data is not whole.
    """

    @typed_arguments
    def __init__(
        self,
        path: str | Path | Manifest | Corpora,
        *,
        split: str = "train",
        seq_len: int,
        global_batch: int,
        rows: Sequence[int] | None = None,
        seed: int = 0,
        position: int = 0,
        prefetch: int = 4,
        verify: bool = True,
        shuffle: bool = True,
        dropped: GoldfishConfig = GoldfishConfig(),  # noqa: B008 (frozen)
    ):
        integer("train.global_batch", global_batch, 1)
        rows = range(global_batch) if rows is None else rows
        for row in rows:
            if row not in range(global_batch):
                raise UserError("rows", row, f"rows of the global batch, 0 to {global_batch - 1}")
        for name, value in (("data.seed", seed), ("position", position), ("prefetch", prefetch)):
            integer(name, value, 0)
        if not isinstance(path, Corpora):
            path = Corpora((Corpus(path if isinstance(path, Manifest) else Manifest.load(path)),))
        samples_of = partial(TokenSamples, split=split, seq_len=seq_len, verify=verify, shards=_open_shards())
        self._samples = tuple(samples_of(corpus.manifest) for corpus in path.trained)
        most = max(map(len, self._samples))
        if shuffle and most > 2**32:
            # index_shuffle accepts larger numbers but silently computes in 32 bits.
            raise UserError("model.seq_len", seq_len, f"longer sequences: {most} samples, at most 2**32")
        self._global_batch, self._start, self._prefetch = global_batch, position, prefetch
        dropped.check()
        order = seed if shuffle else None
        self._batches = _Batches(path, self._samples, tuple(rows), global_batch, position, order, dropped)
        self._batches_read = 0
        self._ahead, self._fault = deque[NDArray[np.int32]](), ""
        self._iterator: Any = None

    @property
    def num_samples(self) -> int:
        """The number of samples in an epoch; of several corpora, in all of them."""
        return sum(map(len, self._samples))

    @property
    def manifest(self) -> Manifest:
        """The manifest of the data; of several corpora, that of the largest share."""
        return self._samples[0].manifest

    @property
    def position(self) -> int:
        """The global number of the next batch's first sample; a new loader with this position continues from here."""
        return self._start + self._batches_read * self._global_batch

    def samples(self, batch: int) -> list[int]:
        """Return the global sample numbers of batch ``batch``, counted from the first position given."""
        return self._batches.numbers(batch)

    def place(self, sample: int) -> tuple[int, int]:
        """Return which corpus, and which sample of its split, has the global number ``sample``."""
        return self._batches.place(sample)

    def index(self, sample: int) -> int:
        """Return which sample of the split has the global number ``sample``."""
        return self.place(sample)[1]

    def __iter__(self) -> Iterator[NDArray[np.int32]]:
        return self

    def __next__(self) -> NDArray[np.int32]:
        if not self._ahead:
            self._fault = ""  # read again, so that the fault is raised
            self.ahead(1)
        self._batches_read += 1
        return self._ahead.popleft()

    def ahead(self, batches: int) -> str:
        """Read batches ahead.

        Returns the error behind the batches read, or ""; raises it if no batch could be read before it.
        """
        try:
            while len(self._ahead) < batches and not self._fault:
                if self._iterator is None:
                    self._iterator = self._start_reading()
                self._ahead.append(next(self._iterator))
        except UserError as error:
            if not self._ahead:
                raise
            self._fault = str(error)
        return self._fault

    def first(self, most: int) -> list[NDArray[np.int32]]:
        """Return the first batches, at most so many, of one directory's unshuffled samples, and stop reading.

        Each sample counts once: behind the last of the split a batch is filled up.
        """
        from axonn_jax.core.models.packed import without_targets  # imports jax, which no other reader needs

        batches = [next(self) for _ in range(min(most, -(-self.num_samples // self._global_batch)))]
        self.close()
        behind = [[at >= self.num_samples for at in self.samples(number)] for number in range(len(batches))]
        return [without_targets(batch, np.array(rows, bool)) for batch, rows in zip(batches, behind, strict=True)]

    def close(self) -> None:
        """Stop reading ahead; the next batch starts reading again."""
        self._ahead, self._fault = deque(), ""
        if self._iterator is not None:
            self._iterator.close()
            self._iterator = None

    def _start_reading(self) -> Any:
        import grain  # takes a second to import, which only readers of data should pay

        options = grain.ReadOptions(num_threads=min(self._prefetch, 1), prefetch_buffer_size=self._prefetch)
        iterator = iter(grain.MapDataset.source(self._batches).to_iter_dataset(options))
        iterator.set_state({"next_index": self._batches_read})
        return iterator
