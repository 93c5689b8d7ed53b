"""Which layouts a run takes: measured, remembered, refused, and the same on every process."""

import itertools
import json
import os
import types
from dataclasses import replace

import grids
import jax
import pytest

from axonn_jax.distributed.host_sync import LocalSync
from axonn_jax.grid import GridShape
from axonn_jax.models.block_comm import ALL_REDUCE
from axonn_jax.tensor.matmul import AS_WRITTEN, FORMS, PLAIN, Form, MatmulLayouts, products
from axonn_jax.train import matmul_layouts
from axonn_jax.train.config import Config, DataConfig, MemoryConfig, TensorConfig, TrainConfig
from axonn_jax.train.matmul_layouts import GAIN, Measured, local_products, measure

LEFT, RIGHT = Form(left=True), Form(right=True)
SMALL = products(16, 8, 4, "float32")
DEVICE = types.SimpleNamespace(platform="gpu", device_kind="a device")


def measured(product, /, **seconds):
    times = dict.fromkeys(FORMS, (2.0, 2.0, 2.0))
    times |= {Form(**{name: True}): given for name, given in seconds.items()}
    return Measured(product, times)


# What is chosen


def test_the_fastest_form_is_chosen_round_by_round():
    # A round that was slow for both says nothing against either.
    one = Measured(SMALL[0], {AS_WRITTEN: (2.0, 9.0, 2.0), LEFT: (1.0, 4.5, 1.1), RIGHT: (1.5, 1.5, 1.5)})
    assert one.best == LEFT
    assert one.gain(LEFT) == 2.0
    assert one.rate(LEFT) == SMALL[0].flops / 1.1


def test_little_is_not_worth_other_rounding():
    just, hardly = 2.0 / GAIN - 0.01, 2.0 / GAIN + 0.01
    assert measured(SMALL[0], left=(just,) * 3).best == LEFT
    assert measured(SMALL[0], left=(hardly,) * 3).best == AS_WRITTEN


def test_every_form_is_timed_on_the_device_until_the_time_is_up():
    device = jax.devices()[3]
    (one,) = measure(SMALL[:1], device, rounds=2)
    assert one.product == SMALL[0]
    assert set(one.seconds) == set(FORMS)
    assert all(len(times) == 2 and min(times) > 0 for times in one.seconds.values())
    assert measure(SMALL, device, rounds=2, budget_s=0.0) == []


def test_one_device_of_a_mesh_that_is_set_is_timed_alone():
    """As in a run without a pipeline, which has set its mesh before."""
    with jax.set_mesh(grids.lay(GridShape(data=2, x=2)).mesh):
        (one,) = measure(SMALL[:1], jax.devices()[0], rounds=1)
    assert set(one.seconds) == set(FORMS)


# What is remembered


def test_what_was_measured_is_read_again_where_it_holds(tmp_path):
    file = tmp_path / "deep" / "matmuls.json"
    assert matmul_layouts.load(file, DEVICE) == ({}, "")
    assert matmul_layouts.save(file, DEVICE, [measured(SMALL[0], left=(1.0, 1.0, 1.0))]) == ""
    assert matmul_layouts.save(file, DEVICE, [measured(SMALL[1])]) == ""
    assert matmul_layouts.load(file, DEVICE) == ({str(SMALL[0]): LEFT, str(SMALL[1]): AS_WRITTEN}, "")
    other = types.SimpleNamespace(platform="gpu", device_kind="another device")
    assert matmul_layouts.load(file, other) == ({}, "")
    assert [path.name for path in file.parent.iterdir()] == ["matmuls.json"]


def test_a_measurement_holds_for_a_version_a_kind_of_device_and_a_number_of_cores(monkeypatch):
    cpu = matmul_layouts.setting(jax.devices()[0])
    assert jax.__version__ in cpu
    assert jax.__version__ in matmul_layouts.setting(DEVICE)
    assert "a device" in matmul_layouts.setting(DEVICE)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2, 3, 4})
    assert "5 cores" in matmul_layouts.setting(jax.devices()[0])
    assert "cores" not in matmul_layouts.setting(DEVICE)


BAD = {
    "no JSON": "{",
    "another": "[1, 2]",
    "unknown form": json.dumps({matmul_layouts.setting(DEVICE): {"NN": "sideways"}}),
    "no settings": json.dumps({"a device": [3]}),
    "another version": json.dumps({"format": 1, "settings": {}}),
    "no text": b"\xff\xfe",
}


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_is_no_use_is_ignored_in_one_line_and_replaced(tmp_path, case):
    file = tmp_path / "matmuls.json"
    content = BAD[case]
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    forms, complaint = matmul_layouts.load(file, DEVICE)
    assert forms == {}
    assert str(file) in complaint
    assert "ignored" in complaint
    assert "\n" not in complaint
    assert matmul_layouts.save(file, DEVICE, [measured(SMALL[0])]) == ""
    assert matmul_layouts.load(file, DEVICE) == ({str(SMALL[0]): AS_WRITTEN}, "")


def test_where_nothing_can_be_written_a_line_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    complaint = matmul_layouts.save(tmp_path / "file" / "matmuls.json", DEVICE, [measured(SMALL[0])])
    assert complaint.startswith("matmul layouts are not kept")
    assert "\n" not in complaint


