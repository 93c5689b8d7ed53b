"""Grids, models and reference results that several tests share; compiled once a session."""

import functools
from dataclasses import replace
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import plain
from flax import nnx
from jax.sharding import NamedSharding

from axonn_jax.core.engines.program import StageProgram
from axonn_jax.core.grid import Grid, GridShape, build_grid
from axonn_jax.core.memory.host_arrays import materialize
from axonn_jax.core.memory.precision import Precisions
from axonn_jax.core.models.stacked import stack_layers, unstacked
from axonn_jax.core.settings import MemoryConfig
from axonn_jax.core.state.scanned import unstack_params
from axonn_jax.core.tensor.params import split_module
from axonn_jax.models import ModelShape, Transformer

EPS = float(np.finfo(np.float32).eps)
# Of the same sums in another order (test_parity measures them).
GRADIENT_TOLERANCE = 16 * EPS
SCALAR_TOLERANCE = 4 * EPS
CURVE_TOLERANCE = 2e-6  # of what some steps carry on of that (test_trainer measures it)
TINY = 1e-30  # of a gradient that is zero

# Every size divides by 8 where some grid of 8 devices splits it eight ways, over two axes at once included.
GPT = ModelShape(layers=2, hidden=32, heads=8, kv_heads=8, ffn=64, vocab=64, seq_len=16)
LLAMA = ModelShape(
    layers=2, hidden=64, heads=16, kv_heads=8, ffn=96, vocab=64, seq_len=16,
    positions="rope", norm="rmsnorm", mlp="swiglu", bias=False, tied=False,
)  # fmt: skip
MODELS = {"gpt": GPT, "llama": LLAMA}
MIXTRAL = replace(LLAMA, hidden=32, heads=8, ffn=64, experts=4, experts_per_token=2)
SPARSE = replace(GPT, experts=4, experts_per_token=1, expert_ffn=32, moe_every=2, moe_first=1, router_norm=False)
DEEPSEEK = replace(
    MIXTRAL, experts=8, shared_experts=1, expert_ffn=32,
    router="sigmoid", router_scale=2.5, router_groups=4, router_groups_kept=2,
)  # fmt: skip
DENSE_FIRST = replace(MIXTRAL, layers=3, moe_first=1)
EXPERTS = {"mixtral": MIXTRAL, "sparse": SPARSE, "deepseek": DEEPSEEK, "dense first": DENSE_FIRST}
"""Models with experts: Mixtral's, every second layer of a GPT (TED), DeepSeek-V3's router, all layers but the first."""


def is_load(name: str) -> bool:
    """Whether the gradient of a transformer's parameter is a count of its experts' tokens."""
    return name.endswith("router.bias")


def all_grids(*products: int) -> list[GridShape]:
    """Every `(data, z, y, x)` whose product is one of `products`."""
    sizes = [1, 2, 4, 8]
    grids = [GridShape(1, *axes) for axes in product(sizes, repeat=4)]
    return [grid for grid in grids if grid.devices in products]


def name(grid: GridShape) -> str:
    """A test id: data, expert where it is above one, z, y, x."""
    expert = f"e{grid.expert}" if grid.expert > 1 else ""
    return f"d{grid.data}{expert}z{grid.z}y{grid.y}x{grid.x}"


def lay(shape: GridShape) -> Grid:
    """The grid over the first virtual devices."""
    return build_grid(shape, jax.devices()[: shape.devices])


def over(*sizes: int) -> Grid:
    """The grid of these sizes of data, z, y and x."""
    return lay(GridShape(1, *sizes))


def make_model(shape: ModelShape, grid: Grid, seed: int = 0) -> Transformer:
    """The model, its parameters born sharded on the grid."""
    with jax.set_mesh(grid.mesh):
        return Transformer(shape, rngs=nnx.Rngs(seed))


@functools.cache
def host_params(shape: ModelShape) -> dict[str, np.ndarray]:
    """Parameters of a model made on one device, every bias and norm parameter moved off its 0 or 1."""
    params = split_module(make_model(shape, lay(GridShape()))).params
    return {
        name: np.asarray(value) + (0.1 * np.sin(np.arange(value.size) + len(name)) if value.ndim == 1 else 0)
        for name, value in sorted(params.items())
    }


