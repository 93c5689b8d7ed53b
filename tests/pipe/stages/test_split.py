"""What a stage's programs hand over to one another, in bytes an element of the residual stream."""

from math import prod

import grids
import jax
import pytest
from flax import nnx

from axonn_jax.core.grid import GridShape
from axonn_jax.core.memory.precision import precisions
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import ModelShape, Transformer
from axonn_jax.pipe.schedule.tasks import PipelineShape
from axonn_jax.pipe.stages.build import plan
from axonn_jax.pipe.stages.partition_jaxpr import cut, keeps
from axonn_jax.pipe.stages.trace import StepShape, trace_forward_backward

LLAMA = ModelShape(
    layers=3, hidden=64, heads=4, kv_heads=2, ffn=160, vocab=128, seq_len=64,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False,
)  # fmt: skip
GPT = ModelShape(layers=3, hidden=64, heads=4, kv_heads=4, ffn=256, vocab=128, seq_len=64)


def handed(shape, precision):
    """Of a stage that is one block: elements of the stream's size after forward and input gradient, inputs included."""
    grid, dtypes = grids.lay(GridShape(pipe=2)), precisions(precision)
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0)))
    work = StepShape(2, shape.seq_len + 1, 4, dtypes.compute, "none", dtypes.grad_dtype)
    ranges = [range(3), range(3, 5), range(5, len(model.segments))]
    stages = plan(split_module(model), grid, PipelineShape(2, 4, 1), ranges, work, keyed=False)
    (group,) = stages[1]
    stretch = group.stretch
    traced = trace_forward_backward(stretch)
    free = [i for i, name in enumerate(traced.names) if name in stretch.parts.params]
    gradients = range(2, len(traced.closed.jaxpr.outvars))
    parts = cut(traced.closed, [[0], [1], gradients], free, keeps("none"))
    found = []
    for at in (1, 2):
        later = {pair for part in parts[at:] for pair in part.residual_inputs if pair[0] < at}
        inputs = {i for part in parts[at:] for i in part.inputs} - set(free)
        avals = [parts[source].residuals[position].aval for source, position in later]
        avals += [traced.closed.jaxpr.invars[i].aval for i in inputs]
        found.append(sum(prod(aval.shape) * aval.dtype.itemsize for aval in avals))
    return [bytes_ / (work.rows * shape.seq_len * shape.hidden * dtypes.compute.itemsize) for bytes_ in found]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_hands_over_each_operand_of_its_gradients_once(precision):
    """In the compute precision; what comes on top are float32 statistics of norms and of the softmax.

    After the forward, with `dy`: two streams, queries to values (of queries and keys with positions too), attention's
    result, the MLP's widths. After the input gradient: both operands of every product that gives a weight's gradient.
    """
    forward, waiting = handed(GPT, precision)
    assert 1 + 2 + 3 + 1 + 4 <= forward < (1 + 2 + 3 + 1 + 4) + 1
    assert 2 + 3 + 1 + 4 + 4 + 2 <= waiting < (2 + 3 + 1 + 4 + 4 + 2) + 0.5
    forward, waiting = handed(LLAMA, precision)
    assert 1 + 2 + 2 + 1.5 + 1 + 5 <= forward < (1 + 2 + 2 + 1.5 + 1 + 5) + 1
    assert 2 + 2 + 1 + 2.5 + 5 + 2 <= waiting < (2 + 2 + 1 + 2.5 + 5 + 2) + 0.5


def test_what_is_handed_over_gives_the_same_gradients():
    """The three parts, one after the other, against the whole function."""

    def whole(x, scale, kernel, dy):
        def forward(x, scale, kernel):
            wide = x.astype(jax.numpy.float32)
            normed = (wide * jax.lax.rsqrt(jax.numpy.mean(wide * wide, -1, keepdims=True) + 1e-5) * scale).astype(
                x.dtype
            )
            product = normed @ kernel.astype(x.dtype)
            return jax.nn.silu(product) * product

        y, pull = jax.vjp(forward, x, scale, kernel)
        return [y, *pull(dy)]

    rng = jax.random.split(jax.random.key(0), 4)
    x, dy = (jax.random.normal(key, (32, 16), "bfloat16") for key in rng[:2])
    scale, kernel = jax.random.normal(rng[2], (16,)), jax.random.normal(rng[3], (16, 16))
    inputs = (x, scale, kernel, dy)
    closed = jax.make_jaxpr(whole)(*inputs)
    parts = cut(closed, [[0], [1], [2, 3]], [1, 2])
    given, found = [], {}
    for part in parts:
        taken = [given[source][position] for source, position in part.residual_inputs]
        out, hand = part([inputs[i] for i in part.inputs], taken)
        given.append(hand)
        found.update(zip(part.outputs, out, strict=True))
    for number, value in enumerate(whole(*inputs)):
        assert jax.numpy.array_equal(found[number], value), number
    assert max(value.size for value in given[1]) <= x.size
