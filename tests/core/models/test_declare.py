"""The transformer's declaration beside its modules: names, shapes and layouts of parameters."""

from dataclasses import replace
from itertools import product

import grids
import pytest
from flax import nnx

from axonn_jax import GridShape, MoeConfig, UserError
from axonn_jax.core.models.block_comm import BlockComm
from axonn_jax.core.models.declared.transformer import describe
from axonn_jax.core.models.transformer import Transformer
from axonn_jax.core.models.vocabulary import fit_vocabulary
from axonn_jax.core.ops.costs import StepPolicy, collectives, saved_bytes
from axonn_jax.core.ops.layers import Place
from axonn_jax.core.tensor.params import split_module

MIXTRAL = replace(grids.LLAMA, experts=16, experts_per_token=2, expert_ffn=64)
SHAPES = {
    "gpt": replace(grids.GPT, vocab=509),
    "llama": grids.LLAMA,
    "qwen": replace(grids.LLAMA, qk_norm=True, bias="qkv"),
    "gemma2": replace(grids.LLAMA, norm="rmsnorm_1p", post_norms=True),
    "mixtral": MIXTRAL,
    "ted": replace(grids.GPT, experts=16, experts_per_token=1, expert_ffn=64, moe_every=2, moe_first=1),
    "deepseek": replace(MIXTRAL, shared_experts=1, router="sigmoid"),
}
COMMS = (BlockComm(), BlockComm(True, True), BlockComm(True), BlockComm(False, True), BlockComm(sequence_split=True))


def form(shape, split):
    dims = [tuple(dim) if isinstance(dim, tuple | list) else (dim,) if dim else () for dim in split]
    return tuple(shape), (*dims, *[()] * (len(shape) - len(dims)))


@pytest.mark.parametrize("name", SHAPES)
def test_declared_parameters_are_those_of_the_modules(name):
    shape, compared = SHAPES[name], 0
    for comm, (y, z) in product(COMMS, ((1, 1), (4, 2))):
        grid = GridShape(x=2, y=y, z=z)
        try:
            shape.check_grid(grid, sequence_split=comm.sequence_split)
            comm.check(shape, grid)
        except UserError:
            continue
        model = nnx.eval_shape(
            lambda comm=comm, grid=grid: fit_vocabulary(Transformer(shape, rngs=nnx.Rngs(0), comm=comm), grid)
        )
        parts = split_module(model)
        first, *blocks, last = describe(shape, Place(1, z, y, 2, shape.seq_len, 4, comm.sequence_split), comm)
        declared = {param.name: form(param.shape, param.split) for layer in (first, last) for param in layer.params}
        routed = [shape.moe is not None and shape.moe.is_routed(index) for index in range(shape.layers)]
        kinds = dict(zip((routed[index] for index, _ in shape.layer_kinds()), blocks, strict=True))
        for index in range(shape.layers):
            for param in kinds[routed[index]].params:
                declared[param.name.replace("blocks.", f"blocks.{index}.", 1)] = form(param.shape, param.split)
        assert declared == {key: form(param.shape, parts.specs[key]) for key, param in parts.params.items()}
        compared += 1
    assert compared >= 4


def test_shared_experts_that_gather_keep_the_gathered_stream():
    """The program names and keeps that gather under `save_collectives`; without it the widths of the matmuls count."""
    shape, sizes = SHAPES["deepseek"], {"expert": 1, "z": 1, "y": 1, "x": 2}
    kept = []
    for comm in (BlockComm(), BlockComm(mlp=True)):
        at = Place(1, 1, 1, 2, shape.seq_len, 4)
        block = describe(shape, at, comm)[1]
        kept.append(saved_bytes(block, "save_collectives", at.tokens, 4, sizes, entry=0.0))
    widths = shape.mlp_inputs * shape.expert_ffn
    assert kept[1] - kept[0] == 4 * (shape.hidden - widths)


def test_a_block_that_runs_again_communicates_up_to_the_last_result_that_a_gradient_reads():
    at = Place(1, 2, 2, 2, grids.GPT.seq_len, 4)
    rows = list(collectives(describe(grids.GPT, at, training=MoeConfig()), StepPolicy(activations="full")))
    again = [(name, kind) for name, phase, kind, *_ in rows if phase == "recompute"]
    assert ("blocks.attention.out", "all-reduce") in again
    assert ("blocks.mlp.down", "all-gather") in again
    assert ("blocks.mlp.down", "all-reduce") not in again
    assert not any(name in ("embedding", "head", "norm", "loss") for name, _ in again)
