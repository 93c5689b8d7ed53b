"""What the places of a pipeline need on a device by their compiled programs: the pipelines of `plan_memory`."""

from math import prod
from typing import Any

import jax
from flax import nnx

from axonn_jax.grid import GridShape, build_grid
from axonn_jax.memory.precision import precisions
from axonn_jax.models.shape import ModelShape
from axonn_jax.models.transformer import Transformer
from axonn_jax.pipeline.build import plan
from axonn_jax.pipeline.reduction import Reduction
from axonn_jax.pipeline.stage import Stage
from axonn_jax.pipeline.trace import Work
from axonn_jax.schedule.policies import backwards, joins, live_bound, may_split
from axonn_jax.tensor.params import take_apart
from axonn_jax.train.check import check_pipeline
from axonn_jax.train.config import PipelineConfig


def measure_pipeline(
    shape: ModelShape, sizes: GridShape, microbatches: int, rows: int, activations: str, bucket: int = 16_000_000
) -> tuple[int, int]:
    """Bytes of weights and moments, and of all else at its most, at the place of the pipe that needs the most.

    All else are sums of gradients and, while tasks run, what microbatches in flight keep and the largest program's
    temporaries and results; behind the last task, the reduction's.
    """
    grid, dtypes = build_grid(sizes, jax.devices()[: sizes.devices]), precisions("fp32")
    config = PipelineConfig(in_flight=sizes.pipe, split_backward=may_split(True, activations))
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    layout, ranges = check_pipeline(sizes.pipe, microbatches, config, list(model.pieces))
    size = (rows * sizes.batch_shards, shape.seq_len + 1, microbatches)
    work = Work(*size, dtypes.compute, activations, dtypes.sums, dtypes.scaled)
    stages = plan(take_apart(model), grid, layout, ranges, work, keyed=False)
    found = []
    for place in sorted({0, 1, sizes.pipe - 1}):
        stage = Stage(
            *stages[place],
            backwards=backwards(config.policy, layout, config.split_backward),
            joins=joins(config.policy, layout),
        )
        sums = sum(_bytes(one) for one in stage.sums.values())
        arrived = 0 if stage.first else _bytes(stage.stretch.x)
        kept = stage.bytes_kept() // sizes.stage_devices
        live = live_bound(config.policy, layout, place, config.in_flight, config.split_backward)
        # While the first program of a microbatch runs, one less is kept; what it hands over takes its place.
        tasks = max(_beside(one) - (kept if name.startswith("F") else 0) for name, one in stage.programs.items())
        reduction = Reduction([stage], stage.parts.specs, bucket=bucket, borrowed=frozenset())
        found.append((2 * sums + sums, sums + max(live * (kept + arrived) + tasks, _beside(reduction.reduce))))
    return max(found, key=sum)


def _beside(program: Any) -> int:
    """Bytes that a program needs beside its arguments."""
    found = program.memory_analysis()
    return int(found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes)


def _bytes(struct: Any) -> int:
    """Of a device's part."""
    return prod(struct.sharding.shard_shape(struct.shape)) * int(struct.dtype.itemsize)
