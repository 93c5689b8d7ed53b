"""Initialization of jax for a run: devices, `jax.distributed`, the grid's mesh, and the first collectives."""

import os
import platform
import re
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import gcd, prod

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from axonn_jax.core import compat, terminal
from axonn_jax.core.backend.cpu_allocator import keep_freed_memory
from axonn_jax.core.backend.traits import computes_on_cores, gives_up_on_late_peers
from axonn_jax.core.distributed import gpus
from axonn_jax.core.distributed.gpu_limits import raise_fraction, raise_pinned_limit
from axonn_jax.core.distributed.mpi_world import ask_mpi, check_same, meeting_place, world_comm
from axonn_jax.core.distributed.network import listen_at, offer, past_proxy
from axonn_jax.core.distributed.processes import MET, World, detect, explicit_world, slurm_notice
from axonn_jax.core.errors import UserError, typed_arguments
from axonn_jax.core.grid import BATCH_AXES, Grid, GridShape, build_grid, build_mesh

_HEARTBEAT_S, _BEHIND_OURS_S = 30, 60
"""Timeouts of jax's heartbeat, which ends a process within half to all of it without naming the missing one; the second
lets our heartbeat over MPI go first (`heartbeat.LOST_S`)."""
_PLATFORMS = "JAX_PLATFORMS"
_BIND = "JAX_COORDINATOR_BIND_ADDRESS"
"""jax's variable for the address on which a coordinator listens."""
_WARM_UP_FLOATS = 65_536


