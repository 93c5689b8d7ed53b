"""Machine files: those of the package, and what is refused field by field."""

from dataclasses import replace

import pytest

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.presets import preset
from axonn_jax.planning.machines.machine import GIB, CollectiveTime, MatmulShare, between, matmul_share
from axonn_jax.planning.machines.machine_file import dumps_machine, load_machine, loads_machine, machine_names
from axonn_jax.planning.machines.network import GroupLinks
from axonn_jax.planning.request import PlanRequest

GOOD = """
title = "two boxes"
sources = ["nobody"]
[device]
kind = "box"
memory_bytes = 1e9
memory_bytes_per_s = 1e10
peak_fp32 = 1e12
[matmul]
large = 0.5
[node]
devices = 4
bytes_per_s = 1e10
latency_s = 1e-6
[network]
bytes_per_s = 2e9
latency_s = 1e-5
[host]
memory_bytes = 4e9
bytes_per_s = 1e10
"""

COLLECTIVE = """[[collectives]]
kind = "all-reduce"
inner = 1
size = 2
bytes = 1e3
seconds = 1e-3
[host]"""


def changed(line, to):
    assert line in GOOD
    return GOOD.replace(line, to)


@pytest.mark.parametrize("name", machine_names())
def test_every_machine_of_the_package_loads_and_has_sources(name):
    machine = load_machine(name)
    assert machine.name == name
    assert len(machine.sources) >= 2
    assert machine.peak(machine.half) > 0


def test_the_promised_machines_are_there():
    assert {"summit", "perlmutter", "perlmutter-80gb", "frontier", "alps", "dgx-h100", "laptop"} <= set(machine_names())


@pytest.mark.parametrize(
    ("inner", "size", "gib"),
    [(1, 2, 76), (1, 4, 225), (1, 8, 80), (1, 1024, 80), (2, 2, 76), (2, 16, 40), (4, 2, 20), (64, 512, 20)],
)
def test_perlmutters_published_bandwidths(inner, size, gib):
    assert load_machine("perlmutter").measured(inner, size) == gib * GIB


@pytest.mark.parametrize(
    ("inner", "size", "gib"),
    [
        (1, 2, 129),
        (1, 4, 52),
        (1, 8, 135),
        (1, 16, 40),
        (2, 2, 50),
        (2, 4, 72),
        (2, 8, 20),
        (4, 2, 36),
        (4, 4, 10),
        (8, 2, 5),
        (512, 4, 5),
    ],
)
def test_frontiers_published_bandwidths(inner, size, gib):
    assert load_machine("frontier").measured(inner, size) == gib * GIB


@pytest.mark.parametrize(
    ("line", "to", "field"),
    [
        ("bytes_per_s = 2e9", "bytes_per_s = -2e9", "network.bytes_per_s = -2000000000.0: a finite number above 0"),
        ("bytes_per_s = 2e9", 'bytes_per_s = "fast"', "network.bytes_per_s = 'fast': a finite number above 0"),
        ("bytes_per_s = 2e9", "bytes_per_s = nan", "network.bytes_per_s = nan"),
        ("bytes_per_s = 2e9", "bytes_per_s = inf", "network.bytes_per_s = inf"),
        ("devices = 4", "devices = 0", "node.devices = 0: an integer from 1"),
        ("devices = 4", "devices = 4.5", "node.devices = 4.5: an integer from 1"),
        ("devices = 4", "devices = true", "node.devices = True"),
        ("large = 0.5", "large = 1.5", "matmul.large = 1.5: a share"),
        ("large = 0.5", "large = 0.5\nsustaned = 1", "matmul.sustaned = 1: not a known key; did you mean 'sustained'?"),
        ("memory_bytes = 1e9", "memory_bytes = 1e9\nreserved_bytes = 2e9", "device.reserved_bytes"),
        ("peak_fp32 = 1e12", "", "device.peak_fp32 = (not given): required"),
        ('kind = "box"', 'kind = "box"\ncontention = 1.0', "device.contention = 1.0: a share below 1"),
        ('kind = "box"', 'kind = ""', "device.kind = '': a text"),
        ('sources = ["nobody"]', "sources = []", "sources = []: a list of at least one text"),
        ('sources = ["nobody"]', "", "sources = (not given): required"),
        ("[host]", "[hots]", "hots"),
        ("[matmul]", "matmul = 3\n[x]", "x"),
        ('title = "two boxes"', 'title = "two', "valid TOML"),
        ("large = 0.5", "large = 0.5\ntile_rows = 128", "matmul"),
        ("[host]", "[[bandwidth]]\ninner = 1\nsize = 2\ngib_per_s = -1\n[host]", "bandwidth[0].gib_per_s = -1"),
        ("[host]", "[[bandwidth]]\ninner = 1\nsize = 2\n[host]", "bandwidth[0].gib_per_s = (not given)"),
        (
            "[host]",
            "[[bandwidth]]\ninner = 1\nsize = 2\ngib_per_s = 1\n" * 2 + "[host]",
            "one entry for each inner and size",
        ),
        ("[host]", "[[matmuls]]\nsize = 128\nshare = 1.5\n[host]", "matmuls[0].share = 1.5: a share above 0"),
        ("[host]", COLLECTIVE.replace("all-reduce", "all-redcue"), "did you mean 'all-reduce'?"),
        ("[host]", COLLECTIVE.replace("seconds = 1e-3", "seconds = 0"), "collectives[0].seconds = 0: a finite"),
        (
            "[host]",
            COLLECTIVE.replace("[host]", "") * 2 + "[host]",
            "one entry for each kind and inner and size and bytes",
        ),
    ],
)
def test_a_wrong_field_is_named(line, to, field):
    with pytest.raises(UserError) as error:
        loads_machine(changed(line, to), "box")
    assert field in str(error.value)
    assert "\n" not in str(error.value)


