"""Which GPUs each rank takes: a table of launches, and the form in which jax is told."""

import json
import re
import subprocess
import sys

import pytest
from launched import UNDER_MPIRUN, gpu_environment, mpirun, slurm_tasks, together

from axonn_jax import GridShape, UserError
from axonn_jax.core.distributed import gpus, initialize
from axonn_jax.core.distributed.gpus import Gpu, idle, parse, shares, visible
from axonn_jax.core.distributed.processes import World

NODE = [Gpu(f"GPU-{letter * 8}-0000") for letter in "abcdefgh"]
MIG = [Gpu("GPU-aaaaaaaa-0000", ("MIG-1111", "MIG-2222")), Gpu("GPU-bbbbbbbb-0000", ("MIG-3333",))]
MIXED = [NODE[2], Gpu("GPU-aaaaaaaa-0000", ("MIG-1111",))]
OPENED = [Gpu(f"boot:nvidia{number}") for number in range(4)]
"""As found without nvidia-smi."""
CUDA = "CUDA_VISIBLE_DEVICES"
U = [gpu.name for gpu in NODE]


def rank(value=None, present=NODE[:4], variable=CUDA, **more):
    """What one rank sees; `value` is that of the variable, None where it is not set."""
    rocm = variable != CUDA or more.pop("rocm", False)
    return visible({**({} if value is None else {variable: value}), **more}, present, rocm=rocm)


def bound(count, variable=CUDA, value="0"):
    """As srun binds ranks with control groups: each sees a GPU of its own, and all of them call it 0."""
    return [rank(value, [NODE[place]], variable) for place in range(count)]


