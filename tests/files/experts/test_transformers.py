"""Routers and the balance of loads as transformers computes them, from what it gave."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_fixtures import ROUTED, stored

from axonn_jax.core.experts.router import balance_loss, route
from axonn_jax.core.experts.shape import ExpertShape
from axonn_jax.files.huggingface.families import shape_from_config

# A softmax or sigmoid, a sum of a few terms, a division: a few roundings each. The balance sums 24 tokens.
TOLERANCE = 8 * float(np.finfo(np.float32).eps)


@pytest.mark.parametrize("family", ROUTED)
def test_balance_of_one_sequence(family):
    """Theirs pools layers and tokens and is not divided by the choices of a token: for one of each it is k times ours.

    Ours is a sum over tokens.
    """
    given = stored(family)
    moe = shape_from_config(json.loads(str(given["config"]))).moe
    routing = route(jnp.asarray(given["router_logits"]), jnp.zeros(moe.experts), moe)
    mean = balance_loss(routing, moe, 1, sequence_split=False) / len(given["router_logits"])
    np.testing.assert_allclose(moe.per_token * mean, given["balance"], rtol=TOLERANCE)
    assert abs(float(mean) - 1) > 0.01  # far from even, where any formula gives 1


def deepseek():
    given = stored("deepseek_v3_router")
    config = json.loads(str(given["config"]))
    names = {
        "groups": "n_group",
        "groups_kept": "topk_group",
        "norm": "norm_topk_prob",
        "scale": "routed_scaling_factor",
    }
    chosen = {ours: config[theirs] for ours, theirs in names.items()}
    moe = ExpertShape(given["scores"].shape[1], config["num_experts_per_tok"], 1, router="sigmoid", **chosen)
    routing = route(jnp.asarray(given["scores"]), jnp.asarray(given["bias"]), moe)
    ranks = 1 / (1 + np.exp(-given["scores"])) + given["bias"]
    below = np.take_along_axis(ranks, given["choices"], 1).min(1) <= 0
    return given, routing, below


def test_router_of_deepseek_v3():
    """Scores of both signs: choices that rank below 0, too, are of groups that are kept."""
    given, routing, below = deepseek()
    assert 0.1 < below.mean() < 0.9
    order, want = np.argsort(routing.choices, 1), np.argsort(given["choices"], 1)
    choices, weights = (np.take_along_axis(np.asarray(a), order, 1) for a in routing[:2])
    np.testing.assert_array_equal(choices, np.take_along_axis(given["choices"], want, 1))
    np.testing.assert_allclose(weights, np.take_along_axis(given["weights"], want, 1), rtol=TOLERANCE)
