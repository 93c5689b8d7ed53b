"""Version-dependent JAX names, gathered in this module only (jax 0.10.2 and later)."""

import importlib.util
import json
import pkgutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from importlib.metadata import entry_points
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr as ClosedJaxpr  # type: ignore[attr-defined]  # jax 0.12 has it for old users
from jax.extend.core import JaxprEqn

from axonn_jax.core.grid import MESH_AXES
from axonn_jax.core.hardware import AttentionDevice

_GATHER_MS = 120_000


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes over which `x` varies inside a manual region; empty outside one."""
    return varying_axes_of(jax.typeof(x))


def varying_axes_of(aval: object) -> frozenset[str]:
    """Return the axes over which an abstract value, such as a traced variable's, varies; see `varying_axes`."""
    if hasattr(aval, "manual_axis_type"):  # jax 0.10.2 and later
        return frozenset(aval.manual_axis_type.varying)
    return frozenset(getattr(aval, "vma", ()))


def without_varying(aval: Any, axes: Iterable[str]) -> object:
    """Return the abstract value with a type that no longer varies over `axes`."""
    if hasattr(aval, "manual_axis_type"):
        kind = aval.manual_axis_type
        return aval.update(manual_axis_type=kind.update(varying=kind.varying - frozenset(axes)))
    return aval.update(vma=aval.vma - frozenset(axes))


def attention_device(device: jax.Device, *, single_device: bool) -> AttentionDevice:
    """Return the traits of a jax device that determine its attention kernels.

    Args:
        device: The device.
        single_device: True if the program runs on this device only.
    """
    tokamax = importlib.util.find_spec("tokamax") is not None
    if device.platform not in ("gpu", "cuda", "rocm"):
        return AttentionDevice(device.platform, tokamax=tokamax, single_device=single_device)
    if "cuda" not in device.client.platform_version:
        return AttentionDevice("rocm")
    from jax._src.cudnn.fused_attention_stablehlo import check_cudnn_version

    try:
        cudnn = int(check_cudnn_version())
    except RuntimeError:  # jax finds no cuDNN
        cudnn = 0
    major, minor = map(int, device.compute_capability.split("."))
    return AttentionDevice("cuda", (major, minor), cudnn)


def part_of(closed: ClosedJaxpr, needed: Sequence[bool], *, all_inputs: bool = False) -> ClosedJaxpr:
    """Return the part of a traced function that computes the needed results.

    Args:
        closed: The traced function.
        needed: For each result, whether it is needed.
        all_inputs: True to keep inputs that the part does not read.
    """
    from jax._src.interpreters import partial_eval

    jaxpr, constants_read, _ = partial_eval.dce_jaxpr_consts(closed.jaxpr, list(needed), instantiate=all_inputs)
    return ClosedJaxpr(jaxpr, [value for value, read in zip(closed.consts, constants_read, strict=True) if read])


def function_of(eqn: JaxprEqn) -> Callable[..., list[object]]:
    """Return a differentiable function that evaluates an equation on its distinct inputs, literals excluded."""
    from jax.extend.core import DebugInfo, DropVar, Jaxpr, Literal, Var, jaxpr_as_fun

    inputs = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, Literal)))
    results = [Var(var.aval) if isinstance(var, DropVar) else var for var in eqn.outvars]
    body = Jaxpr(
        [], inputs, results, [eqn.replace(outvars=results)], eqn.effects, DebugInfo(eqn.primitive.name, "", None, None)
    )
    return jaxpr_as_fun(ClosedJaxpr(body, []))  # type: ignore[no-any-return]


def context_mesh() -> jax.sharding.Mesh | None:
    """Return the grid's mesh if `jax.set_mesh` set one; None inside a trace, or for any other mesh."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a trace, where parameters are abstract or created by the surrounding program
        return None
    return mesh if mesh.axis_names == MESH_AXES else None


def backends_started() -> bool:
    """True if jax has initialized its devices, after which their number is fixed."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def accelerator_expected() -> bool:
    """True if jax would look for an accelerator; does not initialize jax."""
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms:
        return platforms.split(",")[0] != "cpu"
    return bool(_plugins())


def gpus_expected() -> bool:
    """True if jax would look for GPUs; does not initialize jax."""
    platforms = getattr(jax.config, "jax_platforms", None)
    if platforms:
        return not {"cuda", "rocm", "gpu"}.isdisjoint(platforms.split(","))
    return any("cuda" in name or "rocm" in name for name in _plugins())


