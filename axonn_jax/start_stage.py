"""Starts jax for one stage of a pipeline of several processes: each stage is a world of its own."""

from dataclasses import replace
from typing import TYPE_CHECKING

from axonn_jax import gpus
from axonn_jax.errors import UserError
from axonn_jax.grid import Grid, GridShape, build_mesh
from axonn_jax.launch import World
from axonn_jax.network import offer
from axonn_jax.start import join, say, warm_up

if TYPE_CHECKING:
    from mpi4py import MPI


def start_stage(shape: GridShape, world: World) -> Grid:
    """Starts jax for this process's stage: alone, or joined with the stage's other processes.

    Ranks are dealt out stage by stage, so that a stage's processes are neighbours. Raises ``UserError`` where the
    processes do not divide into stages or MPI does not connect them all.
    """
    import jax

    from axonn_jax import compat

    comm = world_comm(world)
    per_stage, rest = divmod(world.size, shape.pipe)
    if rest:
        raise UserError(
            "grid.pipe", shape.pipe, f"a divisor of the {world.size} processes (each holds one stage or part of one)"
        )
    if shape.stage_devices % per_stage:
        raise UserError(
            "grid", shape, f"stages of a multiple of {per_stage} devices, their number of processes, "
            f"not data*z*y*x = {shape.stage_devices}",
        )  # fmt: skip
    place, within = divmod(world.rank, per_stage)
    devices = shape.stage_devices // per_stage
    if compat.backends_started():
        raise UserError("init", "called after jax started", "a call before any other use of jax devices")
    say(world, gpus.take(world.rank, devices, comm.allgather))
    if per_stage == 1:
        if not compat.accelerator_expected():
            jax.config.update("jax_num_cpu_devices", devices)
    else:
        stage = comm.Split(place, world.rank)
        on_host = stage.Split_type(_shared())
        hosts = stage.allreduce(int(on_host.Get_rank() == 0))
        offered = offer(hosts) if within == 0 else None
        own = replace(world, rank=within, size=per_stage, hosts=hosts, coordinator=stage.bcast(offered))
        on_host.Free()
        stage.Free()
        join(own)
    found = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    if len(found) != shape.stage_devices:
        raise UserError(
            "grid", shape, f"data*z*y*x equal to the devices of a stage, which has {len(found)} {found[0].platform} "
            f"device(s) in {per_stage} process(es); this is {shape.stage_devices}",
        )  # fmt: skip
    mesh = build_mesh(shape, found)
    if per_stage > 1 and jax.default_backend() == "cpu":
        warm_up(mesh)
    return Grid(shape, mesh, {place: mesh}, world.rank, world.size)


def world_comm(world: World) -> "MPI.Intracomm":
    """MPI's world, whatever launched the run; raises ``UserError`` where MPI does not see the run's processes."""
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise UserError(
            "grid.pipe", "above 1 in several processes",
            f"mpi4py, which carries the messages between stages ({error}); scripts/setup installs it",
        ) from None  # fmt: skip
    if MPI.COMM_WORLD.Get_size() != world.size:
        raise UserError(
            "grid.pipe", "above 1 in several processes",
            f"a launch that MPI takes part in (mpirun, or srun --mpi=pmix): MPI sees {MPI.COMM_WORLD.Get_size()} "
            f"process(es), {world.source} {world.size}",
        )  # fmt: skip
    return MPI.COMM_WORLD


def _shared() -> int:
    from mpi4py import MPI

    return MPI.COMM_TYPE_SHARED
