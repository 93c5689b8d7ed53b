"""Predicted memory beside the package's own accounting, and beside what XLA says of compiled steps."""

from dataclasses import replace

import jax
import optax
import pytest
from flax import nnx
from hlo.steps import compile_abstract, keep_recomputation

from axonn_jax.core.grid import GridShape, build_grid
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.memory.report import state_bytes
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.presets import preset
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.settings import MemoryConfig, TensorConfig
from axonn_jax.core.tensor import kernel_choice
from axonn_jax.core.tensor.params import split_module
from axonn_jax.planning import memory
from axonn_jax.planning.machines.machine_file import load_machine
from axonn_jax.planning.memory_model import MemoryModel
from axonn_jax.planning.request import Candidate, PlanRequest

SHAPE = preset("gpt-1.3b", layers=4, seq_len=512)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("apart", [False, True])
def test_state_is_that_of_the_accounting(precision, apart):
    """On one device, where nothing is replicated; with masters apart as with offload."""
    parts = split_module(nnx.eval_shape(lambda: Transformer(SHAPE, rngs=nnx.Rngs(0))))
    shapes = {name: p.shape for name, p in parts.params.items()}
    mesh, dtypes = build_grid(GridShape(), jax.devices()[:1]).mesh, precisions(precision, separate_masters=apart)
    real = state_bytes(shapes, parts.specs, parts.specs, mesh, dtypes, optax.adamw(1e-3), offload=apart)
    device = memory.device_state(SHAPE.params(), precision, offload=apart)
    assert device.total == real.device
    assert (memory.host_state(SHAPE.params(), precision) if apart else 0.0) == real.host


@pytest.mark.parametrize(
    ("grid", "microbatches", "split"),
    [
        (GridShape(), 1, False),
        (GridShape(), 2, False),
        (GridShape(data=2), 1, False),
        (GridShape(y=4), 1, True),
        pytest.param(GridShape(y=4, x=2), 2, True, marks=pytest.mark.slow),
    ],
)
def test_memory_of_recomputed_steps_is_within_five_per_cent(grid, microbatches, split):
    sequences = 2 * microbatches * grid.batch_shards
    program = compile_abstract(
        SHAPE, build_grid(grid, jax.devices()[: grid.devices]), optax.adamw(1e-3),
        sequences=sequences, microbatches=microbatches, memory=MemoryConfig(activations="full"),
        tensor=TensorConfig(scan_layers="yes"),
        comm=BlockComm(sequence_split=split),
    )  # fmt: skip
    found = program.memory_analysis()
    job = PlanRequest(SHAPE, load_machine("laptop"), sequences, "fp32", sequence_split=split)
    predicted = MemoryModel(job).memory(Candidate(grid, microbatches, "full")).total
    assert predicted == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.05)


@pytest.mark.parametrize("tied", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_memory_of_a_loss_in_parts_is_within_five_per_cent(monkeypatch, tied):
    """Four parts of 256 tokens. Measured: 0.98 times what XLA says."""
    monkeypatch.setattr(kernel_choice, "LOGITS_BYTES", 2**26)
    shape, sequences = replace(SHAPE, layers=2, tied=tied), 2
    program = compile_abstract(
        shape, build_grid(GridShape(), jax.devices()[:1]), optax.adamw(1e-3),
        sequences=sequences, memory=MemoryConfig(activations="full"),
        tensor=TensorConfig(scan_layers="yes"),
    )  # fmt: skip
    found = program.memory_analysis()
    job = PlanRequest(shape, load_machine("laptop"), sequences, "fp32")
    predicted = MemoryModel(job).memory(Candidate(GridShape(), 1, "full")).total
    assert predicted == pytest.approx(found.argument_size_in_bytes + found.temp_size_in_bytes, rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("gather", ["forward", "backward", "step"])
def test_memory_of_kept_weights_is_enough_and_not_a_fifth_too_much(gather):
    """Measured: 1.17, 1.03 and 1.12 times what XLA says."""
    grid = GridShape(z=4)
    program = compile_abstract(
        SHAPE, build_grid(grid, jax.devices()[: grid.devices]), optax.adamw(1e-3),
        sequences=16, microbatches=2, memory=MemoryConfig(activations="full", reshard_after=gather),
        tensor=TensorConfig(scan_layers="yes"),
        compiler_options=keep_recomputation(),
    )  # fmt: skip
    found = program.memory_analysis()
    job = PlanRequest(SHAPE, load_machine("laptop"), 16, "fp32")
    predicted = MemoryModel(job).memory(Candidate(grid, 2, "full", reshard_after=gather)).total
    assert 1 < predicted / (found.argument_size_in_bytes + found.temp_size_in_bytes) < 1.2
