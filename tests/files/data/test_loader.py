import hashlib
import os
import shutil
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from damage import edit_json, flip
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_jax.core.errors import UserError
from axonn_jax.files.data import tokenize
from axonn_jax.files.data.loader import Loader, TokenSamples
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare

SEQ = 16


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    root = tmp_path_factory.mktemp("loader")
    (root / "corpus").mkdir()
    for number in range(8):
        text = "".join(f"line {n} of file {number}: {n * n}\n" for n in range(30))
        (root / "corpus" / f"{number}.txt").write_text(text)
    # Shards of 37 tokens: nearly every sample lies across a boundary.
    prepare(root / "corpus", root / "out", vocab=280, include=["*"], holdout=0.2, shard_tokens=37)
    return root / "out"


@pytest.fixture(scope="module")
def whole(prepared):
    """The first samples of the shuffled stream, two epochs and a bit, one by one."""
    loader = Loader(prepared, seq_len=SEQ, global_batch=1, prefetch=0)
    taken = np.concatenate([next(loader) for _ in range(2 * loader.num_samples + 100)])
    taken.flags.writeable = False
    return taken


def take(loader, batches):
    taken = [next(loader) for _ in range(batches)]
    loader.close()
    return taken


@pytest.mark.parametrize("split", ["train", "valid"])
def test_samples_are_windows_of_the_stream(prepared, split):
    samples = TokenSamples(prepared, split, SEQ, verify=True)
    shards = samples.manifest.splits[split].shards
    assert len(shards) > 3
    tokens = np.concatenate([np.fromfile(prepared / s.name, "<u2") for s in shards])
    assert len(samples) == (len(tokens) - 1) // SEQ
    for i in range(len(samples)):
        assert samples[i].dtype == np.int32
        np.testing.assert_array_equal(samples[i], tokens[i * SEQ : i * SEQ + SEQ + 1])
    for outside in (-1, len(samples)):
        with pytest.raises(IndexError):
            samples[outside]
    longest = TokenSamples(prepared, split, len(tokens) - 1)
    np.testing.assert_array_equal(longest[0], tokens)
    assert len(longest) == 1
    with pytest.raises(UserError, match=rf"model\.seq_len = {len(tokens)}: at most {len(tokens) - 1}"):
        TokenSamples(prepared, split, len(tokens))


def test_an_unshuffled_pass_is_the_stream_in_order(prepared):
    loader = Loader(prepared, split="valid", seq_len=SEQ, global_batch=4, shuffle=False)
    samples = TokenSamples(prepared, "valid", SEQ)
    batches = take(loader, -(-len(samples) // 4) + 1)
    got = np.concatenate(batches)
    assert loader.num_samples == len(samples)
    for g, sample in enumerate(got):
        np.testing.assert_array_equal(sample, samples[g % len(samples)])


def test_an_epoch_holds_every_sample_once_and_epochs_differ(prepared, whole):
    loader = Loader(prepared, seq_len=SEQ, global_batch=3)
    n = loader.num_samples
    orders = [[loader.index(e * n + i) for i in range(n)] for e in range(4)]
    assert all(sorted(order) == list(range(n)) for order in orders)
    other = Loader(prepared, seq_len=SEQ, global_batch=3, seed=1)
    orders += [[other.index(e * n + i) for i in range(n)] for e in range(4)]
    assert len({tuple(order) for order in orders}) == 8
    samples = TokenSamples(prepared, "train", SEQ)
    for epoch in range(2):
        for place, index in enumerate(orders[epoch]):
            np.testing.assert_array_equal(whole[epoch * n + place], samples[index])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), batch=st.integers(1, 9), start=st.integers(0, 60), prefetch=st.sampled_from([0, 1, 4]))
def test_any_resume_and_any_batch_size_continue_the_same_stream(prepared, whole, data, batch, start, prefetch):
    first = Loader(prepared, seq_len=SEQ, global_batch=batch, position=start, prefetch=prefetch, verify=False)
    before = data.draw(st.integers(0, 3))
    got = take(first, before)
    assert first.position == start + before * batch
    other = data.draw(st.integers(1, 9))
    position = first.position
    second = Loader(prepared, seq_len=SEQ, global_batch=other, position=position, prefetch=prefetch, verify=False)
    got += take(second, 3)
    end = start + before * batch + 3 * other
    assert second.position == end
    np.testing.assert_array_equal(np.concatenate(got), whole[start:end])


