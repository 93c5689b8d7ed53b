"""Who reads which part of the data to check it: processes that see the same files together, each copy once."""

import shutil
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from axonn_jax.core.distributed.host_sync import HostSync
from axonn_jax.core.errors import UserError
from axonn_jax.files.data import manifest
from axonn_jax.files.data.prepare import prepare
from axonn_jax.run.main import verify_data


class ThreadSync(HostSync):
    """Ranks that are threads of this process."""

    def __init__(self, rank, rows, barrier):
        self.rank, self.size, self.rows, self.barrier = rank, len(rows), rows, barrier

    def _all_gather(self, own):
        self.rows[self.rank] = own
        self.barrier.wait(30)
        gathered = np.stack(self.rows)
        self.barrier.wait(30)
        return gathered

    def any_flag_last_call(self, flag):
        raise NotImplementedError


@pytest.fixture
def data(tmp_path):
    """A prepared directory of several shards."""
    (tmp_path / "text").mkdir()
    for number in range(4):
        (tmp_path / "text" / f"{number}.txt").write_text(
            " ".join(f"shard {n * number % 97} of {n}" for n in range(200))
        )
    prepare(tmp_path / "text", tmp_path / "data", vocab=265, include=["*.txt"], holdout=0.3, shard_tokens=400)
    return tmp_path / "data"


def verified(paths, monkeypatch):
    """What every rank's check of its path ended with, and which files were read how often."""
    read, checksum = Counter(), manifest.checksum

    def counting(path):
        read[path] += 1
        return checksum(path)

    monkeypatch.setattr(manifest, "checksum", counting)
    rows, barrier = [None] * len(paths), threading.Barrier(len(paths))

    def one(rank):
        try:
            return verify_data(str(paths[rank]), ThreadSync(rank, rows, barrier))
        except UserError as error:
            return error.accepted

    with ThreadPoolExecutor(len(paths)) as pool:
        return list(pool.map(one, range(len(paths)))), read


def files(path):
    """Those whose checksums the manifest has; the tokenizer's settings say nothing that it does not."""
    return {file for file in path.iterdir() if file.name not in ("manifest.json", "tokenizer_config.json")}


@pytest.mark.parametrize("ranks", [1, 2, 3, 9])
def test_ranks_that_see_the_same_files_read_each_once(ranks, data, monkeypatch):
    assert len(files(data)) > 3
    faults, read = verified([data] * ranks, monkeypatch)
    assert faults == [None] * ranks
    assert read == dict.fromkeys(files(data), 1)


def test_a_host_with_a_copy_of_its_own_reads_that(data, tmp_path, monkeypatch):
    copy = shutil.copytree(data, tmp_path / "copy")  # with the same times of modification
    faults, read = verified([data, data, copy, copy], monkeypatch)
    assert faults == [None] * 4
    assert read == dict.fromkeys(files(data) | files(copy), 1)
    shard = max(files(copy))
    shard.write_bytes(b"\0" * shard.stat().st_size)
    faults, _ = verified([data, data, copy, copy], monkeypatch)
    assert len(set(faults)) == 1
    assert f"{shard.name} is corrupt" in faults[0]


def test_other_data_on_one_host_is_refused_on_all(data, tmp_path, monkeypatch):
    other = shutil.copytree(data, tmp_path / "copy")
    text = (other / "manifest.json").read_text()
    (other / "manifest.json").write_text(text + "\n")
    faults, read = verified([data, other], monkeypatch)
    assert faults == ["the same data on every process; ranks 0 and 1 differ"] * 2
    assert not read
