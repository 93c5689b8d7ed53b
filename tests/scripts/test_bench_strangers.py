"""The comparison behind the table of other people's models, on models that stand here."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from any_flax.compare import compare, run_plain
from any_flax.page import page
from any_flax.sources import SOURCES, Copies
from any_flax.strangers import Model, cross_entropy, language_model
from flax import linen, nnx

from axonn_jax.core.errors import UserError
from axonn_jax.core.grid import GridShape

IDS = np.arange(32, dtype=np.int32).reshape(8, 4)
GRID = GridShape(1, 2, 2, 1, 2)


def nnx_model():
    rngs = nnx.Rngs(0)
    return nnx.Sequential(nnx.Embed(128, 16, rngs=rngs), nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 128, rngs=rngs))


class Decoder(linen.Module):
    @linen.compact
    def __call__(self, ids):
        return linen.Dense(128)(linen.relu(linen.Dense(32)(linen.Embed(128, 16)(ids))))


@pytest.fixture(scope="module")
def models():
    module = replace(language_model(nnx_model, lambda m, ids: m(ids)), batch=IDS)

    def loss(params, ids):
        return cross_entropy(Decoder().apply({"params": params}, ids), ids)

    return {False: module, True: Model(lambda: Decoder().init(jax.random.key(0), IDS)["params"], loss, IDS)}


@pytest.mark.parametrize("is_linen", [False, True])
def test_layers_send_what_the_report_says_and_gradients_are_the_plain_ones(models, is_linen):
    plain = run_plain(models[is_linen], is_linen)
    found = compare(models[is_linen], is_linen, GRID, plain)
    assert 0 < plain.rounding < 1e-5
    assert found.loss < 1e-6
    assert found.gradient < 1e-5
    assert found.traffic.layers == found.traffic.reported > 0
    assert found.traffic.added  # the loss reduces over the split vocabulary
    assert 1 <= found.share < 1.1
    assert found.whole == ()


def test_a_wrong_gradient_and_one_that_is_no_number_are_found(models):
    plain = run_plain(models[False], False)
    name = "layers.1.kernel"
    off = replace(plain, gradients={**plain.gradients, name: 2 * plain.gradients[name]}, loss=2 * plain.loss)
    found = compare(models[False], False, GRID, off)
    assert (round(found.gradient, 3), found.where, round(found.loss, 3)) == (0.5, name, 0.5)
    broken = replace(plain, gradients={**plain.gradients, name: jnp.nan * plain.gradients[name]})
    found = compare(models[False], False, GRID, broken)
    assert (found.where, found.gradient != found.gradient) == (name, True)


def test_a_page_has_a_row_a_model_and_a_cell_a_grid():
    outcome = {
        "loss": 1e-7, "gradient": 2.3e-6, "share": 1.04,
        "traffic": {"reported": 100, "layers": 98.0, "added": {"split all-to-all y": 49.0}},
    }  # fmt: skip
    row = {
        "source": "flax lm1b", "kind": "text", "linen": True, "parameters": 12345, "rounding": 0.0,
        "outcomes": {"z4 y2": outcome, "data2 x4": {"failed": "ValueError: no"}},
    }  # fmt: skip
    text = page({"rows": {"m": row}, "grids": ["z4 y2", "data2 x4"], "command": "run", "versions": {"jax": "1"}})
    cells = "|m|text|12,345|1e-7|0|2e-6/1.04/0.98/0.33|fails: ValueError: no|split all-to-all y 100%|"
    assert cells in text.splitlines()
    assert "Of 1 pairs of model and grid (1 more fail), 1 have gradients" in text
    assert SOURCES["flax lm1b"].version in text


def test_a_missing_folder_is_one_line(tmp_path):
    with pytest.raises(UserError, match="--repositories"):
        Copies(tmp_path, tmp_path / "none").enter("bonsai")