@settings(max_examples=40, deadline=None)
@given(data=st.data(), batch=st.integers(1, 12), position=st.integers(0, 400))
def test_rows_of_all_processes_make_up_the_global_batch(prepared, data, batch, position):
    owner = data.draw(st.lists(st.integers(0, 3), min_size=batch, max_size=batch))
    order = data.draw(st.permutations(range(batch)))
    options = {"seq_len": SEQ, "global_batch": batch, "position": position, "verify": False, "seed": 7}
    expected = take(Loader(prepared, **options), 2)
    got = np.full((2, batch, SEQ + 1), -1, np.int32)
    for process in range(4):
        rows = [row for row in order if owner[row] == process]
        loader = Loader(prepared, rows=rows, **options)
        assert loader.samples(1) == [position + batch + row for row in rows]
        for b, taken in enumerate(take(loader, 2)):
            assert taken.shape == (len(rows), SEQ + 1)
            assert taken.dtype == np.int32
            got[b, rows] = taken
    np.testing.assert_array_equal(got, expected)


def test_position_counts_what_was_taken_not_what_was_read_ahead(prepared, whole):
    loader = Loader(prepared, seq_len=SEQ, global_batch=2, position=5, prefetch=8)
    assert loader.position == 5
    first = next(loader)
    assert loader.position == 7
    loader.close()
    np.testing.assert_array_equal(np.concatenate([first, next(loader)]), whole[5:9])
    assert loader.position == 9
    assert iter(loader) is loader
    loader.close()
    loader.close()


def test_a_position_far_ahead_is_reached_at_once(prepared):
    far = 10**15 + 7
    loader = Loader(prepared, seq_len=SEQ, global_batch=3, position=far)
    epoch, place = divmod(far, loader.num_samples)
    assert 0 <= loader.index(far) < loader.num_samples
    assert take(loader, 1)[0].shape == (3, SEQ + 1)
    order = {loader.index(epoch * loader.num_samples + i) for i in range(loader.num_samples)}
    assert order == set(range(loader.num_samples))
    assert place < loader.num_samples


def test_a_dropped_loader_leaves_no_thread_and_no_open_file(prepared):
    def ours():
        files = [os.path.realpath(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("grain-prefetch")]
        return sum(file.startswith(str(prepared)) for file in files), threads

    others = ours()[1]  # of loaders that a test before left as garbage: Python 3.14 looks for some of it at a time
    loader = Loader(prepared, seq_len=SEQ, global_batch=40)
    next(loader)
    assert ours()[0] > 0
    own = [thread for thread in ours()[1] if thread not in others]  # before it is closed: they may end in a moment
    assert own
    loader.close()
    for thread in own:
        thread.join(timeout=10)
    del loader
    assert ours()[0] == 0
    assert not any(thread.is_alive() for thread in own)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"split": "vaild"}, r"split = 'vaild': one of train, valid; did you mean 'valid'"),
        ({"seq_len": 0}, r"model\.seq_len = 0"),
        ({"seq_len": 10**6}, r"model\.seq_len = 1000000: at most \d+: the train split"),
        ({"global_batch": 0}, r"train\.global_batch = 0"),
        ({"rows": [0, 4]}, r"rows = 4: .*0 to 3"),
        ({"rows": [-1]}, r"rows = -1"),
        ({"seed": -1}, r"data\.seed = -1"),
        ({"position": -1}, r"position = -1"),
        ({"prefetch": -1}, r"prefetch = -1"),
        ({"prefetch": "2"}, r"prefetch = '2': an integer"),
        ({"global_batch": None}, r"train\.global_batch = None: an integer"),
        ({"rows": "all"}, r"rows = 'a': rows of"),
        ({"path": None}, r"path = None: the path of a directory or"),
        ({"path": "/none/here"}, r"data\.path = '/none/here': no such directory"),
    ],
)
def test_bad_input_names_the_field(prepared, change, message):
    options = {"path": prepared, "seq_len": SEQ, "global_batch": 4} | change
    with pytest.raises(UserError, match="^" + message):
        Loader(**options)


@pytest.fixture
def copy(prepared, tmp_path):
    return Path(shutil.copytree(prepared, tmp_path / "copy"))


def test_a_corrupt_shard_is_found_and_named(copy):
    shard = copy / "train-00001.bin"
    flip(shard, 50)
    manifest = Manifest.load(copy)
    manifest.verify(["valid"])
    Loader(copy, seq_len=SEQ, global_batch=2, split="valid")
    Loader(copy, seq_len=SEQ, global_batch=2, verify=False)
    with pytest.raises(UserError, match="is corrupt"):
        Loader(copy, seq_len=SEQ, global_batch=2)
    with pytest.raises(UserError, match=r"train-00001\.bin is corrupt: checksum .*, expected .*again"):
        manifest.verify()