@typed_arguments
def init(
    *,
    pipe: int = 1,
    data: int = 1,
    expert: int = 1,
    z: int = 1,
    y: int = 1,
    x: int = 1,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> Grid:
    """Find this run's processes, start jax for them and return the grid, whose mesh becomes the current one.

    A single process on the CPU backend creates as many virtual devices as the grid needs. Under `mpirun` or `srun`, or
    with the last three arguments (or jax's variables of these names), `jax.distributed` connects the processes, unless
    the script has initialized it. Process 0 prints what was chosen and why.

    Args:
        pipe: Number of pipeline stages; `GridShape` describes this axis and the others.
        data: Number of replicas.
        expert: Parts of a mixture's experts.
        z: Parts of the batch and of every weight.
        y: Parts of heads, vocabulary and odd layers' outputs.
        x: Parts of the residual stream and odd layers' inputs.
        coordinator: Address of process 0, host:port.
        num_processes: Number of processes of the run.
        process_id: Rank of this process.

    Raises:
        UserError: The grid does not fit the devices, or two sources contradict each other.
    """
    arguments, explicit = (coordinator, num_processes, process_id), None
    if coordinator is not None and num_processes is not None and process_id is not None:
        explicit = explicit_world(coordinator, num_processes, process_id)
    elif any(value is not None for value in arguments):
        raise UserError("init", arguments, "coordinator, num_processes and process_id together, or none of them")
    world, grid = start(GridShape(pipe, data, z, y, x, expert=expert), explicit)
    say(world, describe(world, grid))
    return grid


def describe(world: World, grid: Grid) -> str:
    """Return a line about the processes (and where they were found), the devices and the grid."""
    device = grid.mesh.devices.flat[0]
    return f"{world}; {grid.shape.devices} x {device.device_kind} ({device.platform}){MET}{grid.shape}"


def start(shape: GridShape, explicit: World | None = None, settings: str = "") -> tuple[World, Grid]:
    """Start jax for the run's processes like `init`, without the line about them.

    Args:
        shape: The grid's shape.
        explicit: World of explicit arguments.
        settings: The run's configuration as text.

    Raises:
        UserError: Like `init`; in an MPI run also if processes differ in grid or settings, naming the first difference.
    """
    if not compat.accelerator_expected():
        keep_freed_memory()  # must precede the threads that MPI starts
    initialized = shape.pipe == 1 and jax.distributed.is_initialized()
    by_mpi = "mpi4py.MPI" in sys.modules  # already in use, for example by an earlier call
    world = detect(os.environ, ask_mpi, explicit, _initialized_world() if initialized and not by_mpi else None)
    if initialized and (world.rank, world.size) != (jax.process_index(), jax.process_count()):
        accepted = f"process {jax.process_index()} of {jax.process_count()}, as in the jax.distributed of the script"
        raise UserError("init", f"process {world.rank} of {world.size}, by {world.source}", accepted)
    if compat.accelerator_expected() and not compat.backends_started():
        raise_pinned_limit(-(-world.size // world.hosts))
        # With GPUs that the user assigned, several processes may share a device, so jax's own fraction stays.
        if compat.gpus_expected() and (world.size == 1 or not gpus.selected_by_user()):
            raise_fraction()
    # Before anything waits for a process that runs another program.
    if world.source == "MPI":
        check_same(f"grid = {shape}\n{settings}")
    notice = world.notice
    if not notice and world.source != "MPI" and hasattr(os, "sched_getaffinity"):  # bound by Slurm, not by mpirun
        cores = len(os.sched_getaffinity(0))
        notice = slurm_notice(os.environ, cores, on_cpus=not compat.accelerator_expected())
    say(world, notice)
    if world.size > 1 and shape.pipe > 1:
        return world, _start_stage(shape, world)
    if world.size == 1:
        if jax.distributed.is_initialized() and jax.process_count() > 1:
            accepted = f"a launch that MPI takes part in; jax.distributed has {jax.process_count()} processes, MPI one"
            raise UserError("grid.pipe", shape.pipe, accepted)
        _make_cpu_devices(shape.devices)
    else:
        if shape.devices % world.size:
            data = shape.data * world.size // gcd(world.size, shape.devices)
            accepted = f"a product that {world.size} processes divide, such as with grid.data = {data}"
            raise UserError("grid", shape, accepted)
        if not initialized:
            join(world)
        say(world, gpus.take(world.rank, shape.devices // world.size, partial(compat.gather, of="gpus")))
    grid = build_grid(shape, _devices(shape, world))._replace(rank=world.rank, size=world.size)
    if world.size > 1:
        _warm_up(grid.mesh)
    return world, grid


def _start_stage(shape: GridShape, world: World) -> Grid:
    """Start jax for this process's stage, alone or connected with the stage's other processes."""
    # Consecutive ranks form a stage, so its processes are close to each other.
    comm = world_comm(world)
    per_stage, remainder = divmod(world.size, shape.pipe)
    if remainder:
        accepted = f"a divisor of the {world.size} processes (each holds one stage or part of one)"
        raise UserError("grid.pipe", shape.pipe, accepted)
    if shape.stage_devices % per_stage:
        raise UserError(
            "grid", shape, f"stages of a multiple of {per_stage} devices, their number of processes, "
            f"not data*z*y*x = {shape.stage_devices}",
        )  # fmt: skip
    pp_rank, within = divmod(world.rank, per_stage)
    count = shape.stage_devices // per_stage
    _check_not_started()
    was_initialized = jax.distributed.is_initialized()
    if was_initialized:
        say(world, "the script's jax.distributed is shut down: each stage of a pipeline has its own")
        jax.distributed.shutdown()
    say(world, gpus.take(world.rank, count, comm.allgather))
    if per_stage == 1:
        if was_initialized:  # otherwise jax would keep counting the processes of the script's initialization
            join(replace(world, rank=0, size=1, hosts=1, coordinator=offer(1)))
        if not compat.accelerator_expected():
            jax.config.update("jax_num_cpu_devices", count)
    else:
        stage = comm.Split(pp_rank, world.rank)
        hosts, coordinator, on_host = meeting_place(stage)
        on_host.Free()
        stage.Free()
        join(replace(world, rank=within, size=per_stage, hosts=hosts, coordinator=coordinator))
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(devices) != shape.stage_devices:
        raise UserError(
            "grid", shape, f"data*z*y*x equal to the devices of a stage, which has {_counted(devices)} "
            f"in {terminal.counted(per_stage, 'process')}; this is {shape.stage_devices}",
        )  # fmt: skip
    mesh = build_mesh(shape, devices)
    if per_stage > 1:
        _warm_up(mesh)
    return Grid(shape, mesh, {pp_rank: mesh}, world.rank, world.size)


def gpu_views() -> list[gpus.View]:
    """Return the visible GPUs of every process of this launch by rank, for `axonn-jax doctor`. Collective."""
    world = detect(os.environ, ask_mpi)
    if world.size == 1:
        return [gpus.visible_gpus()]
    if world.source == "MPI":
        from mpi4py import MPI

        return MPI.COMM_WORLD.allgather(gpus.visible_gpus())
    join(world)
    return compat.gather(gpus.visible_gpus(), "gpus")


def say(world: World, notice: str) -> None:
    """Print a notice on rank 0, unless it is empty."""
    if notice and world.rank == 0:
        terminal.say(f"axonn_jax: {notice}")


def _make_cpu_devices(count: int) -> None:
    # A number that the user has set by XLA_FLAGS or jax's setting takes precedence, unless the flags give too few.
    flags = re.findall(r"--xla_force_host_platform_device_count=(\d+)", os.environ.get("XLA_FLAGS", ""))
    if flags and int(flags[-1]) >= count:
        return
    if not compat.backends_started() and getattr(jax.config, "jax_num_cpu_devices", -1) < 1:
        jax.config.update("jax_num_cpu_devices", count)


def _devices(shape: GridShape, world: World) -> Sequence[object]:
    try:
        devices = jax.devices()
    except (AssertionError, RuntimeError) as error:  # an empty AssertionError if the platform's plugin is missing
        unknown = isinstance(error, AssertionError) or "known backends" in str(error)
        requested = os.environ.get(_PLATFORMS)
        if world.size > 1 or not requested or not unknown:
            raise  # may be temporary: the device may be available when the run is restarted
        accepted = "cpu, or another platform that this installation has; `axonn-jax doctor` shows what there is"
        raise UserError(_PLATFORMS, requested, accepted) from error
    virtual = world.size == 1 and computes_on_cores(jax.default_backend())
    if virtual and len(devices) > shape.devices:
        return devices[: shape.devices]
    if len(devices) != shape.devices:
        where = f"{_counted(devices)} in {terminal.counted(world.size, 'process')}"
        hint = ""
        if virtual:
            hint = "; jax makes its CPU devices once: in a notebook restart the kernel and call init for the largest "
            hint += "grid first, in a script call it before any other use of jax, or set jax_num_cpu_devices"
        elif world.size == 1:
            hint = "; JAX_PLATFORMS=cpu rehearses any grid on virtual CPU devices"
        raise UserError("grid", shape, f"a product equal to the device count, {where}; this is {shape.devices}{hint}")
    # Sort by process first, so that `x`, the fastest axis, stays within a process if possible.
    return sorted(devices, key=lambda device: (device.process_index, device.id))


def _counted(devices: Sequence[jax.Device]) -> str:
    return terminal.counted(len(devices), f"{devices[0].platform} device")


def _initialized_world() -> World:
    hosts = len(set(compat.gather(platform.node(), "hosts")))
    why = f"initialised before, as process {jax.process_index()} of {jax.process_count()}"
    return World(jax.process_index(), jax.process_count(), hosts, None, "jax.distributed", why)


def _check_not_started() -> None:
    if compat.backends_started():
        raise UserError("init", "called after jax started", "a call before any other use of jax devices")


def join(world: World) -> None:
    """Connect the processes of a world with `jax.distributed`, one CPU device each; collective over them."""
    _check_not_started()
    if not compat.accelerator_expected():
        # One device per process: with several and many dispatches in flight, gloo deadlocks.
        jax.config.update("jax_num_cpu_devices", 1)
    # jax's preemption service would take SIGTERM away from the script's handler.
    jax.config.update("jax_enable_preemption_service", False)
    assert world.coordinator is not None
    say(world, past_proxy(world.coordinator, os.environ))
    jax.distributed.initialize(
        world.coordinator,
        world.size,
        world.rank,
        cluster_detection_method="deactivate",
        coordinator_bind_address=os.environ.get(_BIND) or listen_at(world.coordinator, world.hosts),
        heartbeat_timeout_seconds=_BEHIND_OURS_S if world.source == "MPI" else _HEARTBEAT_S,
        shutdown_timeout_seconds=_HEARTBEAT_S,
        initialization_timeout=120,
    )


def _warm_up(mesh: Mesh) -> None:
    # Connect every group of processes that a step uses, on backends that give up on peers that come late.
    if gives_up_on_late_peers(jax.default_backend()):
        for axes in (*((axis,) for axis in mesh.axis_names), BATCH_AXES, ("z", "y", "x")):
            meet(mesh, axes)


def meet(mesh: Mesh, axes: Sequence[str]) -> None:
    """Connect the groups of devices over these axes; collective, a reduce-scatter of 256 KiB a device for any group.

    gloo opens a group's sockets in the first collective and gives up if a member is 30 s late. The message has a size
    that suits its buffers: after a small reduce-scatter, every large all-reduce of the group is 150 times slower.

    Args:
        mesh: The mesh.
        axes: Axes of a group; axes of size one do not count.
    """
    over = tuple(axis for axis in axes if mesh.shape[axis] > 1)
    if not over:
        return
    count = prod(mesh.shape[axis] for axis in over)

    def scatter(x: jax.Array) -> jax.Array:
        return jax.lax.psum_scatter(jax.lax.pcast(x, over, to="varying"), over, tiled=True)

    with jax.set_mesh(mesh):
        run = jax.shard_map(scatter, mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(over))
        jax.block_until_ready(jax.jit(run)(jnp.ones((count * _WARM_UP_FLOATS,), jnp.float32)))
