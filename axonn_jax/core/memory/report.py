"""Memory report: bytes of a model's state by formula and as counted; a check that its numbers are finite."""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.tree_util import tree_leaves_with_path

from axonn_jax.core.backend.traits import computes_on_cores
from axonn_jax.core.documents import write_atomically
from axonn_jax.core.errors import UserError
from axonn_jax.core.memory.host_arrays import HOST, has_host_memory
from axonn_jax.core.memory.optimizer_traits import owner
from axonn_jax.core.memory.precision import Precisions
from axonn_jax.core.tensor.params import Specs

Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class StateBytes:
    """Bytes of model state per device; masters and moments are in host memory if `offloaded`."""

    weights: int
    gradients: int
    """Bytes of gradients, from the backward pass to the update."""
    masters: int
    moments: int
    offloaded: bool
    positions: int = 0
    """Positions of the remaining entries of pruned parameters."""
    resident: int = 0
    """Bytes of offloaded masters and moments that stay on the device."""

    @property
    def device(self) -> int:
        """Bytes in the device's memory."""
        return self.weights + self.positions + self.gradients + self.masters + self.moments - self.host

    @property
    def host(self) -> int:
        """Bytes in the host's memory."""
        return self.masters + self.moments - self.resident if self.offloaded else 0


def state_bytes(
    shapes: Shapes,
    specs: Specs,
    state_specs: Specs,
    mesh: Mesh,
    precisions: Precisions,
    optimizer: optax.GradientTransformation,
    *,
    offload: bool = False,
) -> StateBytes:
    """Return bytes per device by formula: elements of each kind of state times bytes per element.

    Scalars of the optimizer, such as a step count, are left out. Under Adam, with nothing replicated and P parameters
    per device, fp32 takes 16 P. So do bf16 and fp16 with float32 weights; with separate masters and float32 sums they
    take 18 P. With offload, the device has 4 P (sums in the compute dtype) or 6 P (float32 sums), and the host 12 P.
    Parameters with a role, such as a norm's, have 2 bytes more wherever the others have 2.

    Args:
        shapes: Global shapes of the trained parameters by name.
        specs: Layouts of the weights.
        state_specs: Layouts of gradients, masters and moments.
        mesh: Mesh of the parameters.
        precisions: Dtypes of the run.
        optimizer: Optimizer whose moments to count.
        offload: Whether masters and moments are in host memory.
    """
    weight_elements = _elements(shapes, specs, mesh)
    state_elements = _elements(shapes, state_specs, mesh)
    abstract = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    moments = 0
    for path, leaf in tree_leaves_with_path(jax.eval_shape(optimizer.init, abstract)):
        name = owner(path, abstract)
        if name is not None:
            # A factored moment does not have its parameter's shape and is replicated (`state_layout`).
            elements = state_elements[name] if leaf.shape == abstract[name].shape else leaf.size
            moments += leaf.dtype.itemsize * elements
    return StateBytes(
        weights=sum(precisions.weights_of(name).itemsize * count for name, count in weight_elements.items()),
        gradients=sum(precisions.sums_of(name).itemsize * count for name, count in state_elements.items()),
        masters=4 * sum(state_elements.values()) if precisions.master_weights else 0,
        moments=moments,
        offloaded=offload,
    )


def counted(arrays: Iterable[object], device: jax.Device) -> dict[str, int]:
    """Return the bytes of one device's shards by kind of memory, "device" and "host"; scalars are left out."""
    sums = {"device": 0, "host": 0}
    for array in arrays:
        if not isinstance(array, jax.Array) or array.ndim == 0:
            continue
        kind = "host" if array.sharding.memory_kind == HOST else "device"
        sums[kind] += sum(shard.data.nbytes for shard in array.addressable_shards if shard.device == device)
    return sums


