"""The fingerprint of the weights that a calibration is of, and how much of a cache Loki reads."""

import json
from dataclasses import asdict
from pathlib import Path

import grids
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tiny import LLAMA

import axonn_jax as ax
from axonn_jax import GridShape, UserError
from axonn_jax.inference.weights import load_model, of_model
from axonn_jax.loki.components import calibrate, check_weights, fingerprint
from axonn_jax.loki.options import LokiOptions

SHAPE = ax.models.ModelShape(**LLAMA | {"hidden": 48, "heads": 6})
RNG = np.random.default_rng(0)
CHANGES = {
    "heads in reverse order": lambda w: w[:, ::-1],
    "inputs permuted": lambda w: w[::-1],
    "negated": lambda w: -w,
    "doubled": lambda w: 2 * w,
    "trained": lambda w: w + 0.03 * jnp.std(w) * RNG.standard_normal(w.shape, np.float32),
    "one of its heads": lambda w: w.at[:, :8].set(w[:, 8:16]),
    "not finite": lambda w: w.at[0, 0].set(jnp.nan),
}


@pytest.fixture(scope="module")
def loaded():
    return of_model(ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)), grids.lay(GridShape()), "float32")


@pytest.fixture(scope="module")
def facts(loaded):
    weights = fingerprint(loaded.parts, loaded.params, SHAPE.kv_heads)
    return {"model": json.dumps(asdict(SHAPE)), "weights": json.dumps(weights)}


def test_components_are_those_of_all_keys_together():
    """Of two batches of unequal size, whose keys a function gives in place of a model."""
    rng = np.random.default_rng(0)
    keys = [rng.normal(3.0, [1, 2, 4], (rows, 5, 2, 3)) for rows in (1, 4)]

    def program(params, batch):
        own = keys[batch[0, 0]]
        return {"post": [(own.sum((0, 1)), np.einsum("bskd,bske->kde", own, own))]}

    found = calibrate(program, {}, [np.full((len(own), 5), number) for number, own in enumerate(keys)])["post"]
    whole = np.concatenate(keys).reshape(-1, 2, 3)
    np.testing.assert_allclose(found.means[0], whole.mean(0), rtol=1e-6)
    for head in range(2):
        vectors, variances = found.vectors[0, head], found.variances[0, head]
        np.testing.assert_allclose(vectors * variances @ vectors.T, np.cov(whole[:, head].T, bias=True), atol=1e-5)


@pytest.mark.parametrize("axes", [GridShape(), GridShape(y=2, x=2), GridShape(data=2)], ids=grids.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_same_weights_are_known_on_every_grid(facts, axes, dtype):
    made = load_model(ax.models.Transformer(SHAPE, rngs=nnx.Rngs(0)), grids.lay(axes), dtype)
    check_weights(facts, made.parts, made.params, Path("run"))


@pytest.mark.parametrize("change", CHANGES)
def test_other_weights_are_known(loaded, facts, change):
    name = "blocks.1.attention.qkv.kernel"
    params = {**loaded.params, name: CHANGES[change](loaded.params[name])}
    with pytest.raises(UserError, match="a calibration of these weights"):
        check_weights(facts, loaded.parts, params, Path("run"))


@pytest.mark.parametrize(("group", "share"), [(1, 0.34), (2, 0.56), (4, 1.0), (8, 1.88)])
def test_numbers_read_of_a_kv_heads_cache(group, share):
    """Beside those that a traced step gathers and multiplies, with a quarter of features and keys."""
    shape = ax.models.ModelShape(**LLAMA | {"hidden": 128 * 8, "heads": 8, "kv_heads": 8 // group})
    assert LokiOptions().share_read(shape) == pytest.approx(share, abs=0.005)