def damage_json(change):
    return lambda path: edit_json(path / "manifest.json", change)


@pytest.mark.parametrize(("verify", "prefetch"), [(True, 0), (False, 0), (False, 2)])
def test_a_token_beyond_the_vocabulary_is_found_when_data_is_opened_or_else_when_it_is_read(copy, verify, prefetch):
    shard = copy / "train-00001.bin"
    tokens = np.fromfile(shard, "<u2")
    tokens[5] = 280
    tokens.tofile(shard)
    digest = hashlib.sha256(shard.read_bytes()).hexdigest()
    damage_json(lambda raw: raw["splits"]["train"]["shards"][1].update(sha256=digest))(copy)
    options = {"seq_len": SEQ, "global_batch": 4, "prefetch": prefetch, "verify": verify, "shuffle": False}
    with pytest.raises(UserError, match=r"train-00001\.bin has token 280, above 279"):
        take(Loader(copy, **options), 2)
    take(Loader(copy, **options | {"verify": False}), 0)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize(
    "change",
    [
        lambda shard: os.truncate(shard, 72),
        lambda shard: os.utime(shard, ns=(0, 0)),
        lambda shard: shutil.copy(shard, shard.with_name("new")) and shard.with_name("new").replace(shard),
        Path.unlink,
    ],
    ids=["cut off", "written", "replaced", "removed"],
)
def test_a_shard_that_changes_while_it_is_read_is_named(copy, change, prefetch):
    """What was read before is given, and the position is behind that."""
    loader = Loader(copy, seq_len=SEQ, global_batch=1, prefetch=prefetch, shuffle=False)
    assert loader.ahead(2) == ""
    change(copy / "train-00002.bin")
    before = loader.ahead(99)
    assert "train-00002.bin " in before
    assert before == loader.ahead(99)
    given = [next(loader) for _ in range(4)]  # of the 74 tokens in the two shards before
    assert loader.position == len(given)
    assert loader.ahead(1) == before  # known, though nothing is left: the other processes learn of it a step later
    with pytest.raises(UserError, match=r"data\.path = .*train-00002\.bin (has changed|is not readable: No such file)"):
        next(loader)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda p: (p / "valid-00000.bin").unlink(), r"valid-00000\.bin is missing"),
        (lambda p: os.truncate(p / "train-00000.bin", 13), r"train-00000\.bin has 13 bytes, expected 74"),
        (lambda p: os.truncate(p / "manifest.json", 99), "not valid JSON"),
        (damage_json(lambda raw: raw.update(version=99)), "version 99"),
        (damage_json(lambda raw: raw.update(dtype="float32")), "damaged.*float32"),
        (damage_json(lambda raw: raw.pop("splits")), "damaged.*splits"),
        (damage_json(lambda raw: raw["splits"]["train"].update(tokens=1)), "damaged.*train"),
    ],
)
def test_what_is_wrong_with_a_prepared_directory_is_said(copy, damage, message):
    damage(copy)
    with pytest.raises(UserError, match=rf"^data\.path = .*{message}"):
        Manifest.load(copy)


def test_a_missing_prepared_directory_or_tokenizer_is_said(tmp_path):
    with pytest.raises(UserError, match=r"data\.path = .*no such directory.*axonn-jax prepare"):
        Manifest.load(tmp_path / "none")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenize.load(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(UserError, match=r"tokenizer\.json"):
        tokenize.load(tmp_path / "tokenizer.json")


def test_loading_starts_no_jax_backend_and_prints_nothing(prepared):
    program = f"""
import sys
from axonn_jax.files.data.loader import Loader
assert not {{"jax", "grain", "tokenizers"}} & set(sys.modules), "importing the loader is light"
loader = Loader({str(prepared)!r}, seq_len=4, global_batch=2)
for _ in range(10):
    next(loader)
bridge = sys.modules.get("jax._src.xla_bridge")
assert bridge is None or not bridge._backends, "a backend was started"
"""
    command = [sys.executable, "-W", "error", "-c", program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_no_warning_is_given(prepared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert len(take(Loader(prepared, seq_len=SEQ, global_batch=2, prefetch=1), 3)) == 3


def test_threads_that_open_a_shard_at_once_all_read_it(prepared):
    """The cache of open shards keeps one file of each; another one's was closed while it was read."""
    samples = TokenSamples(prepared, "train", SEQ)
    alone = [samples[number] for number in range(0, len(samples), 7)]

    def read(_):
        samples._open.cache_clear()
        return [samples[number] for number in range(0, len(samples), 7)]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(read, range(64)):
            np.testing.assert_array_equal(found, alone)