def unused(mesh: Mesh, processes: int) -> int:
    """Return the bytes of one of this process's devices that were never in use; 0 if unknown.

    A device without separate memory gets its share of the host's available memory, as if all `processes` ran on this
    host.
    """
    # Count from the peak: what the largest program so far has used, its next run will use again.
    stats = mesh.local_devices[0].memory_stats() or {}
    if "bytes_limit" in stats and "peak_bytes_in_use" in stats:
        return max(0, stats["bytes_limit"] - stats["peak_bytes_in_use"])
    try:
        line = re.search(r"^MemAvailable:\s+(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    except OSError:
        line = None
    return 0 if line is None else int(line[1]) * 1024 // (processes * jax.local_device_count())


def check_resident(requested: int | None) -> None:
    """Raise ``UserError`` if `memory.resident` exceeds the memory of a device, where its size is known."""
    most = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit", 0)
    if requested is not None and 0 < most < requested:
        accepted = f"at most {most / 1e9:.4g}GB, which a device has for arrays"
        raise UserError("memory.resident", f"{requested / 1e9:.4g}GB", accepted)


def room(mesh: Mesh) -> int:
    """Return half of the bytes that every device of a mesh has never used, the same in all processes; 0 on CPUs.

    Collective if processes share the mesh: a minimum of one int32.
    """
    # The other half is reserved for later use: an evaluation, batches of another shape, microbatches in flight.
    if computes_on_cores(mesh.devices.flat[0].platform):
        return 0
    half = unused(mesh, 1) // 2
    if len({device.process_index for device in mesh.devices.flat}) == 1:
        return half
    layout = NamedSharding(mesh, P(mesh.axis_names))
    # In MiB, since the number of bytes overflows int32.
    halves = jax.make_array_from_callback((mesh.size,), layout, lambda _: np.full(1, half >> 20, np.int32))
    return int(jax.jit(jnp.min, out_shardings=NamedSharding(mesh, P()))(halves)) << 20


def all_finite(state: object) -> bool:
    """Return True if no array of a tree holds an infinity or a NaN; waits for the arrays.

    Device arrays are checked on their devices without a copy; of an array in host memory, each process checks its own
    shards. Collectives: an all-reduce of a scalar per sharded device array.
    """
    leaves = [leaf for leaf in jax.tree.leaves(state) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
    on_host = [leaf for leaf in leaves if leaf.sharding.memory_kind == HOST]
    # Wait for each result: CPU devices that share cores hang with many programs of collectives in flight.
    on_devices = [bool(_finite(leaf)) for leaf in leaves if leaf.sharding.memory_kind != HOST]
    shards = (shard for leaf in on_host for shard in leaf.addressable_shards if shard.replica_id == 0)
    return all(bool(np.isfinite(np.asarray(shard.data)).all()) for shard in shards) and all(on_devices)


@jax.jit
def _finite(array: jax.Array) -> jax.Array:
    return jnp.isfinite(array).all()


_KINDS = ("weights", "positions", "gradients", "masters", "moments", "resident")


def report(
    planned: StateBytes, counts: Mapping[str, int], mesh: Mesh, program: jax.stages.Compiled | None = None
) -> dict[str, object]:
    """Return bytes per device: planned, counted, and those of the step's compiled `program`, if any."""
    stats = mesh.local_devices[0].memory_stats() or {}
    analysis = None if program is None else program.memory_analysis()
    return {
        "planned": {
            **{kind: getattr(planned, kind) for kind in _KINDS},
            "device": planned.device,
            "host": planned.host,
        },
        "counted_between_steps": dict(counts),
        "program": {
            kind: int(getattr(analysis, f"{kind}_size_in_bytes"))
            for kind in ("argument", "output", "alias", "temp", "host_temp")
            if hasattr(analysis, f"{kind}_size_in_bytes")
        },
        "device_peak": stats.get("peak_bytes_in_use"),
        "host_memory": has_host_memory(mesh),
    }


def write(reports: Mapping[int, Mapping[str, object]], directory: Path, say: Callable[[str], None]) -> None:
    """Write the reports of a run's stages to memory.json in `directory`, and print the first one's lines."""
    try:
        write_atomically(directory / "memory.json", (json.dumps(reports, indent=1) + "\n").encode())
    except OSError as error:  # a report is not worth ending a run for
        say(f"warning: memory.json could not be written: {error.strerror or error}")
    for line in lines(next(iter(reports.values()))):
        say(line)


def lines(summary: Mapping[str, Any]) -> list[str]:
    """Return a report as lines of text."""
    planned = summary["planned"]
    where = "host" if planned["host"] else "device"
    if where == "host" and not summary["host_memory"]:
        where = "device: this backend has no host memory of its own"
    device_kinds = [kind for kind in ("weights", "positions", "gradients") if planned[kind] or kind != "positions"]
    kinds = ", ".join(f"{kind} {_size(planned[kind])}" for kind in device_kinds)
    states = ", ".join(f"{kind} {_size(planned[kind])}" for kind in ("masters", "moments"))
    counted = summary["counted_between_steps"]
    if planned["resident"] and planned["host"]:
        where = f"{where}, but {_size(planned['resident'])} of it on the device"
    text = [
        f"memory of a device: {kinds} (device); {states} ({where})",
        f"  counted between steps: {_size(counted['device'])} on the device, {_size(counted['host'])} on the host",
    ]
    if "temp" in summary["program"]:
        text.append(f"  temporaries of the compiled step: {_size(summary['program']['temp'])}")
    if summary["device_peak"] is not None:
        text.append(f"  peak of the device so far: {_size(summary['device_peak'])}")
    return text


def local_elements(shapes: Shapes, specs: Specs, mesh: Mesh) -> int:
    """Return the number of elements of all arrays on one device."""
    return sum(_elements(shapes, specs, mesh).values())


def _elements(shapes: Shapes, specs: Specs, mesh: Mesh) -> dict[str, int]:
    return {name: prod(NamedSharding(mesh, specs[name]).shard_shape(shape)) for name, shape in shapes.items()}


def _size(count: int) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count = count / 1000  # type: ignore[assignment]
    return f"{count:.3g} GB"