@pytest.mark.parametrize(("given", "where"), [("", ".cache"), ("elsewhere", "elsewhere")])
def test_the_file_is_in_the_cache_directory_of_the_user(monkeypatch, tmp_path, given, where):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / given) if given else "")
    assert matmul_layouts.cache_file() == tmp_path / where / "axonn_jax" / "matmuls.json"


# What a run takes


class Second(LocalSync):
    """The second of two processes: what the first says comes first."""

    rank = 1

    def __init__(self, first):
        self.first = first

    def gather(self, text):
        assert text == ""
        return [self.first, text]


class First(LocalSync):
    def gather(self, text):
        self.said = text
        return super().gather(text)


def config(choice, **grid):
    return Config(
        data=DataConfig(""),
        grid=GridShape(**grid),
        train=TrainConfig(global_batch=8, microbatches=2),
        tensor=TensorConfig(matmul_layouts=choice),
        memory=MemoryConfig(precision="fp32"),
    )


def choose(config, agreed, file):
    return matmul_layouts.choose_layouts(config, grids.GPT, ALL_REDUCE, agreed, file)


def test_off_asks_nobody(tmp_path):
    assert choose(config("off"), None, tmp_path / "none") == (PLAIN, [])


def test_auto_takes_what_is_known_and_measures_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(matmul_layouts, "measure", None)
    file, device = tmp_path / "matmuls.json", jax.local_devices()[0]
    assert choose(config("auto"), LocalSync(), file) == (PLAIN, [])
    known, other = products(4 * 16, 32, 96, "float32")[2], products(4 * 16, 32, 97, "float32")[2]
    matmul_layouts.save(file, device, [measured(known, left=(1.0, 1.0, 1.0)), measured(other, right=(1.0, 1.0, 1.0))])
    layouts, lines = choose(config("auto"), LocalSync(), file)
    assert layouts == MatmulLayouts(((known, LEFT),))
    (line,) = lines
    assert f"1 of {len(local_products(grids.GPT, GridShape(), 64, 'float32'))} products" in line
    assert f"{known}: left turned" in line


def test_measure_measures_what_is_not_known_and_keeps_it(tmp_path, monkeypatch):
    file, device = tmp_path / "matmuls.json", jax.local_devices()[0]
    wanted = list(local_products(grids.GPT, GridShape(x=2), 64, "float32"))
    matmul_layouts.save(file, device, [measured(wanted[0], right=(1.0, 1.0, 1.0))])
    asked = []

    def fake(products, at, *, budget_s):
        asked.extend(products)
        assert at == device
        assert budget_s == matmul_layouts.BUDGET_S
        return [measured(one, left=(1.0, 1.0, 1.0)) for one in asked[:2]]

    monkeypatch.setattr(matmul_layouts, "measure", fake)
    layouts, lines = choose(config("measure", x=2), LocalSync(), file)
    assert sorted(map(str, asked)) == sorted(map(str, wanted[1:]))
    assert layouts.of(wanted[0]) == RIGHT
    assert [layouts.of(one) for one in asked] == [LEFT, LEFT] + [AS_WRITTEN] * (len(asked) - 2)
    assert f"2 of {len(asked)} products measured" in lines[0]
    assert len(matmul_layouts.load(file, device)[0]) == 3
    times = {one: one.flops * n for one, n in local_products(grids.GPT, GridShape(x=2), 64, "float32").items()}
    assert all(times[a] >= times[b] for a, b in itertools.pairwise(asked))  # the dearest first


def test_every_process_takes_what_the_first_has(tmp_path, monkeypatch):
    """Also one that has a file of its own, or would measure."""
    first_file, second_file, device = tmp_path / "first.json", tmp_path / "second.json", jax.local_devices()[0]
    wanted = list(local_products(grids.GPT, GridShape(data=2), 32, "float32"))
    matmul_layouts.save(
        first_file, device, [measured(wanted[1], left=(1.0, 1.0, 1.0)), measured(wanted[4], product=(1.0,) * 3)]
    )
    matmul_layouts.save(second_file, device, [measured(wanted[2], right=(1.0, 1.0, 1.0))])
    said = First()
    layouts, lines = choose(config("auto", data=2), said, first_file)
    assert layouts.chosen == ((wanted[1], LEFT), (wanted[4], Form(product=True)))
    assert lines
    monkeypatch.setattr(matmul_layouts, "measure", None)
    assert choose(config("auto", data=2), Second(said.said), second_file)[0] == layouts
    assert choose(config("measure", data=2), Second(said.said), second_file)[0] == layouts


def test_a_stream_is_its_part_of_the_rows():
    base = config("auto", z=2)
    assert matmul_layouts.local_tokens(base, grids.GPT) == 2 * 16
    streams = replace(base, tensor=TensorConfig(sub_batches=2))
    assert matmul_layouts.local_tokens(streams, grids.GPT) == 16
    assert matmul_layouts.local_tokens(replace(streams, grid=GridShape(pipe=2, z=2)), grids.GPT) == 2 * 16