def test_a_file_of_ones_own(tmp_path):
    (tmp_path / "box.toml").write_text(GOOD)
    machine = load_machine(str(tmp_path / "box.toml"))
    assert (machine.name, machine.node.devices, machine.half) == ("box", 4, "fp32")
    with pytest.raises(UserError, match="did you mean 'frontier'"):
        load_machine("frontiers")
    with pytest.raises(UserError, match="can be read"):
        load_machine(str(tmp_path / "none.toml"))
    with pytest.raises(UserError, match=r"--memory\.precision = 'bf16': one that a box has: fp32"):
        machine.peak("bf16")


def test_links_share_what_a_node_sends():
    """beta_inter / min(G_node, inner): rings across nodes share the node's adapters."""
    machine = loads_machine(GOOD, "box")
    links = GroupLinks(GridShape(1, 4, 2, 2, 2), machine)
    assert (links.inner(("x",)), links.inner(("y",)), links.inner(("z",)), links.inner(("data",))) == (1, 2, 4, 8)
    assert links.rate(("x",)) == links.rate(("y",)) == 1e10  # four neighbours are a node
    assert links.rate(("z",)) == links.rate(("data",)) == 2e9 / 4
    assert GroupLinks(GridShape(1, 1, 8, 1, 1), machine).rate(("z",)) == 2e9  # one ring leaves the node
    assert GroupLinks(GridShape(1, 1, 4, 1, 2), machine).rate(("z",)) == 2e9 / 2


def test_latency_counts_hops():
    machine = loads_machine(GOOD, "box")
    links = GroupLinks(GridShape(1, 1, 16, 1, 1), machine)  # four nodes of four
    assert links.latency("all-gather", ("z",)) == pytest.approx(12 * 1e-6 + 3 * 1e-5)
    assert links.latency("all-reduce", ("z",)) == pytest.approx(2 * 2 * 1e-6 + 2 * 2 * 1e-5)
    assert GroupLinks(GridShape(x=2), machine).latency("all-gather", ("x",)) == pytest.approx(1e-6)


@pytest.mark.parametrize("name", machine_names())
def test_a_machine_written_and_read_is_the_same(name):
    machine = load_machine(name)
    assert loads_machine(dumps_machine(machine), name) == machine


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ('platform = "gpu"', "device.platform = 'gpu': one of cpu, cuda, rocm, tpu"),
        ('platform = "cuda"', "device.capability = .*: required with the platform cuda"),
        ('platform = "cuda"\ncapability = "9.0"', "device.capability = '9.0': a finite number"),
        ('platform = "rocm"\ncapability = 9.0', "device.capability = 9.0: .* of the platform cuda alone"),
        ('platform = "cuda"\ncapability = 9.04', "device.capability = 9.04: a version such as 9.0"),
    ],
)
def test_platforms_that_do_not_exist_are_refused(said, named):
    with pytest.raises(UserError, match=named):
        loads_machine(changed("peak_fp32 = 1e12", f"peak_fp32 = 1e12\n{said}"), "box")