def _plugins() -> list[str]:
    """Return the names of jax's installed backends other than the CPU's."""
    try:
        import jax_plugins
    except ImportError:
        return []
    installed = (*pkgutil.iter_modules(jax_plugins.__path__), *entry_points(group="jax_plugins"))
    return [plugin.name for plugin in installed]


def gather(value: object, of: str) -> list[Any]:
    """Gather a value from every process of a `jax.distributed` world, ordered by rank.

    Args:
        value: This process's value, serializable as JSON.
        of: Name of the values; a process contributes only one value per name in its lifetime.

    Raises:
        RuntimeError: A process does not arrive.
    """
    from jax._src import distributed

    state, folder = distributed.global_state, f"axonn_jax/{of}/"
    client: Any = state.client
    client.key_value_set(f"{folder}{state.process_id:08d}", json.dumps(value), allow_overwrite=True)
    client.wait_at_barrier(folder, timeout_in_ms=_GATHER_MS)
    return [json.loads(text) for _, text in sorted(client.key_value_dir_get(folder))]


class FailingBarrier:
    """Barrier among the processes of a `jax.distributed` world that ends early if one of them has failed.

    The coordination service's barrier would wait until its timeout for a process that will never arrive. Values persist
    in the service, so barriers are numbered in the order in which each process creates them, and the values of one save
    are deleted when the next begins: a run of months would otherwise leave millions.
    """

    def __init__(self) -> None:
        from jax._src import distributed

        self._client: Any = distributed.global_state.client
        self._rank, self._size = jax.process_index(), jax.process_count()
        self._place = f"axonn_jax/barrier/{self._number()}"
        # No save yet. Other processes may be in the first save already, so its values must not be deleted.
        self._save = -1
        self._passed: Counter[str] = Counter()

    def _number(self) -> int:
        prefix = f"axonn_jax/barriers/{self._rank}/"
        number = len(self._client.key_value_dir_get(prefix))
        self._client.key_value_set(f"{prefix}{number}", "made")
        return number

    def begin(self, save: int) -> None:
        """Begin a save; a failure counts only for the save in which it happens.

        All processes must have finished the previous save.

        Args:
            save: Number of the save.
        """
        if self._rank == 0:
            self._client.key_value_delete(f"{self._place}/{self._save}/")
        self._save = save
        # Counts restart, since a process that failed did not reach the barriers after its failure.
        self._passed.clear()

    def fail(self, why: str) -> None:
        """Tell the other processes not to wait.

        Args:
            why: The reason; its first 500 characters appear in their errors.
        """
        self._client.key_value_set(f"{self._place}/{self._save}/failed/{self._rank}", why[:500], allow_overwrite=True)

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Wait until all processes have arrived.

        Args:
            key: Name of the barrier.
            timeout_ms: Timeout in milliseconds.

        Raises:
            RuntimeError: A process has failed; the message is its reason.
            TimeoutError: A process did not arrive in time.
        """
        # Orbax reuses a barrier's name for every batch of arrays in a save, so count its uses.
        self._passed[key] += 1
        folder = f"{self._place}/{self._save}/passed/{key}/{self._passed[key]}/"
        end = time.monotonic() + timeout_ms / 1000
        self._client.key_value_set(folder + str(self._rank), "here", allow_overwrite=True)
        while len(self._client.key_value_dir_get(folder)) < self._size:
            if failed := self._client.key_value_dir_get(f"{self._place}/{self._save}/failed/"):
                raise RuntimeError(failed[0][1])
            if time.monotonic() > end:
                raise TimeoutError(f"a process did not come within {timeout_ms / 1000:g} s")
            time.sleep(0.02)


def call_site(eqn: JaxprEqn, library: str) -> object:
    """Return the instruction of Python's outside of a library's folder that made an equation, None without one.

    A line may hold several calls, of which a branch within it takes one: the instruction tells them apart. Where jax
    keeps none, every equation has a site of its own, equal to no other.
    """
    traceback = getattr(eqn.source_info, "traceback", None)
    if traceback is None or not hasattr(traceback, "raw_frames"):
        return object()
    frames = zip(*traceback.raw_frames(), strict=True)
    return next(((code, at) for code, at in frames if not code.co_filename.startswith(library)), None)