SITUATIONS = {
    # name: (what each rank sees, devices that the grid gives each, indexes that each must take)
    "mpirun -n 4, four GPUs, nothing set": ([rank()] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "mpirun -n 2, four GPUs, two each": ([rank()] * 2, 2, [(0, 1), (2, 3)]),
    "one task a node, four GPUs": ([rank(), rank(present=NODE[4:])], 4, [(0, 1, 2, 3)] * 2),
    "two tasks a node, two nodes": (
        [rank(present=NODE[:2])] * 2 + [rank(present=NODE[2:4])] * 2, 1, [(0,), (1,), (0,), (1,)],
    ),
    "two nodes, tasks dealt out in turn": (
        [rank(present=NODE[:2]), rank(present=NODE[2:4])] * 2, 1, [(0,), (0,), (1,), (1,)],
    ),
    "ids from the middle of a node": ([rank("4,5,6,7", NODE)] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "UUIDs": ([rank(f"{U[3]},{U[1]}")] * 2, 1, [(0,), (1,)]),
    "beginnings of UUIDs": ([rank("GPU-cc,GPU-aa")] * 2, 1, [(0,), (1,)]),
    "a GPU each, by its id": ([rank(str(place)) for place in range(4)], 1, [(0,)] * 4),
    "a GPU each, by its UUID": ([rank(U[place]) for place in range(4)], 1, [(0,)] * 4),
    "srun --gpus-per-task=1": (bound(4), 1, [(0,)] * 4),
    "srun --gpus-per-task=1, variable unset": (bound(4, value=None), 1, [(0,)] * 4),
    "srun without binding": ([rank("0,1,2,3")] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "srun --gpus-per-task=2": ([rank("0,1", NODE[:2]), rank("0,1", NODE[2:4])], 2, [(0, 1)] * 2),
    "srun --gpu-bind=closest: pairs share pairs": ([rank("0,1")] * 2 + [rank("2,3")] * 2, 1, [(0,), (1,)] * 2),
    "the same GPUs in another order": ([rank("0,1"), rank("1,0")], 1, [(0,), (0,)]),
    "the list ends at its first bad entry": ([rank("2,1,-1,0")] * 2, 1, [(0,), (1,)]),
    "an index that is not there ends it too": ([rank("3,9,0")], 1, [(0,)]),
    "more GPUs than the grid asks for": ([rank()] * 3, 1, [(0,), (1,), (2,)]),
    "uneven nodes: three ranks and one": (
        [rank()] * 3 + [rank(present=NODE[4:])], 1, [(0,), (1,), (2,), (0,)],
    ),
    "pipe 2 on one node, two devices a stage and process": ([rank("4,5,6,7", NODE)] * 2, 2, [(0, 1), (2, 3)]),
    "pipe 2, two processes a stage, by UUID": ([rank(",".join(U[4:]), NODE)] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "without nvidia-smi": ([rank(present=OPENED)] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "without nvidia-smi, a UUID each": ([rank(uuid, OPENED) for uuid in U[:2]], 1, [(0,)] * 2),
    "a MIG device each": ([rank(uuid, MIG) for uuid in ("MIG-1111", "MIG-2222", "MIG-3333")], 1, [(0,)] * 3),
    "MIG, bound by the scheduler": (
        [rank("0", [Gpu(MIG[0].name, (part,))]) for part in MIG[0].parts], 1, [(0,), (0,)],
    ),
    "MIG on one GPU hides the others": ([rank(present=MIXED)], 1, [(0,)]),
    "ROCm, nothing set": ([rank(rocm=True)] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "ROCm, ROCR_VISIBLE_DEVICES": ([rank("2,3", variable="ROCR_VISIBLE_DEVICES")] * 2, 1, [(0,), (1,)]),
    "ROCm, one each by ROCR": ([rank(str(n), variable="ROCR_VISIBLE_DEVICES") for n in (2, 3)], 1, [(0,)] * 2),
    "ROCm, HIP counts within ROCR": (
        [rank("0,1", variable="HIP_VISIBLE_DEVICES", ROCR_VISIBLE_DEVICES="2,3")] * 2, 1, [(0,), (1,)],
    ),
    "ROCm, CUDA's variable": ([rank("2,3", rocm=True)] * 2, 1, [(0,), (1,)]),
    "ROCm, an empty variable is none": ([rank("", variable="HIP_VISIBLE_DEVICES")] * 4, 1, [(0,), (1,), (2,), (3,)]),
    "srun --gpus-per-task=1 on ROCm": (bound(4, "ROCR_VISIBLE_DEVICES"), 1, [(0,)] * 4),
    "no GPU": ([rank(present=[])] * 2, 1, [(), ()]),
    "hidden by an empty variable": ([rank("")] * 2, 1, [(), ()]),
    "hidden by -1": ([rank("-1")] * 2, 1, [(), ()]),
    "hidden by Slurm's NoDevFiles": ([rank("NoDevFiles")] * 2, 1, [(), ()]),
    "the CPU asked for, or jax told by the user": ([None] * 2, 1, [(), ()]),
    "doctor: all of it, in equal shares": ([rank()] * 2, None, [(0, 1), (2, 3)]),
    "doctor: one process": ([rank()], None, [(0, 1, 2, 3)]),
}  # fmt: skip

REFUSED = {
    "fewer GPUs than ranks": ([rank()] * 8, 1, "GPUs seen by ranks 0, 1, 2, 3, 4, 5, 6, 7 = 4: at least 8, 1 for each"),
    "fewer GPUs than ranks, for doctor": ([rank("0")] * 2, None, "ranks 0, 1 = 1: at least 2, 1 for each of 2"),
    "fewer GPUs than the grid asks for": ([rank()] * 4, 2, "ranks 0, 1, 2, 3 = 4: at least 8, 2 for each of 4"),
    "bound to fewer than the grid asks for": (bound(2), 2, "GPUs seen by rank 0 = 1: at least 2, 2 for each of 1"),
    "MIG devices not dealt out": ([rank("MIG-1111,MIG-2222", MIG)] * 2, 1, "ranks 0, 1 = 1: at least 2"),
    "views that overlap": ([rank("0,1"), rank("1,2")], 1, "rank 1 = .*the same GPUs as rank 0, or none in common"),
    "one rank without": ([rank(), rank("")], 1, "GPUs seen by rank 1 = 0: GPUs for all or none; rank 0 has some"),
}


@pytest.mark.parametrize("name", SITUATIONS)
def test_each_rank_takes_its_own(name):
    views, wanted, expected = SITUATIONS[name]
    taken = shares(views, wanted)
    assert taken == expected
    devices = [view[index] for view, own in zip(views, taken, strict=True) for index in own]
    assert len(set(devices)) == len(devices)  # no GPU twice


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_one_line(name):
    views, wanted, told = REFUSED[name]
    with pytest.raises(UserError, match=told):
        shares(views, wanted)


def test_idle_gpus_are_told():
    views = [rank()] * 3
    assert idle(views, shares(views, 1)) == "warning: 1 of the 4 GPUs that the processes see stay idle"
    assert idle(views[:2], shares(views[:2], 2)) == ""
    assert idle([None], [()]) == idle([()], [()]) == ""


def test_what_nvidia_smi_lists():
    told = """GPU 0: NVIDIA A100-SXM4-40GB (UUID: GPU-aaaaaaaa-0000)
  MIG 3g.20gb     Device  0: (UUID: MIG-1111)
  MIG 3g.20gb     Device  1: (UUID: MIG-2222)
GPU 1: NVIDIA A100-SXM4-40GB (UUID: GPU-bbbbbbbb-0000)
  MIG 7g.40gb     Device  0: (UUID: MIG-3333)
"""
    assert parse(told) == MIG


def test_gpus_are_found_without_nvidia_smi(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr(gpus, "_DEV", tmp_path)
    for name in ("nvidia10", "nvidia2", "nvidiactl"):
        (tmp_path / name).touch()
    (tmp_path / "nvidia1").mkdir()  # does not open, as one that a control group forbids
    assert [gpu.name.rpartition(":")[2] for gpu in gpus.nvidia_gpus()] == ["nvidia2", "nvidia10"]
    assert gpus.look({CUDA: "1"})[0].endswith(":nvidia10")


def test_amd_gpus_are_those_of_the_kernels_topology(tmp_path, monkeypatch):
    monkeypatch.setattr(gpus, "_KFD", tmp_path)
    nodes = {"0": (0, ""), "2": (11, "simd_count 4\nunique_id 255\n"), "10": (12, "unique_id 0\n"), "3": (13, None)}
    for name, (number, properties) in nodes.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "gpu_id").write_text(f"{number}\n")
        if properties is not None:  # the kernel does not let a forbidden one be read
            (tmp_path / name / "properties").write_text(properties)
    first, second = gpus.look({"JAX_PLATFORMS": "rocm"})
    assert first == "GPU-00000000000000ff"
    assert second.endswith(":kfd10")


def test_who_tells_jax_its_devices_is_left_alone(monkeypatch):
    monkeypatch.setattr("axonn_jax.core.compat.accelerator_expected", lambda: True)
    monkeypatch.setattr(gpus, "look", lambda environ: ("GPU-a",))
    assert gpus.visible_gpus() == ("GPU-a",)
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    assert gpus.visible_gpus() is None


@pytest.mark.parametrize(("processes", "chosen", "taken"), [(1, False, 1), (2, False, 1), (1, True, 1), (2, True, 0)])
def test_processes_that_may_share_a_gpu_do_not_each_take_nearly_all_of_it(monkeypatch, processes, chosen, taken):
    """Those whose user chose the GPUs; others never share one."""
    asked = []

    def interrupt(_):
        raise InterruptedError

    monkeypatch.setattr(initialize, "detect", lambda *_: World(0, processes, 1, None, "Slurm", ""))
    monkeypatch.setattr("axonn_jax.core.compat.accelerator_expected", lambda: True)
    monkeypatch.setattr("axonn_jax.core.compat.gpus_expected", lambda: True)
    monkeypatch.setattr("axonn_jax.core.compat.backends_started", lambda: False)
    monkeypatch.setattr("axonn_jax.core.distributed.initialize.raise_pinned_limit", lambda processes: None)
    monkeypatch.setattr("axonn_jax.core.distributed.initialize.raise_fraction", lambda: asked.append("fraction"))
    if chosen:
        monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "0")
    for name in ("_make_cpu_devices", "join"):
        monkeypatch.setattr(initialize, name, interrupt)
    with pytest.raises(InterruptedError):  # here jax would start
        initialize.start(GridShape(x=2))
    assert len(asked) == taken


RUN = """
import json, sys
import axonn_jax as ax
from axonn_jax.core.errors import UserError
from jax._src import xla_bridge
try:
    ax.init(**json.loads(sys.argv[1]))
except UserError as error:
    print(json.dumps(str(error)), flush=True)
    sys.exit()
except (RuntimeError, AssertionError):  # there is no GPU: jax was asked for its devices
    options = xla_bridge._options_from_jax_configs(sys.argv[2])
    print(json.dumps(options.get("visible_devices", "all")), flush=True)
"""


@pytest.fixture
def four_gpus(tmp_path):
    return gpu_environment(tmp_path, U[:4])


def told(text):
    """What ranks printed; Open MPI 4 puts lines of two behind each other."""
    lines = re.sub(r'(?<=[\]"])(?=[\["])', "\n", text).splitlines()
    return sorted((json.loads(line) for line in lines if line.startswith(("[", '"'))), key=str)


@pytest.mark.mpi
@pytest.mark.skipif(UNDER_MPIRUN[1].args[0], reason="no MPI; scripts/setup installs one")
@pytest.mark.parametrize(
    ("grid", "value", "expected"),
    [
        ({"x": 4}, None, [[0], [1], [2], [3]]),
        ({"pipe": 4}, ",".join(U[:4]), [[0], [1], [2], [3]]),
        (
            {"pipe": 2, "x": 2},
            "0,1",
            ["GPUs seen by ranks 0, 1, 2, 3 = 2: at least 4, 1 for each of 4 processes"] * 4,
        ),
    ],
)
def test_jax_is_told_by_index_under_mpirun(grid, value, expected, four_gpus):
    variables = four_gpus if value is None else {**four_gpus, CUDA: value}
    words = mpirun(4, sys.executable, "-c", RUN, json.dumps(grid), "cuda")
    done = subprocess.run(words, capture_output=True, text=True, env=variables, timeout=120)
    found = [line.split(";")[0] if isinstance(line, str) else line for line in told(done.stdout)]
    assert found == expected, done.stderr[-3000:]


def test_jax_is_told_by_index_where_no_mpi_connects_the_tasks(four_gpus):
    """As srun starts them, each with a GPU of its own that it alone can name."""
    gpus_of = [{**four_gpus, **task, CUDA: f"{U[at]},{U[at + 2]}"} for at, task in enumerate(slurm_tasks())]
    for done in together(lambda rank: [sys.executable, "-c", RUN, json.dumps({"x": 4}), "rocm"], gpus_of, 120):
        assert told(done.stdout) == [[0, 1]], done.stderr[-3000:]