def test_a_file_without_a_platform_counts_on_no_fused_attention():
    machine = loads_machine(changed("peak_fp32 = 1e12", "peak_fp32 = 1e12\npeak_bf16 = 4e12\nattention = 0.5"), "box")
    form = PlanRequest(preset("llama3-8b"), machine, 8, "bf16").attention_form
    assert (form.kernel, form.why) == ("blocked", "the machine file does not say device.platform")
    assert loads_machine(dumps_machine(machine), "box") == machine


MESSAGES = '[[messages]]\nchannel = "mpi4py"\nbytes_per_s = 5e9\nlatency_s = 3e-5\n'


def test_measured_messages_are_those_inside_a_node():
    machine = loads_machine(GOOD + MESSAGES, "boxes")
    inside, across = GroupLinks(GridShape(pipe=2), machine), GroupLinks(GridShape(pipe=2, x=4), machine)
    assert (inside.neighbour_rate(), inside.neighbour_latency()) == (5e9, 3e-5)
    assert (across.neighbour_rate(), across.neighbour_latency()) == (5e8, 1e-5)
    with pytest.raises(UserError, match="one entry for each channel"):
        loads_machine(GOOD + 2 * MESSAGES, "boxes")


def test_devices_that_share_cores_are_slower_together():
    machine = loads_machine(changed("devices = 4", "devices = 4\nat_once = 2"), "boxes")
    assert machine.shared(1) == machine.shared(2) == machine
    assert machine.shared(4).matmul.large == machine.shared(64).matmul.large == machine.matmul.large / 2
    assert machine.shared(4).device.memory_bytes_per_s == machine.device.memory_bytes_per_s / 2


def test_measured_times_lie_between_measured_points():
    curve = ((1e3, 2e-3), (1e6, 3e-3), (4e6, 9e-3))
    assert [between(curve, at) for at in (1.0, 1e3, 1e6, 4e6)] == pytest.approx([2e-3, 2e-3, 3e-3, 9e-3])
    assert between(curve, 2.5e6) == pytest.approx(6e-3)
    assert between(curve, 7e6) == pytest.approx(15e-3)
    assert between(((1e3, 2e-3),), 1e4) == pytest.approx(20e-3)
    shares = (MatmulShare(256, 0.5), MatmulShare(1024, 1.0))
    assert [matmul_share(shares, size) for size in (1, 256, 512, 1024, 9999)] == pytest.approx(
        [0.5, 0.5, 0.75, 1.0, 1.0]
    )
    assert matmul_share((), 1) == 1.0


def test_measured_collectives_are_those_of_one_node_and_their_place():
    rows = [("all-reduce", 1, 2, 1e-3), ("all-reduce", 2, 2, 2e-3), ("all-gather", 1, 2, 3e-3)]
    machine = replace(
        loads_machine(GOOD, "box"), collectives=tuple(CollectiveTime(*row[:3], 1e3, row[3]) for row in rows)
    )
    links = GroupLinks(GridShape(1, 2, 1, 2, 2), machine)
    assert links.curve("all-reduce", ("x",)) == ((1e3, 1e-3),)
    assert links.curve("all-reduce", ("y",)) == ((1e3, 2e-3),)
    assert links.curve("all-gather", ("x",)) == ((1e3, 3e-3),)
    assert links.curve("reduce-scatter", ("x",)) == ()
    assert links.curve("all-reduce", ("data",)) == ()  # leaves the node of four
    assert loads_machine(dumps_machine(machine), "box") == machine


def test_jobs_of_many_nodes_wait_for_the_slowest():
    """Nothing inside a node, then the same share of one node's time for every doubling of the nodes."""
    machine = loads_machine(changed("bytes_per_s = 2e9", "bytes_per_s = 2e9\nstraggling = 0.05"), "boxes")
    assert machine.shared(1) == machine.shared(4) == machine
    for devices, doublings in ((8, 1), (16, 2), (64, 4)):
        slower = machine.shared(devices)
        assert slower.matmul.large == pytest.approx(machine.matmul.large / (1 + 0.05 * doublings))
        assert slower.device.memory_bytes_per_s == pytest.approx(
            machine.device.memory_bytes_per_s / (1 + 0.05 * doublings)
        )
