"""Entry point of a training run: a checked config becomes a model, a trainer and a run directory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from axonn_jax.core import compat
from axonn_jax.core.adapters.config import trained_params
from axonn_jax.core.adapters.layers import with_adapters
from axonn_jax.core.backend.traits import computes_on_cores, fused_attention_expected
from axonn_jax.core.distributed.host_sync import HostSync, MpiSync, host_sync, only_run_in, together
from axonn_jax.core.distributed.initialize import describe, start
from axonn_jax.core.distributed.processes import World
from axonn_jax.core.engines.optimizer import make_optimizer
from axonn_jax.core.engines.spmd import SpmdEngine
from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import Grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.memory.report import unused
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.settings import TrainConfig
from axonn_jax.core.tensor.kernel_choice import AttentionForm, choose_form
from axonn_jax.core.tensor.params import key_of
from axonn_jax.core.terminal import say
from axonn_jax.files.data.corpora import Corpora
from axonn_jax.files.data.manifest import MANIFEST, Manifest, checksum
from axonn_jax.files.huggingface.entries import why_not_exported
from axonn_jax.pipe.channels.choice import choose
from axonn_jax.pipe.channels.mpi4jax import widen_pool
from axonn_jax.run.config import Config
from axonn_jax.run.config_file import to_toml
from axonn_jax.run.loop import Run
from axonn_jax.run.signals import StopSignals
from axonn_jax.run.validate import corpora_of, residual_comm_of
from axonn_jax.trainer import Trainer

_OVER = 1.5
"""Safety factor on the planner's memory per virtual device: measured 1.27 to 1.40 for 8 to 32 of them on two cores,
growing with their number."""


def train(config: Config) -> int:
    """Train a model and write its run directory; collective over the run's processes.

    Args:
        config: A configuration that `validate.check` has returned.

    Returns:
        The exit status: 0, or the one of `Run.go`.

    Raises:
        UserError: The grid does not fit the devices, another run holds the directory, or data or weights are unusable.
    """
    if config.grid.pipe > 1 and config.pipeline.channel == "mpi4jax":
        widen_pool()  # before jax starts, which fixes its number of threads
    world, grid = start(config.grid, settings=to_toml(config))
    sync = host_sync(grid)
    with only_run_in(config.log.dir, sync, say), grid.entered():
        return _train(config, world, grid, sync)


def _train(config: Config, world: World, grid: Grid, sync: HostSync) -> int:
    shape = config.model.shape()
    comm = residual_comm_of(config, shape)
    if world.size == 1 and computes_on_cores(jax.default_backend()):
        check_room(config, shape, unused(grid.mesh, 1))
    data = corpora_of(config.data)
    for corpus in data.all if config.data.verify else ():
        with corpus.error_context():
            verify_data(str(corpus.manifest.path), sync)
    lines = [str(comm)] if config.tensor.residual_comm != "all_reduce" else []
    form, kernel = attention_form(config, shape, grid, packed=data.packed), config.model.attention
    lines += _epochs(data, shape.seq_len, config.train)
    lines += [str(form)] if kernel != "auto" or fused_attention_expected(jax.default_backend()) else []

    if config.lora.adapts:
        lines.append(
            f"lora: {trained_params(shape, config.lora):,} parameters of adapters are trained, all others frozen"
        )
    why = why_not_exported(shape, biases_move=config.moe.balance_rate > 0) if shape.experts else ""
    lines += [f"note: `axonn-jax convert` cannot make a Hugging Face model of this run: {why}"] if why else []

    if grid.shape.pipe > 1:
        with together(sync):  # processes may have different cores and packages, and so fail one by one
            choose(config.pipeline.channel, grid.size)
    # Printed before arrays are allocated: a process that is killed there still leaves its settings in the log.
    if world.rank == 0:
        for line in (describe(world, grid), *lines):
            say(line)
    make = model_of(config, comm=comm, packed=data.packed)

    def model() -> Transformer:
        return with_adapters(make(), config.lora, config.train.seed) if config.lora.adapts else make()

    trainer = Trainer(
        model,
        make_optimizer(config.train),
        grid,
        microbatches=config.train.microbatches,
        clip=config.train.clip,
        ema=config.train.ema,
        seed=config.train.seed,
        memory=config.memory,
        tensor=config.tensor,
        pipeline=config.pipeline,
        prune=config.prune,
    )
    engine = trainer.engine
    # A pipeline has a heartbeat of its own. On one mesh the heartbeat's thread needs a second communicator, or its
    # messages would meet the main thread's collectives.
    if isinstance(engine, SpmdEngine) and isinstance(sync, MpiSync) and (another := sync.another()) is not None:
        engine.watch(another)
    run = Run(config, data, world, trainer, sync)
    peer_failed = engine.heartbeat.peer_failed if engine.heartbeat is not None else lambda: False
    with StopSignals(sync, peer_failed) as stop:
        status = run.go(stop)
        run.checkpoints.close()
        # Wait for everyone: launchers end all processes at the first exit, and rank 0 may still be writing.
        sync.gather("")
    trainer.close()
    return status


def check_room(config: Config, shape: ModelShape, free: int) -> None:
    """Check that virtual devices fit into this machine's memory, if there are more of them than cores.

    Args:
        config: The checked configuration.
        shape: Sizes of the model.
        free: Bytes that a device may take; 0: unknown, and nothing is checked.

    Raises:
        UserError: The planner predicts more than `free` bytes per device.
    """
    if config.grid.devices <= (os.cpu_count() or 1) or not free:
        return
    from axonn_jax.planning.machines.machine_file import load_machine
    from axonn_jax.planning.memory_model import MemoryModel
    from axonn_jax.planning.request import Candidate, PlanRequest

    train, memory = config.train, config.memory
    request = PlanRequest(
        shape, load_machine("laptop"), train.global_batch, "fp32",
        density=config.prune.density, moe=config.moe, sequence_split=memory.sequence_parallel,
        residual_comm=config.tensor.residual_comm, lora=config.lora, optimizer=train.stateful, average=train.ema > 0.0,
    )  # fmt: skip
    candidate = Candidate(
        config.grid, train.microbatches, memory.activations, config.pipeline.virtual_stages,
        memory.offload != "none", memory.zero, memory.reshard_after,
    )  # fmt: skip
    need, devices = MemoryModel(request).memory(candidate).total * _OVER, config.grid.devices
    if need > free:
        takes = f"{devices} virtual ones take up to {devices * need / 1e9:,.0f} GB of this machine's memory"
        accepted = f"fewer devices: {takes}, of which {devices * free / 1e9:,.1f} are free"
        raise UserError("grid", config.grid, f"{accepted}; `axonn-jax plan` needs no devices")


def _epochs(data: Corpora, seq_len: int, train: TrainConfig) -> list[str]:
    """Describe the rows and epochs of a run, and the fill of packed rows, one line each."""
    several, every = len(data.trained) > 1, data.rows(seq_len)
    lines = [f"{every:,} rows to train on: {train.steps:,} steps are {train.passes(every):.3g} epochs"]
    if train.warmup > train.steps:
        lines.append(f"train.warmup = {train.warmup} is longer than the run: the rate rises in all {train.steps} steps")
    epochs = data.epochs(train.steps * train.global_batch, seq_len)
    weights = sum(corpus.weight for corpus in data.trained)
    for corpus in data.trained:
        split, rows, name = corpus.manifest.splits["train"], corpus.manifest.rows("train", seq_len), ""
        if several:
            name = f"{corpus.name}: "
            share = corpus.weight / weights
            lines.append(f"{name}{share:.3g} of the rows drawn, {epochs[corpus.name]:.3g} epochs of {rows:,} rows")
        if data.packed:
            counted = (split.counted or 0) / max(split.tokens, 1)
            lines.append(f"{name}packed rows: {split.fill:.1%} filled, {counted:.1%} of the tokens are targets")
        if several and data.evaluated and not corpus.evaluated:
            lines.append(f"{name}nothing is held out: evaluations leave it out")
    return [*lines, *([] if data.evaluated else ["nothing of the data is held out: the run does not evaluate"])]


def model_of(config: Config, **options: Any) -> Callable[[], Transformer]:
    """Return a function that builds the model of a checked config.

    Args:
        config: The checked configuration.
        options: Further keyword arguments of `Transformer`.
    """
    arguments = {"attention": config.model.attention, "moe": config.moe, **options}
    return lambda: Transformer(config.model.shape(), rngs=nnx.Rngs(key_of(config.train.seed)), **arguments)


def attention_form(config: Config, shape: ModelShape, grid: Grid, *, packed: bool = False) -> AttentionForm:
    """Choose the attention kernel for the run's devices.

    Args:
        config: The checked configuration.
        shape: Sizes of the model.
        grid: The grid, whose first device stands for all.
        packed: True if rows hold several documents.

    Raises:
        UserError: The configured kernel cannot run on these devices.
    """
    device = compat.attention_device(grid.mesh.devices.flat[0], single_device=grid.mesh.devices.size == 1)
    dtype = precisions(config.memory.precision).compute.name
    rule = shape.attention_rule(0)
    return choose_form(config.model.attention, device, dtype, shape.head_dim, shape.seq_len, rule, packed=packed)


def verify_data(path: str, sync: HostSync) -> None:
    """Compare shards and tokenizer with their checksums; collective over all processes.

    Processes that see the same files, on one host or through a shared file system, each read a share of them; a host
    with its own copy reads all of that.

    Args:
        path: Directory of prepared data.
        sync: Host exchange between the processes.

    Raises:
        UserError: On all processes, if one of them finds a fault or has another data set.
    """
    status = (Path(path) / MANIFEST).stat()
    # Inode and times identify a shared file; two copies differ in them even if they were made the same way.
    file_id = f"{status.st_ino} {status.st_mtime_ns} {status.st_ctime_ns}"
    content = checksum(Path(path) / MANIFEST)
    everyone = [text.rpartition(" ") for text in sync.gather(f"{file_id} {content}")]
    for rank, (_, _, peer_content) in enumerate(everyone):
        if peer_content != everyone[0][2]:
            raise UserError("data.path", path, f"the same data on every process; ranks 0 and {rank} differ")
    sharing = [rank for rank, (file, _, _) in enumerate(everyone) if file == file_id]
    with together(sync):
        Manifest.load(path).verify(share=(sharing.index(sync.rank), len(sharing)))
