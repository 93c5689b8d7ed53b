"""``axonn-jax calibrate``: benchmarks of this machine for `plan` and `simulate`."""

import json
import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from axonn_jax.cli.arguments import Arg, Positive
from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.distributed.gpu_limits import fraction, host_memory
from axonn_jax.core.documents import write_atomically
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape
from axonn_jax.core.tensor.kernel_choice import choose_form
from axonn_jax.core.terminal import counted, libraries_on_stderr
from axonn_jax.planning.cost_model.compute import usual_kernel
from axonn_jax.planning.machines.machine import (
    CollectiveTime,
    Device,
    Host,
    Machine,
    Matmul,
    MatmulShare,
    Messages,
    Network,
    Node,
    Platform,
)
from axonn_jax.planning.machines.machine_file import dumps_machine, loads_machine
from axonn_jax.version import __version__

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

_CPU_SIZES, _SIZES = (128, 256, 512, 1024), (512, 1024, 2048, 4096, 8192)
_CPU_TOKENS, _TOKENS = (1024, 1024), (8192, 4096)
_MESSAGES = (256, 1 << 18, 1 << 21)
_COLLECTIVES = (256, 1 << 12, 1 << 16, 1 << 18, 1 << 20)


@dataclass(frozen=True)
class Calibrate:
    """Measure this machine and write a machine file for `axonn-jax plan --machine FILE`.

    Measured are matmuls by size, attention, norms and activation functions, the optimizer, memory, collectives by kind,
    size, axis and bytes, pipeline messages, and copies between devices and host, all devices at work at once. Start
    `calibrate` like a run: one process, or `mpirun -n N axonn-jax calibrate --devices N`. Where devices share cores,
    the speed of each depends on their number. Nothing else should run meanwhile.
    """

    devices: Annotated[int | None, Arg(default="all; of CPUs, the cores", least=1)] = None
    """Devices of all processes together; in one process without accelerators, virtual ones."""
    out: Path = Path("machine.toml")
    """The machine file."""
    rounds: Positive = 5
    """Timed repetitions of everything; their median counts."""
    seq_len: Positive = 1024
    """Sequence length of the measured attention."""
    head_dim: Positive = 64
    """Features of a head."""
    json: bool = False
    """Print one JSON object instead of the table."""


def run(args: Calibrate) -> int:
    """Measure this machine, write the machine file and print the figures.

    Raises:
        UserError: A flag is wrong, or the number of devices is not the requested one.
    """
    out = args.out.absolute()
    if out.suffix != ".toml" or out.is_dir() or not (out.parent.is_dir() and os.access(out.parent, os.W_OK)):
        raise UserError("--out", str(args.out), "a .toml file that can be written, in a directory that exists")
    from axonn_jax.core.distributed.initialize import start

    with libraries_on_stderr():
        world, grid = start(GridShape(data=args.devices or _devices()))
        figures, machine = _measure(grid.mesh, world.size, args)
    text = dumps_machine(machine)
    loads_machine(text, args.out.stem)  # fail here rather than in the next `plan`
    if world.rank == 0:
        try:
            write_atomically(args.out, text.encode())
        except OSError as error:
            raise UserError("--out", str(args.out), f"a file that can be written; {error.strerror}") from None
        print(json.dumps(figures) if args.json else _table(figures))
        print(f"wrote {args.out}", file=sys.stderr)
    return 0