def model_on(shape: ModelShape, grid: Grid, **layout) -> Transformer:
    """The model with `host_params`, laid out on the grid: no program of its own to compile."""
    model = nnx.eval_shape(lambda: Transformer(shape, rngs=nnx.Rngs(0), **layout))
    parts = split_module(model)
    params = {
        name: jax.device_put(value.astype(np.float32), NamedSharding(grid.mesh, parts.specs[name]))
        for name, value in host_params(replace(shape, dropout=0.0)).items()
    }
    return parts.merge(params)


def program_of(parts, grid: Grid, dtype="float32", sums="float32", **options) -> StageProgram:
    """The program of a model's gradients; `options` are of [memory], or the program's own."""
    of_memory = ("activations", "reshard_after", "bucket")
    memory = MemoryConfig(**{name: options.pop(name) for name in of_memory if name in options})
    dtypes = Precisions(jnp.dtype(dtype), jnp.dtype("float32"), jnp.dtype(sums), frozenset(parts.roles))
    return StageProgram(parts, grid, dtypes, memory, **options)


def gradients(shape: ModelShape, axes: GridShape, *, rows=None, dtype="float32", scanned=False, layout=None, **options):
    """Gradients, under the layers' own names, loss and norm of `model_on`, of two microbatches of `rows` or random ids.

    `layout` is a `Transformer`'s, `options` are a `StageProgram`'s; dropout where the shape has it.
    """
    grid = lay(axes)
    model = model_on(shape, grid, **(layout or {}))
    made = split_module(model)
    stack = stack_layers(model, made) if scanned else unstacked(made)
    program = program_of(stack.parts, grid, dtype, **options)
    params = stack.join(made.params, grid.mesh)
    rows = tokens(shape.vocab, 2, 8, shape.seq_len) if rows is None else rows.reshape(2, -1, rows.shape[-1])
    batch = jax.device_put(rows, program.batch_sharding())
    key = jax.random.key(3) if shape.dropout else None
    grads, loss, norm = jax.jit(program.gradients)(params, batch, key)
    for name, grad in grads.items():
        assert grad.dtype == jnp.float32
        assert grad.sharding.is_equivalent_to(NamedSharding(grid.mesh, program.grad_specs[name]), grad.ndim), name
    return (
        {name: np.asarray(g, np.float64) for name, g in materialize(unstack_params(stack, grads)).items()},
        float(loss),
        float(norm),
    )


@functools.cache
def reference(model: str):
    """What `gradients` gives for one of `MODELS`, of the plain model."""
    shape = (MODELS | EXPERTS)[model]
    batch = tokens(shape.vocab, 2, 8, shape.seq_len)
    loss, grads, norm = plain.reference(host_params(shape), shape, batch.reshape(-1, shape.seq_len + 1))
    return grads, loss, norm


@functools.cache
def one_device(shape: ModelShape):
    """`gradients` of one device."""
    return gradients(shape, GridShape())


def check_gradients(got, want, gradients=GRADIENT_TOLERANCE, scalars=SCALAR_TOLERANCE):
    """What `gradients` gives is alike: scalars relative, gradients relative to a parameter's largest entry."""
    (grads, loss, norm), (want_grads, want_loss, want_norm) = got, want
    assert abs(loss - want_loss) <= scalars * want_loss
    assert abs(norm - want_norm) <= scalars * want_norm
    assert grads.keys() == want_grads.keys()
    for name, grad in grads.items():
        if is_load(name):
            continue
        error = np.max(np.abs(grad - want_grads[name])) / max(np.max(np.abs(want_grads[name])), TINY)
        assert error <= gradients, f"{name}: {error / EPS:.0f} eps"


@functools.cache
def tokens(vocab: int, microbatches: int, sequences: int, seq_len: int) -> np.ndarray:
    """Random token ids [microbatches, sequences, seq_len + 1]."""
    return np.random.default_rng(1).integers(0, vocab, (microbatches, sequences, seq_len + 1), dtype=np.int32)
