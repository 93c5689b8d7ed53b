"""Compiles steps on virtual CPU devices and prints, a line each, how their collectives compare with the predicted."""

import gc
import json
import os
import sys

import jax
from hlo.accounting import account

from axonn_jax.core.adapters.config import LoraConfig
from axonn_jax.core.experts.shape import MoeConfig
from axonn_jax.core.grid import GridShape
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.config import ModelShape
from axonn_jax.core.models.presets import preset
from axonn_jax.core.ops.costs import StepPolicy
from axonn_jax.planning.communication import StepSpec

os.environ["JAX_PLATFORMS"] = "cpu"


devices, cases = int(sys.argv[1]), json.load(sys.stdin)
jax.config.update("jax_num_cpu_devices", devices)
jax.config.update("jax_numpy_dtype_promotion", "strict")
gc.freeze()
gc.set_threshold(50_000, 20, 20)  # as conftest has it
for case in cases:
    model = case.pop("model")
    shape = preset(model.pop("preset"), **model) if "preset" in model else ModelShape(**model)
    comm = BlockComm(*map(bool, case.pop("comm")))
    grid, moe = GridShape(1, *case.pop("axes"), expert=case.pop("expert", 1)), MoeConfig(**case.pop("moe", {}))
    sequences, lora = case.pop("sequences"), LoraConfig(**case.pop("lora", {}))
    done = account(StepSpec(shape, grid, sequences, StepPolicy(**case), comm=comm, moe=moe, lora=lora))
    rows = [[row.kind, row.axes, float(row.predicted), float(row.compiled)] for row in done.rows]
    print(json.dumps({"exact": done.exact, "ratio": done.ratio, "rows": rows}), flush=True)