def _devices() -> int:
    from axonn_jax.core import compat

    # Ask jax only if it would find an accelerator: its number of CPU devices is fixed once it has started.
    if compat.accelerator_expected():
        import jax

        return jax.device_count()
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _measure(mesh: "Mesh", processes: int, args: Calibrate) -> tuple[dict[str, object], Machine]:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import Mesh

    from axonn_jax.cli.calibrate import device as on_device
    from axonn_jax.cli.calibrate import links
    from axonn_jax.core import compat

    def say(phase: str) -> None:
        if jax.process_index() == 0:
            print(f"measuring {phase}", file=sys.stderr, flush=True)

    all_devices = list(mesh.devices.flat)
    device = all_devices[0]
    cpu, rounds = computes_on_cores(device.platform), args.rounds
    full_mesh = Mesh(np.asarray(all_devices), ("all",))
    single_mesh = Mesh(np.asarray(jax.local_devices()[:1]), ("all",))
    dtypes = {"fp32": jnp.float32} if cpu else {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
    dtype, sizes = "fp32" if cpu else "bf16", _CPU_SIZES if cpu else _SIZES
    say("matmuls")
    matmuls = {name: on_device.matmul_rates(full_mesh, kind, sizes, rounds) for name, kind in dtypes.items()}
    peak = max(matmuls[dtype].values())
    lone_rate = 0.0
    # The first device works while all others wait: CPU devices share cores, and a lone one is faster.
    if jax.process_index() == 0 and len(all_devices) > 1:
        lone_rate = on_device.lone_matmul_rate(single_mesh, dtypes[dtype], sizes[-1], rounds)
    slower = max(1.0, on_device.largest(lone_rate, full_mesh) / matmuls[dtype][sizes[-1]])
    say("attention, norms and activation functions, the optimizer, memory")
    heads = max(1, 8192 // args.seq_len)
    target = compat.attention_device(device, single_device=True)
    figures = {
        "device": device.device_kind,
        "devices": len(all_devices),
        "processes": processes,
        "matmul_flops_per_s": matmuls,
        "lone_over_all": slower,
        "attention_share": on_device.attention_share(
            full_mesh, dtypes[dtype], peak, (1, args.seq_len, heads, args.head_dim), rounds
        ),
        "attention_kernel": choose_form("auto", target, dtypes[dtype].dtype.name, args.head_dim, args.seq_len).kernel,
        "light_bytes_per_s": on_device.light_rate(full_mesh, _CPU_TOKENS if cpu else _TOKENS, rounds),
        "update_bytes_per_s": on_device.update_rate(full_mesh, rounds),
        "memory_bytes_per_s": on_device.memory_rate(full_mesh, rounds),
        "launch_s": on_device.launch_seconds(full_mesh, rounds),
        "program_s": on_device.program_seconds(rounds),
        "host_bytes_per_s": on_device.host_rate(rounds),
    }
    collectives = []
    for inner, size, mesh_of_groups in links.group_meshes(all_devices):
        say(f"collectives of {size}, {inner} inside")
        for kind in links.KINDS:
            times = links.collective_seconds(kind, mesh_of_groups, _COLLECTIVES, rounds)
            collectives += [
                {"kind": kind, "inner": inner, "size": size, "bytes": moved, "seconds": seconds}
                for moved, seconds in times.items()
            ]
    say("messages")
    figures |= {
        "collectives": collectives,
        "messages": _messages(all_devices, processes, rounds),
        "versions": {"axonn_jax": __version__, "jax": jax.__version__},
    }
    return figures, _machine(figures, jax.local_devices()[0])


def _messages(devices: "list[jax.Device]", processes: int, rounds: int) -> dict[str, dict[str, float]]:
    # Empty where no message can be sent: with one device, or several processes without MPI.
    from axonn_jax.cli.calibrate import links
    from axonn_jax.pipe.channels.choice import choose

    if len(devices) < 2 or (processes > 1 and find_spec("mpi4py") is None):
        return {}
    name = choose("auto", processes)
    if name == "local":
        return {name: links.local_messages(devices, _MESSAGES, rounds)}
    return {name: links.mpi_messages(name, _MESSAGES, rounds)}


def platform_of(device: "jax.Device") -> dict[str, Any]:
    """Return the machine-file fields of a jax device from which plans choose the attention kernel."""
    from axonn_jax.core import compat

    attention = compat.attention_device(device, single_device=False)
    if attention.platform not in get_args(Platform):
        return {}
    return {"platform": attention.platform, "capability": float(".".join(map(str, attention.capability)))}


def _machine(figures: Mapping[str, Any], device: "jax.Device") -> Machine:
    # Without a pair of devices to measure, a link is as fast as a copy through memory.
    slower, count = figures["lone_over_all"], figures["devices"]
    matmuls = figures["matmul_flops_per_s"]
    peaks = {name: max(rates.values()) for name, rates in matmuls.items()}
    usual = "bf16" if "bf16" in matmuls else "fp32"
    collectives = tuple(CollectiveTime(**entry) for entry in figures["collectives"])
    pairs = [entry for entry in collectives if entry.kind == "all-reduce" and entry.size == 2 and entry.inner == 1]
    rate, latency = figures["memory_bytes_per_s"] / 2, figures["launch_s"]
    if pairs:  # in a group of two, an all-reduce sends its bytes once
        rate, latency = pairs[-1].bytes / pairs[-1].seconds, pairs[0].seconds
    pool = (device.memory_stats() or {}).get("bytes_limit", 0) / (fraction() if device.platform == "gpu" else 1)
    machine = Machine(
        name="calibrated",
        title=f"{count} x {figures['device']}, measured",
        sources=(
            f"axonn-jax calibrate {__version__} in {counted(figures['processes'], 'process')} on {platform.machine()}, "
            f"jax {figures['versions']['jax']}",
            "peaks are the best measured matmul rates; a node is taken to be all that was measured",
        ),
        device=Device(
            kind=str(figures["device"]),
            memory_bytes=float(pool or host_memory() / count),
            memory_bytes_per_s=figures["memory_bytes_per_s"] * slower,
            peak_fp32=slower * peaks["fp32"],
            peak_bf16=slower * peaks.get("bf16", 0.0),
            peak_fp16=slower * peaks.get("fp16", 0.0),
            attention=figures["attention_share"],
            launch_s=figures["launch_s"],
            program_s=figures["program_s"],
            **platform_of(device),
            light_bytes_per_s=figures["light_bytes_per_s"] * slower,
            update_bytes_per_s=figures["update_bytes_per_s"] * slower,
        ),
        matmul=Matmul(large=1.0),
        node=Node(count, rate, latency, count / slower),
        network=Network(rate, latency),
        host=Host(float(host_memory()), figures["host_bytes_per_s"]),
        messages=tuple(
            Messages(name, entry["per_s"], entry["latency_s"]) for name, entry in figures["messages"].items()
        ),
        matmuls=tuple(MatmulShare(size, rate / peaks[usual]) for size, rate in matmuls[usual].items()),
        collectives=collectives,
    )
    # The measured heads may have forced another kernel than plans assume, so the share would not apply.
    if figures["attention_kernel"] != usual_kernel(machine):
        machine = replace(machine, device=replace(machine.device, attention=0.0))
    return machine


def _table(figures: Mapping[str, Any]) -> str:
    processes = counted(figures["processes"], "process")
    lines = [
        f"{figures['devices']} x {figures['device']} in {processes}, all at work at once",
        "",
    ]
    for name, rates in figures["matmul_flops_per_s"].items():
        lines += [f"matmul {name} {size:>5}  {rate / 1e9:10,.1f} GFLOP/s a device" for size, rate in rates.items()]
    lines += [
        f"a device alone       {figures['lone_over_all']:10.2f} times that",
        f"attention            {figures['attention_share']:10.2f} of the matmul rate",
        f"norms, activations   {figures['light_bytes_per_s'] / 1e9:10,.1f} GB/s a device",
        f"optimizer            {figures['update_bytes_per_s'] / 1e9:10,.1f} GB/s a device",
        f"memory               {figures['memory_bytes_per_s'] / 1e9:10,.1f} GB/s a device",
        f"host                 {figures['host_bytes_per_s'] / 1e9:10,.1f} GB/s",
        f"an operation         {figures['launch_s'] * 1e6:10,.1f} us",
        f"a program            {figures['program_s'] * 1e6:10,.1f} us",
    ]
    for entry in figures["collectives"]:
        place = f"{entry['kind']:14} of {entry['size']}, {entry['inner']} inside"
        lines.append(f"{place:32} {entry['bytes'] / 1e3:10,.0f} kB {entry['seconds'] * 1e6:10,.0f} us")
    for name, entry in figures["messages"].items():
        lines.append(f"messages {name:23} {entry['per_s'] / 1e9:8.2f} GB/s, {entry['latency_s'] * 1e6:8,.0f} us")
    return "\n".join(lines)
