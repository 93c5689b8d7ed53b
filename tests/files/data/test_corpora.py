"""Mixed corpora: shares exact at any place, epochs of each, and the same rows however the stream is cut."""

import os
import shutil
from fractions import Fraction
from pathlib import Path

import instruction_data
import mixed
import numpy as np
import pytest
from damage import edit_json
from hypothesis import given, settings
from hypothesis import strategies as st

from axonn_jax import Loader, UserError
from axonn_jax.core.models.packed import counted_targets
from axonn_jax.files.data.corpora import Corpora, Corpus
from axonn_jax.files.data.goldfish import GoldfishConfig, goldfish
from axonn_jax.files.data.instructions.write import InstructionOptions, prepare_instructions
from axonn_jax.files.data.loader import TokenSamples
from axonn_jax.files.data.manifest import Manifest
from axonn_jax.files.data.prepare import prepare

SEQ = 16
WEIGHTS = {"code": 0.6, "text": 0.3, "few": 0.1}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Three corpora of one tokenizer, one of another, and two of packed rows."""
    root = tmp_path_factory.mktemp("corpora")
    mixed.write(root, "code", vocab=280)
    mixed.write(root, "text", 90, tokenizer="code")
    mixed.write(root, "few", 12, "a few {n}, {m}", tokenizer="code")
    mixed.write(root, "other", 60, mixed.LINES["code"], vocab=270)
    instruction_data.tokenizer(root / "tok")
    for at, name in enumerate(("rows", "chat")):
        source = instruction_data.write(root / f"{name}.jsonl", instruction_data.rows(60)[at::2])
        prepare_instructions(source, root / name, InstructionOptions(48), tokenizer=root / "tok", holdout=0.2)
    return root


def load(place, weights, held_out=()):
    return Corpora.load(
        "", {str(place / name): w for name, w in weights.items()}, {n: str(place / n) for n in held_out}
    )


def take(data, batches, *, seq_len=SEQ, global_batch=4, **options):
    loader = Loader(data, seq_len=seq_len, global_batch=global_batch, verify=False, **options)
    rows = [next(loader) for _ in range(batches)]
    loader.close()
    return rows


numbers = st.integers(0, 10**15) | st.integers(0, 300)


@settings(max_examples=200, deadline=None)
@given(weights=st.lists(st.integers(1, 9) | st.integers(1, 10**9), min_size=1, max_size=6), number=numbers)
def test_each_corpus_has_its_share_of_any_first_rows(weights, number):
    data = Corpora(tuple(Corpus(None, weight=weight) for weight in weights))
    counts = data.counts(number)
    assert sum(counts) == number
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - Fraction(weight * number, sum(weights))) <= Fraction(len(weights) - 1, 2)
    for row in range(number, number + 20):  # each row is the next one of a corpus
        corpus, own = data.place(row)
        assert own == counts[corpus]
        counts[corpus] += 1
        assert counts == data.counts(row + 1)


@settings(max_examples=20, deadline=None)
@given(st.permutations(sorted(WEIGHTS)), st.sampled_from([1, 7, 10, 0.125, 1e-3]))
def test_neither_the_order_nor_the_scale_of_weights_says_anything(place, order, scale):
    data, other = load(place, WEIGHTS), load(place, {name: round(WEIGHTS[name] * scale, 9) for name in order})
    assert data == other
    assert [(corpus.name, corpus.weight) for corpus in data.trained] == [("code", 6), ("text", 3), ("few", 1)]
    assert data.fingerprint() == other.fingerprint()
    changed = {**WEIGHTS, "few": 0.2}, {"code": 0.6, "text": 0.4}, {"code": 1}, {"code": 0.3, "text": 0.6, "few": 0.1}
    assert len({data.fingerprint(), *(load(place, weights).fingerprint() for weights in changed)}) == 5


def test_many_shards_of_many_corpora_keep_few_files_open(tmp_path):
    """A process may have 1024 open files; a loader keeps 128, not as many for each corpus."""
    mixed.write(tmp_path, "code", 300, vocab=280, shard_tokens=10)
    shutil.copytree(tmp_path / "code", tmp_path / "copy")
    data = load(tmp_path, {"code": 1, "copy": 1})
    assert min(len(corpus.manifest.splits["train"].shards) for corpus in data.trained) > 128
    loader = Loader(data, seq_len=SEQ, global_batch=120, verify=False, prefetch=0)
    for _ in range(2):
        next(loader)
        files = [Path(f"/proc/self/fd/{descriptor}").resolve() for descriptor in os.listdir("/proc/self/fd")]
        assert 100 < sum(file.is_relative_to(tmp_path) for file in files) <= 128


def test_each_corpus_has_epochs_of_its_own_in_which_every_sample_is_read_once(place):
    data = load(place, WEIGHTS)
    loader = Loader(data, seq_len=SEQ, global_batch=1, verify=False)
    samples = [TokenSamples(corpus.manifest, "train", SEQ) for corpus in data.trained]
    places = [loader.place(number) for number in range(600)]
    orders = [[at for corpus, at in places if corpus == own] for own in range(3)]
    assert min(len(order) / len(own) for order, own in zip(orders, samples, strict=True)) > 1
    for order, own in zip(orders, samples, strict=True):
        epochs = [order[start : start + len(own)] for start in range(0, len(order), len(own))]
        assert all(len({*epoch}) == len(epoch) for epoch in epochs)
        assert len(epochs) == 1 or epochs[0][: len(epochs[1])] != epochs[1]
    read = np.concatenate(take(data, 600, global_batch=1))
    np.testing.assert_array_equal(read, [samples[corpus][at] for corpus, at in places])
    epochs = data.epochs(600, SEQ)
    assert epochs == {c.name: len(o) / len(own) for c, o, own in zip(data.trained, orders, samples, strict=True)}


@settings(max_examples=25, deadline=None)
@given(batch=st.integers(1, 9), start=st.integers(0, 200) | st.integers(10**9, 10**9 + 9), split=st.integers(0, 9))
def test_any_cut_of_the_stream_reads_the_same_rows(place, batch, start, split):
    data, split = load(place, WEIGHTS), min(split, batch)
    single = np.concatenate(take(data, 2 * batch, global_batch=1, position=start, prefetch=0))
    parts = [
        take(data, 2, global_batch=batch, position=start, rows=rows) for rows in (range(split), range(split, batch))
    ]
    whole = [np.concatenate(both) for both in zip(*parts, strict=True)]
    np.testing.assert_array_equal(np.concatenate(whole), single)


def test_one_corpus_is_its_directory_to_the_sample(place):
    data = load(place, {"text": 0.25})
    manifest = Manifest.load(place / "text")
    assert data.fingerprint() == manifest.fingerprint("train")
    assert (data.rows(SEQ), data.unigram_entropy) == (manifest.rows("train", SEQ), manifest.unigram_entropy)
    np.testing.assert_array_equal(take(data, 60), take(place / "text", 60))


def test_two_corpora_of_one_length_are_not_in_one_order(place, tmp_path):
    shutil.copytree(place / "text", tmp_path / "text")
    loader = Loader(load(place, {"text": 1, tmp_path / "text": 1}), seq_len=SEQ, global_batch=1)
    orders = [[at for corpus, at in map(loader.place, range(100)) if corpus == own] for own in range(2)]
    assert orders[0] != orders[1]


def test_packed_rows_are_mixed_and_lose_the_targets_of_each_row_alone(place):
    data, dropped = load(place, {"rows": 2, "chat": 1}), GoldfishConfig(2, 3)
    plain, lost = (take(data, 9, seq_len=48, dropped=each) for each in (GoldfishConfig(), dropped))
    np.testing.assert_array_equal(lost, [goldfish(batch, 2, 3, packed=True) for batch in plain])
    assert (np.concatenate(plain) != np.concatenate(lost)).any()


def test_means_are_of_those_with_held_out_rows_by_weight(place, tmp_path):
    shutil.copytree(place / "few", tmp_path / "few")
    empty = {"bytes": 0, "tokens": 0, "shards": []}
    edit_json(tmp_path / "few" / "manifest.json", lambda raw: raw["splits"].update(valid=empty))
    losses = {"code": 1.0, "text": 4.0, "other": 7.0}
    data = load(place, {"code": 0.6, "text": 0.3, tmp_path / "few": 0.1})
    assert data.mean(losses) == pytest.approx(2)
    assert [corpus.name for corpus in data.evaluated] == ["code", "text"]
    beside = load(place, {tmp_path / "few": 1}, ["code", "text"])
    assert beside.mean(losses) == 2.5
    assert load(place, {"code": 1e-300, "text": 1e300}).mean(losses) == 4.0


def test_means_of_packed_rows_weigh_a_corpus_by_its_targets_as_training_does(place):
    data = load(place, {"rows": 2, "chat": 1})
    counts = {}
    for name, weight in (("rows", 2), ("chat", 1)):
        own = Manifest.load(place / name)
        epoch = np.concatenate(take(own, own.rows("train", 48), seq_len=48, global_batch=1))
        counts[name] = weight * float(counted_targets(epoch, packed=True).sum()) / len(epoch)
    assert counts["rows"] / counts["chat"] != pytest.approx(2, rel=0.01)
    share = counts["rows"] / sum(counts.values())
    assert data.mean({"rows": 1.0, "chat": 0.0}) == pytest.approx(share)


def test_names_are_as_much_of_the_paths_as_tells_them_apart(place, tmp_path, monkeypatch):
    shutil.copytree(place / "text", tmp_path / "text")
    monkeypatch.chdir(place / "code")
    data = Corpora.load("", {".": 3, "../text": 2, str(tmp_path / "text"): 1}, {})
    assert [corpus.name for corpus in data.trained] == ["code", f"{place.name}/text", f"{tmp_path.name}/text"]


@pytest.mark.parametrize(
    ("path", "mix", "held_out", "says"),
    [
        (
            "",
            {},
            {},
            r"data\.path = '': a directory written by `axonn-jax prepare`; or several with weights, data\.mix",
        ),
        ("code", {"text": 1.0}, {}, r"data\.path = 'code': one of data\.path and data\.mix"),
        ("", {"code": 1.0, "./code": 2.0}, {}, r"data\.mix = 'code': directories of which none is given twice"),
        ("", {"code": 1.0, "none": 2.0}, {}, r"data\.mix = 'none': no such directory"),
        ("", {"code": 1.0, "other": 2.0}, {}, r"data\.mix = 'other': data with the tokenizer of code, as `axonn-jax "),
        ("", {"rows": 1.0, "code": 2.0}, {}, r"data\.mix = 'code': data with the tokenizer of rows"),
        ("code", {}, {"code": "text"}, r"data\.held_out = 'code': another name than that of a directory of data\.path"),
        ("code", {}, {"x": "none"}, r"data\.held_out = 'none': no such directory"),
        ("code", {}, {"x": "other"}, r"data\.held_out = 'other': data with the tokenizer of code"),
    ],
)
def test_what_does_not_go_together_is_named(place, monkeypatch, path, mix, held_out, says):
    monkeypatch.chdir(place)
    with pytest.raises(UserError, match=f"^{says}"):
        Corpora.load(path, mix, held_out)


def test_rows_and_streams_are_not_mixed_and_shards_name_the_mix(place, tmp_path):
    prepare_instructions(
        place / "rows.jsonl", tmp_path / "short", InstructionOptions(40), tokenizer=place / "tok", holdout=0.2
    )
    prepare(place / "src" / "code", tmp_path / "stream", tokenizer=place / "tok", include=["*.txt"], holdout=0.3)
    for name in ("short", "stream"):
        with pytest.raises(UserError, match=rf"^data\.mix = .*{name}': rows of 48 tokens .*, as .*rows is$"):
            load(place, {"rows": 1, tmp_path / name: 1})
    data = Corpora.load("", {str(tmp_path / "stream"): 1}, {})
    with pytest.raises(UserError, match=r"^model\.seq_len = 1000000: at most \d+: the train split of .*stream'"):
        data.check_seq_len(10**6)
    loader = Loader(data, seq_len=SEQ, global_batch=1, prefetch=0)
    Path(tmp_path / "stream" / "train-00000.bin").unlink()
    with pytest.raises(UserError, match=r"^data\.mix = .*shard train-00000\.bin is not readable"):
        next(loader)
